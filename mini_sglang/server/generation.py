"""Makes a job of a checked body and runs it: prompts become token ids, and every choice a request to the engine.

Every route that generates uses it. Knows no HTTP and no answer format.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mini_sglang.errors import FieldError, shorten
from mini_sglang.ipc.messages import EngineInfo
from mini_sglang.outputs import FinishReason, RequestOutput
from mini_sglang.sampling_params import Json, SamplingParams
from mini_sglang.server import fields
from mini_sglang.server.bodies import JobBody
from mini_sglang.server.context import FullError, ServerContext
from mini_sglang.server.errors import ApiError, invalid
from mini_sglang.server.metrics import PromptChoices

Result = TypeVar("Result")

MAX_CHOICES_PER_REQUEST = 1024  # prompts times n
WORK_TOKENS = 32
INLINE_CHARACTERS = 4096  # shorter text is tokenised in less time than a thread takes to start on it


@dataclass(frozen=True)
class Caller:
    """Who asks for a job, and for how long."""

    client: str = ""  # those of several take turns
    deadline: float = math.inf  # of time.perf_counter; the job ends then


@dataclass(frozen=True)
class Job:
    """The work that one HTTP request asks for. Choice i of the answer continues prompts[i // n]."""

    own_id: str
    prompts: list[list[int]]  # token ids
    params: list[SamplingParams]  # one per choice
    body: JobBody
    client_id: str | None = None
    caller: Caller = Caller()

    @property
    def id(self) -> str:
        """The client's id for the job, if it gave one, else the server's own."""
        return self.client_id or self.own_id

    @property
    def work(self) -> Hashable:
        """Equal for a job and for its repetition: of each prompt the length and the end."""
        return tuple((len(prompt), *prompt[-WORK_TOKENS:]) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        return len(self.params)

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.body.num_choices

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.n]

    def num_logprobs(self, choice: int, num_tokens: int, with_prompt: bool = True) -> int:
        """Count the log-probabilities, alternatives included, of `num_tokens` tokens of a choice and of its prompt."""
        params, count = self.params[choice], 0
        if params.logprobs is not None:
            count += num_tokens * (1 + params.logprobs)
        if params.prompt_logprobs is not None and with_prompt:
            count += len(self.prompt_of(choice)) * (1 + params.prompt_logprobs)
        return count

    def request_id(self, choice: int) -> str:
        """The engine's id for a choice: the job's id if there is only one choice, else one that no client can take."""
        return self.id if self.num_choices == 1 else f"{self.own_id}-{choice}"


def to_sampling_params(fields: Json) -> SamplingParams:
    """Make sampling parameters of these fields; a field that is None keeps its default. Raises FieldError."""
    given = {name: value for name, value in fields.items() if value is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _parse_logit_bias(given["logit_bias"])
    params = SamplingParams(**given)
    params.validate()
    return params


def _parse_logit_bias(bias: dict[str, float]) -> dict[int, float]:
    """Turn JSON's keys, which are strings, into token ids. Raises FieldError."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise FieldError("logit_bias", f"must map token ids to numbers, got the key {shorten(key, 20)}")
    return {int(key): value for key, value in bias.items()}


def parse_prompts(value: Any) -> list[str | list[int]]:
    """The prompts of a completions request, in order. Raises FieldError."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise FieldError("prompt", f"must be a string or a list, got {type(value).__name__}")
    if not value:
        raise FieldError("prompt", "must not be an empty list")
    if isinstance(value[0], (str, list)):
        return [parse_prompt(item) for item in value]
    return [parse_prompt(value)]


def parse_prompt(value: Any) -> str | list[int]:
    """One prompt: text or token ids. Raises FieldError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise FieldError("prompt", f"must be a string or a list of token ids, got {type(value).__name__}")
    if len(value) > fields.MAX_TOKEN_IDS:
        raise FieldError("prompt", f"may hold at most {fields.MAX_TOKEN_IDS} token ids, got {len(value)}")
    for item in value:
        if type(item) is not int:
            raise FieldError("prompt", f"must hold token ids only, got {shorten(item)} among them")
    return value


def make_job(
    context: ServerContext,
    own_id: str,
    prompts: list[list[int]],
    params: SamplingParams,
    body: JobBody,
    client_id: str | None = None,
) -> Job:
    """Check prompts and parameters against the engine's limits and make a job of them. Raises FieldError."""
    info, n = context.engine.info, body.num_choices
    params.validate(info.vocab_size)
    for prompt_ids in prompts:
        _check_prompt(prompt_ids, info)
    choice_params = [
        _params_of_choice(params, choice % n, info.context_length - len(prompts[choice // n]), info.vocab_size)
        for choice in range(len(prompts) * n)
    ]
    return Job(own_id, prompts, choice_params, body, client_id)


def _check_prompt(prompt_ids: list[int], info: EngineInfo) -> None:
    """Raise FieldError, with the count and the limit, for a prompt that the engine can never serve."""
    if not prompt_ids:
        raise FieldError("prompt", "must hold at least one token, got none")
    _check_length("prompt", len(prompt_ids), info)
    if min(prompt_ids) < 0 or max(prompt_ids) >= info.vocab_size:
        bad = next(token_id for token_id in prompt_ids if not 0 <= token_id < info.vocab_size)
        raise FieldError("prompt", f"token ids must be between 0 and {info.vocab_size - 1}, got {shorten(bad)}")


def _check_length(field: str, num_tokens: int, info: EngineInfo, qualifier: str = "") -> None:
    """Raise FieldError if no prompt of `num_tokens` can be served; `qualifier` stands before the number."""
    if num_tokens >= info.context_length:
        limit = f"the context holds {info.context_length} for prompt and answer together"
    elif num_tokens > info.max_prompt_tokens:
        limit = f"the KV pool of {info.kv_pool_tokens} tokens takes prompts of at most {info.max_prompt_tokens}"
    else:
        return
    raise FieldError(field, f"has {qualifier}{num_tokens} tokens, but {limit}")


def check_text_length(context: ServerContext, field: str, texts: Sequence[str], at_least: int = 0) -> None:
    """Raise FieldError for text that is certainly too long, before the server spends time on tokenising it.

    `texts`: parts of the prompt that `field` gave. `at_least`: a number of tokens that the prompt has in any case.
    """
    num_bytes = sum(len(text.encode()) for text in texts)
    info = context.engine.info
    if max(num_bytes, at_least) > info.max_prompt_tokens:  # a token takes at least a byte
        num_tokens = max(context.tokenizer.fewest_tokens(num_bytes), at_least)
        _check_length(field, num_tokens, info, qualifier="at least ")


def _params_of_choice(params: SamplingParams, choice: int, room: int, vocab_size: int) -> SamplingParams:
    """The parameters of choice i: seed + i, `top_k` bounded by the vocabulary, `max_tokens` by `room` (in tokens)."""
    seed = params.seed
    if seed is not None:
        seed = (seed + choice + 2**63) % 2**64 - 2**63
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return msgspec.structs.replace(params, seed=seed, max_tokens=max_tokens, top_k=min(params.top_k, vocab_size))


async def encode_prompts(
    context: ServerContext, prompts: Sequence[str | list[int]], *, n: int = 1, add_special_tokens: bool = True
) -> list[list[int]]:
    """Tokenise the prompts that are text; prompts that are token ids stay as they are.

    Raises FieldError if the prompts, with `n` choices each, are too many, or a text is too long.
    """
    if (num_choices := len(prompts) * n) > MAX_CHOICES_PER_REQUEST:
        problem = f"and n ask for {num_choices} choices, at most {MAX_CHOICES_PER_REQUEST} are allowed"
        raise FieldError("prompt", problem)
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_length(context, "prompt", [prompt])

    def encode() -> list[list[int]]:
        return [
            context.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    return await off_loop(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), encode)


async def off_loop(size: int, work: Callable[[], Result]) -> Result:
    """Do work that takes time in proportion to `size` characters. Long work runs in a thread, so that streams go on."""
    return work() if size <= INLINE_CHARACTERS else await asyncio.to_thread(work)


async def run_job(context: ServerContext, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Run all choices at once and yield (choice, output) as outputs come. Leaving the iterator aborts what still runs.

    Raises ApiError: 400 if the engine refuses a choice or another job has the id, 429 if too many requests wait, 500 if
    a choice fails, 503 if the server is draining, 504 if the caller's deadline passes. Raises EngineDeadError if the
    engine ends.
    """
    with context.work(), _registered(context, job), _deadline(context, job) as passed:
        async with contextlib.aclosing(_run_choices(context, job)) as outputs:
            async for choice, output in outputs:
                if passed.is_set() and output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise _timeout()
                yield choice, output


@contextlib.contextmanager
def _deadline(context: ServerContext, job: Job) -> Iterator[asyncio.Event]:
    """Abort the job's requests at its deadline, if it has one; the event says that it has passed."""
    passed = asyncio.Event()
    if job.caller.deadline == math.inf:
        yield passed
        return

    def abort() -> None:
        passed.set()
        for request_id in context.jobs[job.id]:
            context.engine.abort(request_id)

    left = job.caller.deadline - time.perf_counter()
    if left <= 0:
        raise _timeout()
    timer = asyncio.get_running_loop().call_later(left, abort)
    try:
        yield passed
    finally:
        timer.cancel()


def _timeout() -> ApiError:
    return ApiError(504, "the time that the request allowed for its answer is over", code="deadline_exceeded")


@contextlib.contextmanager
def _registered(context: ServerContext, job: Job) -> Iterator[None]:
    """Register a running job, so that the server counts its engine requests and finds them by the job's id.

    Raises ApiError 400 if the id is taken, 429 if the queue is full.
    """
    if job.id in context.jobs or job.id in context.engine.request_ids:
        in_use = FieldError("request_id", f"{shorten(job.id)} is in use by a request under way")
        raise invalid(in_use, job.body.field_names, code=None)
    try:
        with context.admission.places(job.caller.client, job.num_choices, job.work):
            context.jobs[job.id] = [job.request_id(choice) for choice in range(job.num_choices)]
            try:
                yield
            finally:
                del context.jobs[job.id]
    except FullError as full:
        limit = context.admission.limit
        message = f"the queue is full: the server takes at most {limit} requests at once"
        headers = {"retry-after": str(full.retry_after_s)}
        raise ApiError(429, message, code="queue_full", headers=headers) from None


async def _run_choices(context: ServerContext, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    choices = [PromptChoices(job.n) for _ in job.prompts]
    if job.num_choices == 1:
        async with contextlib.aclosing(_run_choice(context, job, 0, choices[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=1)

    async def feed(choice: int) -> None:
        try:
            async with contextlib.aclosing(_run_choice(context, job, choice, choices[choice // job.n])) as outputs:
                async for output in outputs:
                    await queue.put((choice, output))
        except Exception as error:  # handed to the consumer, which raises it
            await queue.put((choice, error))

    tasks = [asyncio.create_task(feed(choice)) for choice in range(job.num_choices)]
    try:
        num_finished = 0
        while num_finished < len(tasks):
            choice, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_finished += item.finished
            yield choice, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run_choice(
    context: ServerContext, job: Job, choice: int, choices: PromptChoices
) -> AsyncGenerator[RequestOutput, None]:
    return context.metrics.watch(_answer(context, job, choice), job.params[choice].max_tokens, choices)


async def _answer(context: ServerContext, job: Job, choice: int) -> AsyncGenerator[RequestOutput, None]:
    outputs = context.engine.generate(
        job.prompt_of(choice),
        job.params[choice],
        request_id=job.request_id(choice),
        cache_salt=job.body.cache_salt or "",
        priority=job.body.priority,
        client=job.caller.client,
    )
    is_only_echo = job.body.is_only_echo
    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    if output.field_error is not None:
                        raise invalid(output.field_error, job.body.field_names, code=None) from output.field_error
                    raise ApiError(500, output.error or "the engine could not go on with this request")
                yield _without_answer(output) if is_only_echo else output
    except FieldError as error:
        raise invalid(error, job.body.field_names) from error


def _without_answer(output: RequestOutput) -> RequestOutput:
    """The output of a request that asked for its prompt alone, without the one token that the engine generated."""
    usage = msgspec.structs.replace(output.usage, completion_tokens=0)
    reason = FinishReason.LENGTH if output.finish_reason is FinishReason.STOP else output.finish_reason
    return dataclasses.replace(
        output, usage=usage, text_delta="", num_new_tokens=0, num_text_pieces=0, finish_reason=reason, stop_reason=None
    )
