"""AsyncEngine with a real engine process: the built-in model in float32, in a small context and a small pool."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.config import EngineConfig
from mini_sglang.errors import FieldError
from mini_sglang.ipc.async_engine import AsyncEngine, EngineDeadError, OutputQueue
from mini_sglang.outputs import FinishReason, RequestOutput, StepOutputs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer
from tests.tiny import Checkpoints

PROMPT = "The capital of France is"
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
CONTEXT_LENGTH = 512

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine in the module's event loop, which the engine belongs to."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[AsyncEngine]:
    fields: dict[str, Any] = {"dtype": "float32", "num_pages": 100, "max_prefill_tokens": 64, "num_threads": 1}
    engine: AsyncEngine = run(AsyncEngine.start(EngineConfig(context_length=CONTEXT_LENGTH, **fields)))
    yield engine
    run(engine.close())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def start(
    engine: AsyncEngine, prompt: str, params: SamplingParams, name: str = "r"
) -> AsyncGenerator[RequestOutput, None]:
    return engine.generate(engine.tokenizer.encode(prompt), params, request_id=name)


async def finish(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async for output in outputs:
        last = output
    assert last.finished
    return last


async def idle(engine: AsyncEngine) -> None:
    """The engine holds nothing but its cache."""
    assert engine.request_ids == []
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_pages) == (0, 0, 0)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def test_tokens_and_text_are_the_models(engine: AsyncEngine, run: Run) -> None:
    output = run(finish(start(engine, PROMPT, GREEDY)))
    assert output.text.startswith(" Paris.")
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.token_ids) == 20
    assert engine.tokenizer.decode(output.token_ids) == output.text


def test_streams_run_at_once_and_do_not_mix(engine: AsyncEngine, run: Run) -> None:
    prompts = [PROMPT, "1, 2, 3,", "Monday, Tuesday,", "def add(a, b):"]
    alone = [run(finish(start(engine, prompt, GREEDY))).text for prompt in prompts]

    async def together() -> list[str]:
        tasks = [finish(start(engine, prompt, GREEDY)) for prompt in prompts * 3]  # ids may repeat
        return [output.text for output in await asyncio.gather(*tasks)]

    assert run(together()) == alone * 3


def test_a_stop_string_frees_the_engine_too(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        before = await engine.stats()
        params = SamplingParams(temperature=0, ignore_eos=True, stop=["answer"])
        output = await finish(start(engine, PROMPT, params))
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "answer")
        assert output.text == " Paris.\n\nThe "
        await idle(engine)
        stats = await engine.stats()
        assert (stats.num_finished, stats.num_aborted) == (before.num_finished + 1, before.num_aborted)

    run(scenario())


def test_stop_strings_stay_on_this_side(engine: AsyncEngine, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    send = engine._send

    def note(message: Any) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(engine, "_send", note)
    params = SamplingParams(temperature=0, max_tokens=2, stop=["answer"])
    run(finish(start(engine, PROMPT, params)))
    assert sent[0].params == SamplingParams(temperature=0, max_tokens=2)


def test_leaving_early_aborts(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        before = await engine.stats()
        async with aclosing(start(engine, PROMPT, ENDLESS)) as outputs:
            await anext(outputs)
        task = asyncio.create_task(finish(start(engine, PROMPT, ENDLESS)))
        await until(lambda: len(engine.request_ids) == 1)
        task.cancel()
        await asyncio.wait((task,))
        await idle(engine)
        assert (await engine.stats()).num_aborted == before.num_aborted + 2

    run(scenario())


def test_abort_gives_what_there_is(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        texts = []
        async for output in start(engine, PROMPT, ENDLESS, "mine"):
            texts.append(output.text_delta)
            if len(texts) == 5:
                assert engine.request_ids == ["mine"]
                assert engine.abort("mine")
        assert output.finish_reason is FinishReason.ABORT
        assert output.text == "".join(texts)
        assert not engine.abort("mine")
        await idle(engine)

    run(scenario())


def test_a_slow_consumer_gets_everything_in_fewer_pieces(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        count, tokens, texts = 0, [], []
        async for output in start(engine, PROMPT, GREEDY):
            count += 1
            tokens += output.new_token_ids
            texts.append(output.text_delta)
            if count == 2:
                await until(lambda: engine.request_ids == [])
        assert count < 6
        assert tokens == output.token_ids
        assert "".join(texts) == output.text

    run(scenario())


def test_a_step_of_many_outputs_leaves_turns_of_the_event_loop_to_others(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        outputs = StepOutputs([f"nobody-{index}" for index in range(160)], [1] * 160)
        delivering = asyncio.create_task(engine._deliver_all(outputs))
        turns = 0
        while not delivering.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 10

    run(scenario())


def test_a_request_that_the_engine_refuses_leaves_the_others_alone(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        good = asyncio.create_task(finish(start(engine, PROMPT, GREEDY)))
        for prompt_ids, params, word in [
            ([], GREEDY, "prompt"),
            ([10**6], GREEDY, "prompt"),
            ([5] * CONTEXT_LENGTH, GREEDY, str(CONTEXT_LENGTH)),
            ([5], SamplingParams(temperature=-1), "temperature"),
            ([5], SamplingParams(stop_token_ids=[10**6]), "stop_token_ids"),
            (
                [5],
                SamplingParams(min_tokens=3, max_tokens=2),
                r"^min_tokens .* max_tokens \(2\), got 3$",
            ),
        ]:
            with pytest.raises(FieldError, match=word):
                await finish(engine.generate(prompt_ids, params, request_id="bad"))
        assert (await good).text.startswith(" Paris.")
        await idle(engine)

    run(scenario())


@pytest.mark.parametrize("length", [CONTEXT_LENGTH - 2, CONTEXT_LENGTH - 1])
def test_prompt_and_answer_never_exceed_the_context(engine: AsyncEngine, run: Run, length: int) -> None:
    for limit in (1, 2, 64):
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        output = run(finish(engine.generate([5] * length, params, request_id="r")))
        assert output.finish_reason is FinishReason.LENGTH
        assert output.usage.total_tokens == min(length + limit, CONTEXT_LENGTH)


def test_calls_reach_the_engine_loop_while_it_works(engine: AsyncEngine, run: Run) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(finish(start(engine, "A story:", SamplingParams(max_tokens=40, ignore_eos=True))))
        await until(lambda: len(engine.request_ids) == 1)
        await engine.ping()
        stats = await engine.stats()
        assert stats.num_running + stats.num_waiting == 1
        await task
        assert await engine.flush_cache() > 0
        assert (await engine.stats()).num_cached_pages == 0

    run(scenario())


def test_info_says_what_was_loaded(engine: AsyncEngine) -> None:
    info = engine.info
    assert (info.model, info.dtype, info.context_length, info.num_pages) == ("smollm2-135m", "float32", 512, 100)
    assert info.max_prompt_tokens == CONTEXT_LENGTH - 1
    assert alive(info.pid)


def test_an_engine_that_stops_answering_and_then_dies(run: Run, tmp_path: Path, checkpoints: Checkpoints) -> None:
    async def scenario() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(checkpoints.write().path), num_threads=1))
        running = asyncio.create_task(finish(start(engine, "a", ENDLESS)))
        await until(lambda: len(engine.request_ids) == 1)
        os.kill(engine.info.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=r"0\.2 s"):
            await engine.ping(timeout=0.2)
        call = asyncio.create_task(engine.stats())
        await asyncio.sleep(0)
        os.kill(engine.info.pid, signal.SIGKILL)
        assert "status -9" in str(await engine.wait_dead())
        for waiting in (running, call, finish(start(engine, "a", ENDLESS)), engine.ping(), engine.flush_cache()):
            with pytest.raises(EngineDeadError, match="status -9"):
                await waiting
        await engine.close()
        await engine.close()

    run(scenario())


LOSING_ITS_DEVICE = """#!{python}
import sys, torch
from mini_sglang.ipc.engine_process import main
from mini_sglang.execution.executor import Executor

def launch(executor, batch):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

Executor.launch = launch
sys.exit(main(sys.argv[-2], int(sys.argv[-1])))
"""


def test_an_engine_that_loses_its_device_ends_and_says_so(
    run: Run, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = tmp_path / "python"
    faulty.write_text(LOSING_ITS_DEVICE.format(python=sys.executable))
    faulty.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(faulty))

    async def scenario() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(checkpoints.write().path), num_threads=1))
        running = asyncio.create_task(finish(start(engine, "a", ENDLESS)))
        assert "illegal memory access" in str(await engine.wait_dead())
        with pytest.raises(EngineDeadError, match="illegal memory access"):
            await running
        await engine.close()
        assert not alive(engine.info.pid)

    run(scenario())


def test_closing_ends_the_process_even_a_stopped_one(
    run: Run, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="t") as folder:
            monkeypatch.setattr(tempfile, "tempdir", folder)
            engine = await AsyncEngine.start(EngineConfig(model=str(checkpoints.write().path), num_threads=1))
            assert os.listdir(folder) == []  # the socket has no name any more
        running = asyncio.create_task(finish(start(engine, "a", ENDLESS)))
        await until(lambda: len(engine.request_ids) == 1)
        os.kill(engine.info.pid, signal.SIGINT)  # the parent's to decide: ignored
        await engine.ping()
        os.kill(engine.info.pid, signal.SIGSTOP)
        await engine.close(timeout=0.1)
        assert not alive(engine.info.pid)
        with pytest.raises(EngineDeadError, match="closed"):
            await running

    run(scenario())


def test_what_keeps_an_engine_from_starting_is_said(run: Run, tmp_path: Path, checkpoints: Checkpoints) -> None:
    with pytest.raises((ValueError, OSError), match="nowhere"):
        run(AsyncEngine.start(EngineConfig(model=str(tmp_path / "nowhere"))))
    folder = checkpoints.write().path
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"llama"', '"invented"'))
    with pytest.raises(ValueError, match="invented"):
        run(AsyncEngine.start(EngineConfig(model=str(folder))))


def test_a_folder_too_deep_for_a_socket_is_named(
    run: Run, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(OSError, match=rf"{deep}.*set TMPDIR to a shorter path"):
        run(AsyncEngine.start(EngineConfig(model=str(checkpoints.write().path))))
    assert os.listdir(deep) == []


def test_a_model_without_an_end_token_refuses_grammars_alone(run: Run, checkpoints: Checkpoints) -> None:
    folder = checkpoints.write(eos_token_id=None).path
    for name in ("generation_config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, "eos_token_id": None, "eos_token": None}))

    async def scenario() -> None:
        engine = await AsyncEngine.start(EngineConfig(model=str(folder), num_threads=1))
        try:
            with pytest.raises(ValueError, match=r"^regex is not supported with this model: it has no end token$"):
                await finish(start(engine, "a", SamplingParams(regex="[0-9]+")))
            assert (await finish(start(engine, "a", GREEDY))).finish_reason is FinishReason.LENGTH
        finally:
            await engine.close()

    run(scenario())


def outputs_of(tokenizer: Tokenizer, text: str) -> list[RequestOutput]:
    processor = OutputProcessor(tokenizer, "r", 1, GREEDY)
    return [processor.push(TokenOutput(request_id="r", token_ids=[i])) for i in tokenizer.encode(text)]


def test_an_output_queue_holds_one_merged_output(builtin_tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        queue = OutputQueue()
        outputs = outputs_of(builtin_tokenizer, "The quick brown fox jumps over the lazy dog")
        for output in outputs[:4]:
            queue.put(output)
        first = await queue.get()
        assert (first.text_delta, first.num_new_tokens) == ("The quick brown fox", 4)
        for output in outputs[4:]:
            queue.put(output)
        queue.fail(ValueError("the end"))
        rest = await queue.get()
        assert first.text_delta + rest.text_delta == rest.text == outputs[-1].text
        assert first.new_token_ids + rest.new_token_ids == rest.token_ids
        with pytest.raises(ValueError, match="the end"):
            await queue.get()

    asyncio.run(scenario())
