"""`LLM`: the engine in this process, for scripts and notebooks. Text in, text out, no sockets.

Checks and tokenises prompts, steps the engine, and folds its tokens into text. It knows neither the scheduler nor any
tensor. Threads take turns, a step each; a step serves the requests of all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mini_sglang.config import DEFAULT_MODEL, EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.errors import FieldError, shorten
from mini_sglang.outputs import FinishReason, RequestOutput, TokenOutput
from mini_sglang.sampling_params import MAX_SALT_LENGTH, PRIORITIES, SamplingParams
from mini_sglang.scheduling.speculation import Proposer
from mini_sglang.text.conversation import is_list, template_messages, template_tools
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.template_format import format_of
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.text.tool_prompt import render_chat
from mini_sglang.turns import Turns, signals_deferred
from mini_sglang.weights.hub import find_model

Prompt = str | Sequence[int]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Conversation = Sequence[Message]


@dataclass(frozen=True, slots=True)
class _Ask:
    """What one request of a call asks for. `name` is the prompt's in errors."""

    name: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class _Running:
    """A request in the engine. Its outputs go to the inbox of its call, whichever call's step they come from."""

    processor: OutputProcessor
    inbox: deque[RequestOutput]

    @property
    def request_id(self) -> str:
        return self.processor.request_id


class LLM:
    """A model to generate with. `fields` are those of `EngineConfig`; a wrong one is a TypeError or ValueError.

    A `proposer` of one's own drafts tokens in place of what `speculative` names.

        with LLM("smollm2-135m", dtype="float32") as llm:
            [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=20))
            print(output.text, output.usage)

    Any thread may call it, several at once: their requests run in the same steps. Within an iteration of a stream other
    calls may be made too; one from a signal handler that interrupts a step is a RuntimeError.

    Ctrl-C or another exception during a call ends that call's requests and leaves the model usable. SIGINT, SIGALRM and
    SIGTERM are handled between steps. An exception that tears a step apart all the same (a second Ctrl-C, the handler
    of another signal) ends the requests of all calls with an error, and the prefix cache is lost; with `tp` of 2 or
    more, the model is closed.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, proposer: Proposer | None = None, **fields: Any) -> None:
        config = EngineConfig(model=model, **fields)
        source = find_model(config)
        self.tokenizer: Tokenizer = load_tokenizer(source)
        self.engine = Engine(config, self.tokenizer, source=source, proposer=proposer)
        self._running: dict[str, _Running] = {}
        self._left: deque[str] = deque()  # requests whose call is over, which must end if they have not
        self._next_id = itertools.count()
        self._turns = Turns()
        self._closed: str | None = None  # why, once it is

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; outputs come in the order of the prompts.

        A prompt is a string or a list of token ids, `prompts` one of them or a list of them; no prompts, no outputs.
        `sampling_params`, `priority` and `cache_salt` are for all, or a list with one for each. With
        `schedule="priority"` smaller priorities run first; only requests with equal salts share cached prefixes.

        Raises ValueError, naming the prompt or the field, before any request runs.
        """
        prompt_list = _as_prompts(prompts)
        names = ["prompt"] if len(prompt_list) == 1 else [f"prompts[{index}]" for index in range(len(prompt_list))]
        ids = map(self._encode, prompt_list, names)
        return self._run_all(_make_asks(names, ids, sampling_params, priority, cache_salt), progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | Sequence[str] = "",
        progress: bool = True,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them, rendered with the model's chat template.

        Messages are those of `/v1/chat/completions`: content may be text, a list of text parts or, beside tool calls,
        None. `tools` are those of that route too, or Python functions; a model whose template does not know tools is
        told of them in its system message. Other `template_arguments` go to the template (such as `enable_thinking`).
        The rest is as in `generate`, which raises the same errors.
        """
        conversations = _as_conversations(messages)
        ids = (self._render(conversation, name, template_arguments) for name, conversation in conversations.items())
        asks = _make_asks(list(conversations), ids, sampling_params, priority, cache_salt)
        return self._run_all(asks, progress)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt and yield an output whenever there is more of it; the last one is `finished`.

        Raises as `generate` does, when the first output is asked for. Closing the generator aborts the request.
        """
        asks = _make_asks(["prompt"], [self._encode(prompt, "prompt")], sampling_params, priority, cache_salt)
        inbox: deque[RequestOutput] = deque()
        requests: list[_Running] = []
        try:
            self._add_all(asks, inbox, requests)
            while True:
                for output in self._next_outputs(inbox):
                    yield output
                    if output.finished:
                        return
        finally:
            self._leave(requests)

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **template_arguments: Any,
    ) -> Generator[RequestOutput, None, None]:
        """`stream` for one conversation."""
        ids = self._render(messages, "messages", template_arguments)
        return self.stream(ids, sampling_params, priority=priority, cache_salt=cache_salt)

    def close(self) -> None:
        """Free the model. Calling it twice is fine; no other method may follow, and calls under way end in an error."""
        with signals_deferred(), self._turns.turn():
            if self._closed is None:
                self._closed = "this LLM was closed"
                self._left.extend(self._running)
                self._end_left()
                self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _render(self, messages: Conversation, name: str, template_arguments: Mapping[str, Any]) -> list[int]:
        tools = template_tools(template_arguments.get("tools"), "tools")
        arguments = {key: value for key, value in template_arguments.items() if key != "tools"}
        form = format_of(self.tokenizer)
        return render_chat(self.tokenizer, template_messages(messages, name), tools, form, **arguments)

    def _encode(self, prompt: Prompt, name: str) -> list[int]:
        if not isinstance(prompt, str):
            return _checked_ids(prompt, name)
        try:
            return self.tokenizer.encode(prompt)
        except FieldError as error:
            raise _of_prompt(name, error) from error

    def _run_all(self, asks: list[_Ask], progress: bool) -> list[RequestOutput]:
        inbox: deque[RequestOutput] = deque()
        requests: list[_Running] = []
        finished: dict[str, RequestOutput] = {}
        try:
            self._add_all(asks, inbox, requests)
            with _progress(len(requests), enabled=progress and bool(asks)) as report:
                while len(finished) < len(requests):
                    outputs = self._next_outputs(inbox)
                    finished |= {output.request_id: output for output in outputs if output.finished}
                    report(len(finished), sum(output.num_new_tokens for output in outputs))
        finally:
            self._leave(requests)
        return [finished[request.request_id] for request in requests]

    def _add_all(self, asks: list[_Ask], inbox: deque[RequestOutput], requests: list[_Running]) -> None:
        """Queue requests and append them to `requests`, whose caller ends them in any case: here one may be refused."""
        with self._turn():
            for ask in asks:
                if not ask.prompt_ids:
                    raise FieldError(ask.name, "must hold at least one token, got none")
                with _naming(ask, alone=len(asks) == 1):
                    ask.params.validate(self.engine.model_config.vocab_size)
                    self.engine.check_grammar(ask.params)
            for ask in asks:
                request_id = f"llm-{next(self._next_id)}"
                processor = OutputProcessor(self.tokenizer, request_id, len(ask.prompt_ids), ask.params)
                request = self._running[request_id] = _Running(processor, inbox)
                requests.append(request)
                with _naming(ask, alone=len(asks) == 1):
                    self.engine.add_request(
                        request_id, ask.prompt_ids, ask.params, cache_salt=ask.cache_salt, priority=ask.priority
                    )

    def _next_outputs(self, inbox: deque[RequestOutput]) -> list[RequestOutput]:
        """The outputs of a call that have come, or else those of the next step that has any; never none."""
        while not inbox:
            with self._turn():
                if not inbox:  # else they came from another thread's step, while this one waited for its turn
                    self._step()
        return [inbox.popleft() for _ in range(len(inbox))]

    def _step(self) -> None:
        """One engine step, whose outputs go to their calls."""
        if not self.engine.has_work:
            raise RuntimeError("the engine has ended a request without an output")
        for token_output in self.engine.step():
            request = self._running.get(token_output.request_id)
            if request is None:  # ended by a stop string or aborted, while a step was under way
                continue
            output = request.processor.push(token_output)
            request.inbox.append(output)
            if output.finished:
                del self._running[token_output.request_id]
                if token_output.finish_reason is None:
                    self.engine.abort(token_output.request_id, FinishReason.STOP)

    def _leave(self, requests: Iterable[_Running]) -> None:
        """End those of the requests that have not ended: now, or when this thread's step is over.

        The latter is for an abandoned stream, which may be collected as garbage in the middle of a step.
        """
        self._left.extend(request.request_id for request in requests if request.request_id in self._running)
        if self._left and not self._turns.is_inside and self._closed is None:
            with self._turn():
                pass

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the engine for the block, in which no signal's handler runs. Raises ValueError once it is closed."""
        with signals_deferred(), self._turns.turn():
            if self._closed is not None:
                raise ValueError(self._closed)
            try:
                self._end_left()
                yield
                self._end_left()
            except FieldError:  # a request was refused, which has changed nothing
                raise
            except BaseException as error:
                self._start_over(error)
                raise

    def _end_left(self) -> None:
        while self._left:
            request_id = self._left.popleft()
            if self._running.pop(request_id, None) is not None:
                self.engine.abort(request_id)

    def _start_over(self, error: BaseException) -> None:
        """End all requests, since `error` left the engine's state half changed."""
        message = f"a step was torn apart by {type(error).__name__}: {error}"
        running, self._running = self._running, {}
        if self.engine.config.tp > 1:  # the other ranks may wait for the rest of the step
            self._closed = f"this LLM was closed, since {message}"
            self.engine.close()
        else:
            self.engine.reset()
        for name, request in running.items():
            ended = TokenOutput(request_id=name, token_ids=[], finish_reason=FinishReason.ERROR, error=message)
            request.inbox.append(request.processor.push(ended))


@contextlib.contextmanager
def _naming(ask: _Ask, *, alone: bool) -> Iterator[None]:
    """Put the name of the prompt in front of errors, unless it is the only one of the call."""
    try:
        yield
    except FieldError as error:
        if alone:
            raise
        raise _of_prompt(ask.name, error) from error


def _of_prompt(name: str, error: FieldError) -> FieldError:
    """The error of one prompt, with the name of the prompt in front."""
    return FieldError(f"{name}: {error.field}", error.problem, *error.others)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not is_list(prompts):
        return [prompts]  # type: ignore[list-item]
    if not prompts or isinstance(prompts[0], Sequence):
        return list(prompts)
    return [prompts]


def _checked_ids(prompt: object, name: str) -> list[int]:
    if not is_list(prompt):
        raise FieldError(name, f"must be a string or a list of token ids, got {shorten(prompt)}")
    for token_id in prompt:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise FieldError(name, f"must be a string or a list of token ids, got {shorten(token_id)} in it")
    return list(prompt)


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> dict[str, Conversation]:
    """Conversations by the names that errors use; what is no list of lists counts as one conversation."""
    if is_list(messages) and messages and is_list(messages[0]):
        return {f"messages[{index}]": conversation for index, conversation in enumerate(messages)}  # type: ignore[misc]
    return {"messages": messages}  # type: ignore[dict-item]


def _make_asks(
    names: list[str],
    prompt_ids: Iterable[list[int]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int],
    cache_salt: str | Sequence[str],
) -> list[_Ask]:
    """Give each prompt what is its own, and what is for all. Raises FieldError."""
    param_list = _for_each("sampling_params", SamplingParams() if params is None else params, len(names))
    priorities, salts = _for_each("priority", priority, len(names)), _for_each("cache_salt", cache_salt, len(names))
    for item in param_list:
        if not isinstance(item, SamplingParams):
            raise FieldError("sampling_params", f"must be SamplingParams or a list of them, got {shorten(item)}")
    for number in priorities:
        if isinstance(number, bool) or not isinstance(number, int) or number not in PRIORITIES:
            raise FieldError("priority", f"must be an integer of 32 bits, got {shorten(number)}")
    for salt in salts:
        if not isinstance(salt, str) or len(salt) > MAX_SALT_LENGTH:
            raise FieldError("cache_salt", f"must be a string of at most {MAX_SALT_LENGTH} characters")
    return [_Ask(*fields) for fields in zip(names, prompt_ids, param_list, priorities, salts, strict=True)]


def _for_each(field: str, value: Any, count: int) -> list[Any]:
    """The one value for all, or the list with one for each."""
    if not is_list(value):
        return [value] * count
    if len(value) != count:
        raise FieldError(field, f"must be one for all or one for each of {count} prompts, got {len(value)}")
    return list(value)


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
