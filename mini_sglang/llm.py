"""`LLM`: the engine in this process, for scripts and notebooks. Text in, text out, no sockets.

Checks and tokenises prompts, steps the engine, and folds its tokens into text. It knows neither the scheduler nor any
tensor. An `LLM` belongs to one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mini_sglang.config import DEFAULT_MODEL, EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason, RequestOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import find_model

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Conversation = Sequence[Message]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(slots=True)
class _Running:
    """A request in the engine, with the outputs that its caller has not taken yet."""

    processor: OutputProcessor
    outputs: deque[RequestOutput] = field(default_factory=deque)

    @property
    def request_id(self) -> str:
        return self.processor.request_id


class LLM:
    """A model to generate with. `fields` are those of `EngineConfig`; a wrong one is a TypeError or ValueError.

        with LLM("smollm2-135m", dtype="float32") as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=20))
            print(output.text, output.usage)

    Ctrl-C during a call aborts that call's requests and leaves the model usable.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **fields: Any) -> None:
        config = EngineConfig(model=model, **fields)
        self.tokenizer: Tokenizer = load_tokenizer(find_model(config))
        self.engine = Engine(config, self.tokenizer)
        self._running: dict[str, _Running] = {}
        self._next_id = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt is a string or a list of token ids, `prompts` one of them or a list of them. `sampling_params` is for
        all, or a list with one for each.

        Raises ValueError, naming the prompt or the field, before any request runs.
        """
        prompt_list = _as_prompts(prompts)
        params = _as_params(sampling_params, len(prompt_list))
        names = ["prompt"] if len(prompt_list) == 1 else [f"prompts[{index}]" for index in range(len(prompt_list))]
        ids = [self._encode(prompt, name) for prompt, name in zip(prompt_list, names, strict=True)]
        return self._run_all(ids, params, names, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, rendered with the model's chat template.

        Messages are `{"role": ..., "content": ...}`; `template_arguments` go to the template (such as
        `enable_thinking`). Raises as `generate` does.
        """
        conversations = _as_conversations(messages)
        params = _as_params(sampling_params, len(conversations))
        ids = [self._render(conversation, name, template_arguments) for name, conversation in conversations.items()]
        return self._run_all(ids, params, list(conversations), progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt and yield an output whenever there is more of it; the last one is `finished`.

        Raises as `generate` does, when the first output is asked for. Closing the generator aborts the request.
        """
        ids = self._encode(prompt, "prompt")
        [request] = self._add_all([ids], _as_params(sampling_params, 1), ["prompt"])
        try:
            while True:
                while not request.outputs:
                    self._step()
                output = request.outputs.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._abort([request])

    def stream_chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None, **template_arguments: Any
    ) -> Generator[RequestOutput, None, None]:
        """`stream` for one conversation."""
        return self.stream(self._render(messages, "messages", template_arguments), sampling_params)

    def close(self) -> None:
        """Free the model. Calling it twice is fine; no other method may follow."""
        if not self._closed:
            self._closed = True
            self._abort(list(self._running.values()))
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self, messages: Conversation, name: str, template_arguments: Mapping[str, Any]) -> list[int]:
        if not _is_list(messages):
            raise FieldError(name, f"must be a list of messages, got {messages!r}")
        if not messages:
            raise FieldError(name, "must not be empty")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise FieldError(f"{name}[{index}]", f"must be a mapping with role and content, got {message!r}")
            role = message.get("role")
            if role not in ROLES:  # most templates would write any role into the prompt
                raise FieldError(f"{name}[{index}].role", f"must be one of {', '.join(ROLES)}, got {role!r}")
        return self.tokenizer.apply_chat_template(messages, **template_arguments)

    def _encode(self, prompt: Prompt, name: str) -> list[int]:
        if not isinstance(prompt, str):
            return _checked_ids(prompt, name)
        try:
            return self.tokenizer.encode(prompt)
        except FieldError as error:
            raise _of_prompt(name, error) from error

    def _run_all(
        self, prompt_ids: list[list[int]], params: list[SamplingParams], names: list[str], progress: bool
    ) -> list[RequestOutput]:
        requests = {request.request_id: request for request in self._add_all(prompt_ids, params, names)}
        finished: dict[str, RequestOutput] = {}
        try:
            with _progress(len(requests), enabled=progress) as report:
                while len(finished) < len(requests):
                    ours = [request for request in self._step() if request.request_id in requests]
                    outputs = [request.outputs.popleft() for request in ours]
                    finished |= {output.request_id: output for output in outputs if output.finished}
                    report(len(finished), sum(output.num_new_tokens for output in outputs))
        finally:
            self._abort(requests.values())
        return [finished[request_id] for request_id in requests]

    def _add_all(self, prompt_ids: list[list[int]], params: list[SamplingParams], names: list[str]) -> list[_Running]:
        """Queue all of the requests or, if one is refused, none."""
        if self._closed:
            raise ValueError("this LLM was closed")
        for ids, name in zip(prompt_ids, names, strict=True):
            if not ids:
                raise FieldError(name, "must hold at least one token, got none")
        for request_params, name in zip(params, names, strict=True):
            try:
                request_params.validate(self.engine.model_config.vocab_size)
                self.engine.check_grammar(request_params)
            except FieldError as error:
                raise error if len(names) == 1 else _of_prompt(name, error) from error
        requests: list[_Running] = []
        with _interrupt_deferred():
            for ids, request_params, name in zip(prompt_ids, params, names, strict=True):
                request_id = f"llm-{next(self._next_id)}"
                try:
                    self.engine.add_request(request_id, ids, request_params)
                except FieldError as error:
                    self._abort(requests)
                    raise error if len(names) == 1 else _of_prompt(name, error) from error
                request = _Running(OutputProcessor(self.tokenizer, request_id, len(ids), request_params))
                self._running[request_id] = request
                requests.append(request)
        return requests

    def _step(self) -> list[_Running]:
        """One engine step; returns the requests that got an output."""
        served = []
        with _interrupt_deferred():
            for token_output in self.engine.step():
                request = self._running.get(token_output.request_id)
                if request is None:  # ended by a stop string or aborted, while a step was under way
                    continue
                output = request.processor.push(token_output)
                request.outputs.append(output)
                served.append(request)
                if output.finished:
                    del self._running[token_output.request_id]
                    if token_output.finish_reason is None:
                        self.engine.abort(token_output.request_id, FinishReason.STOP)
        return served

    def _abort(self, requests: Iterable[_Running]) -> None:
        """End those of the requests that have not ended."""
        for request in requests:
            if self._running.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)


def _of_prompt(name: str, error: FieldError) -> FieldError:
    """The error of one prompt, with the name of the prompt in front."""
    return FieldError(f"{name}: {error.field}", error.problem, *error.others)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not _is_list(prompts):
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise FieldError("prompts", "must not be empty")
    if isinstance(prompts[0], Sequence):
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def _checked_ids(prompt: object, name: str) -> list[int]:
    if not isinstance(prompt, Sequence):
        raise FieldError(name, f"must be a string or a list of token ids, got {prompt!r}")
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise FieldError(name, f"must be a string or a list of token ids, got {token_id!r} in it")
    return list(prompt)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> dict[str, Conversation]:
    """Conversations by the names that errors use; what is no list of lists counts as one conversation."""
    if _is_list(messages) and messages and _is_list(messages[0]):
        return {f"messages[{index}]": conversation for index, conversation in enumerate(messages)}  # type: ignore[misc]
    return {"messages": messages}  # type: ignore[dict-item]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params):
        raise FieldError("sampling_params", f"must be SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        problem = f"must be one for all or one for each of {count} prompts, got {len(params)}"
        raise FieldError("sampling_params", problem)
    for item in params:
        if not isinstance(item, SamplingParams):
            raise FieldError("sampling_params", f"must be SamplingParams, got {item!r}")
    return list(params)


@contextlib.contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Hold a Ctrl-C back until the block is left, since an interrupted step would leave the engine half changed.

    A second one is not held back: that is for a step that hangs.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # no Python handler that could raise runs here
        return
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            handler(number, frame)
        received.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])


@contextlib.contextmanager
def _progress(total: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; call what it yields with (requests finished, new tokens)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.perf_counter()
    num_tokens = 0
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bar:
        task = bar.add_task("Generating", total=total)

        def report(num_finished: int, num_new_tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            rate = num_tokens / (time.perf_counter() - start)
            bar.update(task, completed=num_finished, description=f"Generating, {rate:.0f} tok/s")

        yield report
