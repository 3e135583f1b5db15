"""Deterministic mode held to its word: requests alone, then in random company, and every logit compared bit for bit.

    python benchmarks/gpu_deterministic.py [--model FOLDER] [--json FILE]

100 requests run one by one over an empty cache. Then they run in batches of 64 under several settings: whole prompts
and chunks of several sizes, with and without a prefix cache, with CUDA graphs and without, and in a pool so small that
requests are preempted. Among them are second turns, whose beginning is another request's prompt and answer: alone it is
computed as a prompt, in a batch it is found in the cache as decode steps left it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.execution.device_sampler import DeviceSampler
from mini_sglang.execution.sampler import Sampled
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import Row

QWEN3_0_6B = Path(__file__).parent / "shapes" / "qwen3-0.6b"
BATCH = 64
ALONE: dict[str, Any] = {"cache": "naive", "num_pages": 4096}
TOGETHER: dict[str, dict[str, Any]] = {
    "whole prompts, cache": {"num_pages": 4096},
    "chunks of 200, cache, small pool": {"num_pages": 130, "max_prefill_tokens": 200},
    "chunks of 77, cache": {"num_pages": 4096, "max_prefill_tokens": 77},
    "chunks of 1000, no cache, no graphs": {
        "num_pages": 4096,
        "max_prefill_tokens": 1000,
        "cache": "naive",
        "cuda_graph_max_bs": 0,
    },
}
Logits = dict[tuple[int, int], torch.Tensor]  # (request, position of the token that is drawn from them) -> [vocab]


@dataclass
class Request:
    index: int  # also its seed
    prompt: list[int]
    params: SamplingParams
    answer: list[int] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[list[tuple[Row, torch.Tensor]]]:
    """The rows that steps launched in here sample, and their logits, which hold until the next launch."""
    step: list[tuple[Row, torch.Tensor]] = []
    complete = DeviceSampler.complete

    def recording(
        sampler: DeviceSampler,
        rows: list[Row],
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        on_host: memoryview[int] | None = None,
    ) -> Sampled:
        step.extend(zip(rows, logits, strict=True))
        return complete(sampler, rows, token_ids, logits, on_host)

    with mock.patch.object(DeviceSampler, "complete", recording):
        yield step


class RecordedEngine:
    """An engine that hands out the logits of every step."""

    def __init__(self, model: Path, **settings: Any) -> None:
        config = EngineConfig(
            model=str(model), load_format="dummy", context_length=2048, max_running_requests=BATCH, **settings
        )
        self.engine = Engine(config)
        self._request_of_slot: dict[int, int] = {}

    def run(self, requests: list[Request]) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Half of them come at once, the others one a step. Yields what each token is drawn from, and fills answers."""
        scheduler = self.engine.scheduler
        waiting = list(requests)
        for request in requests:
            request.answer = []
        by_id = {str(request.index): request for request in requests}
        while waiting or self.engine.has_work:
            arriving = len(waiting) - len(requests) // 2 if len(waiting) == len(requests) else 1
            for request in waiting[:arriving]:
                self.engine.add_request(str(request.index), request.prompt, request.params)
            del waiting[:arriving]
            scheduler.expected_output = 0.0  # admit boldly, so that a small pool overflows
            batch = scheduler.schedule()
            if batch is None:
                raise RuntimeError("nothing can be scheduled")
            self._request_of_slot |= {new.slot: new.seed for new in batch.new_requests}
            with recorded() as step:
                handle = self.engine.executor.launch(batch)
            for row, logits in step:
                yield (self._request_of_slot[row.slot], row.start + row.count), logits
            for output in scheduler.update(batch, handle.result()):
                by_id[output.request_id].answer += output.token_ids

    def close(self) -> None:
        self.engine.close()
        del self.engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def deterministic(model: Path = QWEN3_0_6B, requests: int = 100, **settings: Any) -> dict[str, Any]:
    """Compare every logit of `requests` requests alone with those in batches; `settings` are of every engine."""
    settings = {"deterministic": True, **settings}
    rng = random.Random(0)
    everyone, wanted = _alone(RecordedEngine(model, **{**settings, **ALONE}), requests, rng)
    compared, differing, figures = 0, 0, {}
    for name, changes in TOGETHER.items():
        engine = RecordedEngine(model, **{**settings, **changes})
        first = rng.sample(everyone, min(BATCH, requests))
        others = [request for request in everyone if request not in first]
        second = others + rng.sample(first, len(first) - len(others))
        for batch in (first, second):
            keys = {key for key in wanted if key[0] in {request.index for request in batch}}
            for key, logits in engine.run(batch):
                compared += 1
                differing += key not in keys or not torch.equal(logits, wanted[key])
                keys.discard(key)
            differing += len(keys)  # never computed
        stats = engine.engine.stats()
        figures[name] = {"cached_tokens": stats.num_cached_tokens, "preemptions": stats.num_preemptions}
        engine.close()
    return {
        "deterministic_equal": differing == 0,
        "compared": compared,
        "differing": differing,
        "requests": requests,
        "settings": figures,
    }


def _alone(engine: RecordedEngine, count: int, rng: random.Random) -> tuple[list[Request], Logits]:
    """Make and run `count` requests one after the other: first turns, then second turns that build on them."""
    vocab = engine.engine.model_config.vocab_size
    shared = [_tokens(rng, rng.randint(50, 500), vocab) for _ in range(5)]
    everyone: list[Request] = []
    wanted: Logits = {}
    for index in range(count):
        if index < count * 6 // 10:
            prompt = rng.choice([[], *shared]) + _tokens(rng, 1 + int(900 * rng.random() ** 3), vocab)
        else:
            before = everyone[index - count * 6 // 10]
            prompt = before.prompt + before.answer + _tokens(rng, rng.randint(1, 100), vocab)
        params = SamplingParams(  # with logprobs, every step is completed by the host, where the logits are recorded
            temperature=rng.choice([0.0, 0.8]),
            seed=index,
            max_tokens=rng.randint(40, 80),
            ignore_eos=True,
            logprobs=0,
        )
        request = Request(index, prompt, params)
        everyone.append(request)
        wanted |= {key: logits.clone() for key, logits in engine.run([request])}
    engine.close()
    return everyone, wanted


def _tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QWEN3_0_6B, help="folder with the config.json of a shape")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures = deterministic(arguments.model)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
