"""One request through the seven stages, by the engine's own parts in one process, with what each hands to the next."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.ipc.messages import AddRequest
from mini_sglang.outputs import StepOutputs
from mini_sglang.server.generation import parse_prompt, to_sampling_params
from mini_sglang.server.native.bodies import GenerateBody
from mini_sglang.server.request_body import check_body
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import resolve_model

BODY = b'{"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, "logprobs": 3}'
PAUSE_S = 0.25


class Trace:
    """Prints one stage after the other, with the time that it took."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.number = 0
        self.took_ms = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.took_ms = (time.perf_counter() - began) * 1e3

    def stage(self, name: str, where: str, **facts: object) -> None:
        self.number += 1
        took = f"{self.took_ms:.2f} ms"
        self.console.print(f"[bold]{self.number} {name}[/]  [dim]{where}  {took}[/]")
        table = Table.grid(padding=(0, 2))
        for label, value in facts.items():
            table.add_row(f"    {label}", Text(str(value)))
        self.console.print(table)
        if self.console.is_terminal:
            time.sleep(PAUSE_S)


def main() -> None:
    trace = Trace()
    trace.console.print("loading the built-in model …\n", style="dim")
    source = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(source)
    engine = Engine(EngineConfig(dtype="float32", num_pages=64, num_threads=1), tokenizer)
    processor = arrive(trace, engine, tokenizer)
    step(trace, engine, tokenizer, processor)
    repeat(trace.console, engine, tokenizer, processor)
    engine.close()


def arrive(trace: Trace, engine: Engine, tokenizer: Tokenizer) -> OutputProcessor:
    """Stages 1 to 3; returns what will make text of the request's tokens."""
    with trace.timed():
        body = check_body(json.loads(BODY), GenerateBody)
        params, prompt = to_sampling_params(body.sampling_fields()), parse_prompt(body.prompt)
    trace.stage("route", "server/native/routes.py", body=BODY.decode(), becomes=msgspec.to_builtins(params))

    with trace.timed():
        prompt_ids = tokenizer.encode(str(prompt))
    pieces = " ".join(f"{token_id}={tokenizer.decode([token_id])!r}" for token_id in prompt_ids)
    trace.stage("tokenize", "text/tokenizer.py", text=repr(prompt), becomes=pieces)

    with trace.timed():
        wire = msgspec.msgpack.encode(AddRequest("r1", prompt_ids, params))
        message = msgspec.msgpack.decode(wire, type=AddRequest)
        engine.add_request(message.request_id, message.prompt_ids, message.params)
    trace.stage(
        "carry",
        "ipc/async_engine.py → ipc/engine_process.py",
        message=f"{len(wire)} bytes of msgpack, one queue behind",
    )
    return OutputProcessor(tokenizer, "r1", len(prompt_ids), params)


def step(trace: Trace, engine: Engine, tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    """Stages 4 to 7, once."""
    with trace.timed():
        batch = engine.scheduler.schedule()
    assert batch is not None
    rows = [f"slot {row.slot}: tokens {row.start} to {row.start + row.count - 1}" for row in batch.rows]
    pages = [f"slot {new.slot} gets pages {new.page_ids}" for new in batch.new_pages]
    pages = pages or ["no new ones"]
    trace.stage("schedule", "scheduling/scheduler.py", rows="; ".join(rows), pages="; ".join(pages), of="integers only")

    with trace.timed():
        handle = engine.executor.launch(batch)
    model = engine.model_config
    trace.stage(
        "compute", "execution/, models/, attention/, kernels/",
        tensors=f"{batch.num_tokens} ids and positions, {model.num_layers} layers, "
        f"keys and values to {batch.num_tokens} cells of {engine.config.page_size}-token pages",
        becomes=f"logits [1, {model.vocab_size}]: one number for every token there is",
    )  # fmt: skip

    with trace.timed():
        result = handle.result()
    [found] = result.logprobs
    assert found is not None
    best = [f"{tokenizer.decode([i])!r} {p:.2f}" for i, p in zip(found.token_ids[1:], found.logprobs[1:], strict=True)]
    token = f"{result.token_ids[0]}={tokenizer.decode(result.token_ids)!r}"
    trace.stage("sample", "execution/sampler.py", likeliest=", ".join(best), becomes=f"token {token}")

    with trace.timed():
        [output] = engine.scheduler.update(batch, result)
        answer = processor.push(output)
    reason = answer.finish_reason
    then = "an event to the client" if reason is None else f"the last event: finish_reason {reason.value}"
    trace.stage("tell", "text/output_processor.py, text/detokenizer.py", text=repr(answer.text_delta), then=then)


def repeat(console: Console, engine: Engine, tokenizer: Tokenizer, processor: OutputProcessor) -> None:
    """The rest of the answer: stages 4 to 7 again and again, one token each."""
    console.print("\nfrom here on stages 4 to 7 repeat, and each step computes the one token that is new:\n")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("step", "computes", "samples", "took", "text so far"):
        table.add_column(column)
    while engine.has_work:
        began = time.perf_counter()
        outputs: StepOutputs = engine.step()
        took = time.perf_counter() - began
        for output in outputs:
            answer = processor.push(output)
            position = answer.usage.prompt_tokens + answer.usage.completion_tokens - 2
            sampled = " ".join(repr(tokenizer.decode([token_id])) for token_id in output.token_ids)
            step = str(engine.stats().num_steps)
            table.add_row(step, f"token {position}", sampled, f"{took * 1e3:.0f} ms", repr(answer.text))
    console.print(table)
    console.print(f"\nfinish_reason {answer.finish_reason}, usage {answer.usage}", markup=False)
    engine.check()


if __name__ == "__main__":
    main()
