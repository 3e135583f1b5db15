"""Three readers of one engine: a fast one, a slow one whose outputs are merged, and one that leaves.

AsyncEngine, its output queues and its messages are real. The engine process is played here: it gives each request a
letter every 40 ms, as a step would, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import sys
import time

import zmq.asyncio
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from mini_sglang.config import EngineConfig
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.ipc.messages import AbortRequest, AddRequest, EngineInfo, Outputs, decode_to_engine, encode
from mini_sglang.outputs import FinishReason, StepOutputs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.tokenizer import Tokenizer

STEP_S, ANSWER = 0.04, "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz"
console, began = Console(), time.perf_counter()


def main() -> None:
    asyncio.run(_serve())
    console.print("[dim]A slow reader costs the engine nothing. Of one that leaves it is told at once.[/]")


async def _serve() -> None:
    context = zmq.asyncio.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://play")
    there.connect("inproc://play")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(60)")
    info = EngineInfo(
        model="played", dtype="float32", device="cpu", vocab_size=127, context_length=99, page_size=16, num_pages=9,
        max_prompt_tokens=98, max_running_requests=4, eos_token_ids=[], pid=process.pid,
        config=EngineConfig(model="played"),
    )  # fmt: skip
    backend = Backend(models.BPE(vocab={chr(i): i for i in range(33, 127)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())
    engine = AsyncEngine(process, context, here, info, tokenizer)
    steps = asyncio.create_task(_play_engine(there))
    try:
        await asyncio.gather(
            _read(engine, "fast", "green", 0),
            _read(engine, "slow", "yellow", 0.35),
            _read(engine, "leaver", "cyan", 0, 6),
        )
    finally:
        steps.cancel()
        there.close(linger=0)
        await engine.close(timeout=0.1)


async def _read(engine: AsyncEngine, name: str, colour: str, pause_s: float, patience: int = 99) -> None:
    """Read a stream, resting `pause_s` after each output; leave after `patience` of them."""
    outputs = engine.generate([65], SamplingParams(), request_id=name)
    count = 0
    async for output in outputs:
        count += 1
        if pause_s or count <= 8 or output.finished:
            _note(f"{name:>8}", colour, f"{output.num_new_tokens} new: {output.text_delta!r}")
        elif count == 9:
            _note(f"{name:>8}", colour, "… and so on, one letter an output")
        if count == patience:
            break
        await asyncio.sleep(pause_s)
    await outputs.aclose()
    _note(f"{name:>8}", colour, f"had {count} outputs" + (" and leaves" if count == patience else ""))


async def _play_engine(socket: zmq.asyncio.Socket) -> None:
    """EngineLoop in miniature: all messages, then a step."""
    progress: dict[str, int] = {}
    while True:
        while await socket.poll(0):
            match decode_to_engine(await socket.recv()):
                case AddRequest(wire_id):
                    progress[wire_id] = 0
                case AbortRequest(wire_id, reason):
                    progress.pop(wire_id, None)
                    _note("engine", "red", f"{wire_id} is no longer wanted ({reason.value})")
        outputs = []
        for wire_id, done in list(progress.items()):
            is_last = done + 1 == len(ANSWER)
            output = TokenOutput(request_id=wire_id, token_ids=[ord(ANSWER[done])])
            output.finish_reason = FinishReason.LENGTH if is_last else None
            outputs.append(output)
            progress[wire_id] = done + 1
            if is_last:
                del progress[wire_id]
        if outputs:
            await socket.send(encode(Outputs(StepOutputs(others=outputs))))
        await asyncio.sleep(STEP_S)


def _note(who: str, colour: str, what: str) -> None:
    console.print(f"{(time.perf_counter() - began) * 1e3:6.0f} ms  [{colour}]{who:>8}[/]  {what}", highlight=False)


if __name__ == "__main__":
    main()
