"""Records what the tour's figure plays: `python -m docs.figures.record_trace` writes trace.json beside this file.

It is the run of `mini-sglang learn play L0`, with every stage of every step instead of the first step's alone.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from course.L0_tour import play
from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.text.tokenizer import load_tokenizer
from mini_sglang.weights.hub import resolve_model

TRACE = Path(__file__).with_name("trace.json")
NUM_STAGES = 7
FIRST_OF_A_STEP = 4


class Recorder(play.Trace):
    """Keeps stages instead of printing them: number, where it happens, milliseconds, what was seen, what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[dict[str, Any]] = []

    def stage(self, name: str, where: str, **facts: object) -> None:
        self.number = self.number + 1 if self.number < NUM_STAGES else FIRST_OF_A_STEP
        shown = {label: str(value) for label, value in facts.items()}
        self.stages.append({"stage": self.number, "where": where, "ms": round(self.took_ms, 3), "facts": shown})
        if name == "tell":
            self.stages[-1]["says"] = ast.literal_eval(shown["text"])


def record() -> list[dict[str, Any]]:
    """Every stage of the run, in order. Needs the built-in model."""
    tokenizer = load_tokenizer(resolve_model("smollm2-135m"))
    engine = Engine(EngineConfig(dtype="float32", num_pages=64, num_threads=1), tokenizer)
    for _ in range(2):  # the first run of anything is slow in ways that are not the engine's
        engine.scheduler.flush_cache()
        recorder = Recorder()
        processor = play.arrive(recorder, engine, tokenizer)
        while engine.has_work:
            play.step(recorder, engine, tokenizer, processor)
    engine.close()
    return recorder.stages


def main() -> None:
    stages = record()
    lines = ",\n".join(json.dumps(stage, ensure_ascii=False) for stage in stages)
    TRACE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(stages)} stages in {TRACE}")


if __name__ == "__main__":
    main()
