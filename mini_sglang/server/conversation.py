"""The walk that /v1/messages and /v1/responses share: a conversation in, an answer made of blocks out.

A stream is a row of named events, which the format of each API makes of engine outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

from fastapi import Request, Response

from mini_sglang.outputs import RequestOutput
from mini_sglang.server.answers.model_format import AnswerPlan
from mini_sglang.server.anthropic.bodies import MessagesBody
from mini_sglang.server.bodies import Json
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.errors import ApiError
from mini_sglang.server.generation import Job, collect, encode_answer, make_chat_job, run_job, to_sampling_params
from mini_sglang.server.request_body import client_errors, work_on_body
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.server.streaming import EventStream, named_event, while_connected


class BlockFormat(Protocol):
    """How an API writes one answer: whole, or as the events that begin, continue and end a stream."""

    def whole(self, output: RequestOutput) -> Json: ...

    def opening(self, first: RequestOutput) -> Iterator[Json]: ...

    def delta(self, output: RequestOutput) -> Iterator[Json]: ...

    def closing(self, last: RequestOutput) -> Iterator[Json]: ...

    def failure(self, error: ApiError) -> Iterator[Json]: ...


async def answer_conversation(
    request: Request,
    body: MessagesBody | ResponsesBody,
    job_id: str,
    make_format: Callable[[Job, AnswerPlan], BlockFormat],
) -> Response:
    """The answer to `body`. Raises ApiError."""
    context = context_of(request)
    with client_errors(body.field_names):
        params, messages, template = await work_on_body(
            request, lambda: (to_sampling_params(body.sampling_fields()), body.chat_messages(), body.template())
        )
        job, plan = await make_chat_job(context, job_id, messages, template, params, body)
    answer_format = make_format(job, plan)
    if body.stream:
        return EventStream(
            _events(context, job, answer_format),
            lambda error: b"".join(map(named_event, answer_format.failure(error))),
        )
    [output] = await while_connected(request.receive, collect(context, job))
    whole = await encode_answer(job, [output], lambda: answer_format.whole(output))
    return Response(whole, media_type="application/json")


async def _events(context: ServerContext, job: Job, answer_format: BlockFormat) -> AsyncGenerator[bytes, None]:
    is_open = False
    async with contextlib.aclosing(run_job(context, job)) as outputs:
        async for _, output in outputs:
            if not is_open:
                is_open = True
                for item in answer_format.opening(output):
                    yield named_event(item)
            for item in answer_format.delta(output):
                yield named_event(item)
            if output.finished:
                for item in answer_format.closing(output):
                    yield named_event(item)
