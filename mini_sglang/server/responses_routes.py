"""OpenAI's /v1/responses: the walk of openai_routes with another body and another answer. Keeps nothing."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request, Response

from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.errors import ApiError
from mini_sglang.server.generation import Job, collect, encode_messages, make_job, run_job
from mini_sglang.server.request_body import invalid_body, read_body, takes
from mini_sglang.server.responses_format import ResponseFormat
from mini_sglang.server.responses_protocol import ResponsesBody
from mini_sglang.server.streaming import EventStream, named_event, while_connected

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/responses", openapi_extra=takes(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ResponsesBody)
    model = context.check_model(body.model)
    try:
        params, conversation, template = body.sampling_params(), body.chat_messages(), body.template()
    except ValueError as error:
        raise invalid_body(error) from None
    prompt_ids = await encode_messages(context, conversation, template)
    plan = context.dialect.plan(template, conversation, prompt_ids)
    job_id = f"resp_{uuid.uuid4().hex}"
    job = make_job(context, job_id, [prompt_ids], plan.constrain(params), body, field="input")
    answer_format = ResponseFormat(job.id, model, body, plan.parser(), context.tokenizer)

    def failure(error: ApiError) -> bytes:
        return b"".join(map(named_event, answer_format.failure(error)))

    if body.stream:
        return EventStream(_events(context, job, answer_format), failure)
    [output] = await while_connected(request.receive, collect(context, job))
    return Response(msgspec.json.encode(answer_format.whole(output)), media_type="application/json")


async def _events(context: ServerContext, job: Job, answer_format: ResponseFormat) -> AsyncGenerator[bytes, None]:
    is_open = False
    async with contextlib.aclosing(run_job(context, job)) as outputs:
        async for _, output in outputs:
            if not is_open:
                is_open = True
                for item in answer_format.opening():
                    yield named_event(item)
            for item in answer_format.delta(output):
                yield named_event(item)
            if output.finished:
                for item in answer_format.closing(output):
                    yield named_event(item)
