"""Anthropic's routes: the walk of openai_routes with other bodies, other answers and errors of another shape."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from mini_sglang.server.anthropic_format import Json, MessageFormat, error_json
from mini_sglang.server.anthropic_protocol import CountTokensBody, MessagesBody
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.errors import ClientDisconnected, as_api_error, error_response
from mini_sglang.server.generation import Job, collect, encode_messages, make_job, run_job
from mini_sglang.server.request_body import invalid_body, read_body, takes
from mini_sglang.server.streaming import EventStream, named_event, while_connected


class _Route(APIRoute):
    """A route whose errors, a missing API key's included, have Anthropic's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnected:
                raise
            except Exception as error:
                api_error = as_api_error(error)
                return error_response(api_error, error_json(api_error))

        return handle_with_errors


router = APIRouter(prefix="/v1", tags=["Anthropic"], route_class=_Route)


@router.post("/messages", openapi_extra=takes(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, MessagesBody)
    model = context.check_model(body.model)
    try:
        params, conversation, template = body.sampling_params(), body.chat_messages(), body.template()
    except ValueError as error:
        raise invalid_body(error) from None
    prompt_ids = await encode_messages(context, conversation, template)
    plan = context.dialect.plan(template, conversation, prompt_ids)
    job_id = f"msg_{uuid.uuid4().hex}"
    job = make_job(context, job_id, [prompt_ids], plan.constrain(params), body, field="messages")
    fits_context = len(prompt_ids) + body.max_tokens <= context.engine.info.context_length
    answer_format = MessageFormat(job.id, model, plan.parser(), fits_context)
    if body.stream:
        return EventStream(_events(context, job, answer_format), lambda error: named_event(error_json(error)))
    [output] = await while_connected(request.receive, collect(context, job))
    return Response(msgspec.json.encode(answer_format.whole(output)), media_type="application/json")


async def _events(context: ServerContext, job: Job, answer_format: MessageFormat) -> AsyncGenerator[bytes, None]:
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


@router.post("/messages/count_tokens", openapi_extra=takes(CountTokensBody))
async def count_tokens(request: Request) -> Json:
    """How many tokens a conversation takes as a prompt."""
    context = context_of(request)
    body = await read_body(request, CountTokensBody)
    context.check_model(body.model)
    try:
        conversation, template = body.chat_messages(), body.template()
    except ValueError as error:
        raise invalid_body(error) from None
    return {"input_tokens": len(await encode_messages(context, conversation, template))}
