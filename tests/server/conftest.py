"""What the server tests stand on: a scripted engine behind a real app, and servers that end with a module's tests."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.config import EngineConfig
from mini_sglang.ipc.messages import EngineInfo
from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.server.app import create_app
from mini_sglang.server.config import ServerConfig
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer
from tests.tiny import RunningServer, run_server
from tests.tiny import with_template as retemplated

CONTEXT_LENGTH = 512
PAGE_SIZE = 16
NUM_PAGES = 25  # 400 tokens, fewer than the context


class Call(NamedTuple):
    """What a route asked of the engine."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str
    priority: int
    client: str


class StartServer(Protocol):
    def __call__(self, *options: str) -> RunningServer: ...


class ScriptedEngine:
    """Answers every prompt with `tokens`, one at a time, over and over with ignore_eos; limits and stop strings hold.

    After `pause_after` tokens it waits until the request is aborted or left; after `fail_after` it gives an error.
    `error` is raised by every method that asks the engine.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = min(tokenizer.eos_token_ids)
        self.tokens = [*tokenizer.encode("Hello there, dear friend."), self.eos]
        self.pause_after: int | None = None
        self.fail_after: int | None = None
        self.error: Exception | None = None
        self.calls: list[Call] = []
        self.left_early: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.info = EngineInfo(
            model="scripted",
            dtype="float32",
            device="cpu",
            vocab_size=tokenizer.vocab_size,
            context_length=CONTEXT_LENGTH,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            max_prompt_tokens=NUM_PAGES * PAGE_SIZE,
            max_running_requests=4,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            pid=0,
            config=EngineConfig(model="scripted"),
        )

    @property
    def request_ids(self) -> list[str]:
        return list(self.running)

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        client: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        self.calls.append(Call(request_id, prompt_ids, params, cache_salt, priority, client))
        if self.error is not None:
            raise self.error
        processor = OutputProcessor(self.tokenizer, request_id, len(prompt_ids), params)
        aborted = self.running[request_id] = asyncio.Event()
        finished = False
        try:
            for count in itertools.count():
                await asyncio.sleep(0)
                if count == self.pause_after:
                    await aborted.wait()
                output = processor.push(self._token(request_id, count, params, prompt_ids))
                finished = output.finished
                yield output
                if finished:
                    return
        finally:
            del self.running[request_id]
            if not finished:
                self.left_early.append(request_id)

    def _token(self, request_id: str, count: int, params: SamplingParams, prompt_ids: list[int]) -> TokenOutput:
        if count == self.pause_after:  # and aborted
            return TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)
        if count == self.fail_after:
            error = "the step failed"
            return TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=error)
        token_id = self.tokens[count % len(self.tokens)]
        reason, prompt_logprobs = None, None
        if params.prompt_logprobs is not None and count == 0:
            prompt_logprobs = [scripted_logprobs(token, params.prompt_logprobs) for token in prompt_ids[1:]]
        if token_id == self.eos and not params.ignore_eos:
            reason = FinishReason.STOP
        elif count + 1 == params.max_tokens:
            reason = FinishReason.LENGTH
        return TokenOutput(
            request_id=request_id,
            token_ids=[token_id],
            logprobs=None if params.logprobs is None else [scripted_logprobs(token_id, params.logprobs)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
        )

    def abort(self, request_id: str) -> bool:
        if request_id in self.running:
            self.running[request_id].set()
        return request_id in self.running

    async def ping(self) -> None:
        if self.error is not None:
            raise self.error

    async def stats(self) -> SchedulerStats:
        await self.ping()
        fields: dict[str, Any] = dict.fromkeys(SchedulerStats.__struct_fields__, 0)
        return SchedulerStats(
            **{**fields, "num_pages": NUM_PAGES, "num_free_pages": NUM_PAGES, "step_sizes": [], "drafts": None}
        )

    async def flush_cache(self) -> int:
        await self.ping()
        return 3

    async def start_trace(self, num_steps: int | None = None) -> None:
        await self.ping()

    async def stop_trace(self) -> str:
        await self.ping()
        return "trace.json"


def scripted_logprobs(token_id: int, count: int) -> TokenLogprobs:
    """The token itself at -0.5, and as alternatives the first `count` ids from 1000 on, the last one impossible."""
    others = [-1.0 - index for index in range(count)]
    if others:
        others[-1] = float("-inf")
    return TokenLogprobs([token_id, *range(1000, 1000 + count)], [-0.5, *others])


@pytest.fixture
def engine(builtin_tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(builtin_tokenizer)


@pytest.fixture
def make_app(engine: ScriptedEngine, builtin_tokenizer: Tokenizer) -> Callable[..., FastAPI]:
    """`make_app(**fields of ServerConfig)`, or with another `tokenizer`."""

    def make(tokenizer: Tokenizer = builtin_tokenizer, **fields: Any) -> FastAPI:
        return create_app(engine, tokenizer, ServerConfig(**fields))

    return make


@pytest.fixture
def with_template(builtin_tokenizer: Tokenizer) -> Callable[[str], Tokenizer]:
    """`with_template(source)` → the built-in model's tokenizer with another chat template."""

    return functools.partial(retemplated, builtin_tokenizer)


@pytest.fixture
def write(engine: ScriptedEngine) -> Callable[[str], None]:
    """`write(text)` → the engine answers with it from now on."""

    def write(text: str) -> None:
        engine.tokens = [*engine.tokenizer.encode(text), engine.eos]

    return write


@pytest.fixture
def client(make_app: Callable[..., FastAPI]) -> TestClient:
    """A client of a server with default settings; an exception in a route is a 500, as for a real client."""
    return TestClient(make_app(), raise_server_exceptions=False)


@pytest.fixture
def serve(make_app: Callable[..., FastAPI]) -> Iterator[Callable[..., str]]:
    """`serve(**fields of ServerConfig)` → the address of a real HTTP server around the scripted engine."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(**fields: Any) -> str:
        server = uvicorn.Server(uvicorn.Config(make_app(**fields), port=0, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, daemon=True)
        servers.append((server, thread))
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Servers on free ports, killed when the module's tests are over."""
    with ExitStack() as servers:
        yield lambda *options: servers.enter_context(run_server(tmp_path_factory.mktemp("server") / "log", *options))


QUESTION = "Give an invented address as JSON."


def chat(server: RunningServer, **fields: Any) -> httpx.Response:
    response: httpx.Response = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}], **fields
    )
    return response


def contents(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


def complete(server: RunningServer, prompt: str, **fields: Any) -> str:
    response = server.post("/v1/completions", prompt=prompt, temperature=0, **fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])
