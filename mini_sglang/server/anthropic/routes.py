"""Anthropic's routes, whose errors have Anthropic's shape too."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import answer
from mini_sglang.server.anthropic.bodies import CountTokensBody, MessagesBody
from mini_sglang.server.anthropic.format import MessageFormat, error_json
from mini_sglang.server.context import context_of
from mini_sglang.server.conversation import encode_messages, make_chat_job
from mini_sglang.server.errors import ClientDisconnected, as_api_error, error_response
from mini_sglang.server.request_body import client_errors, json_body, read_body, work_on_body


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


@router.post("/messages", openapi_extra=json_body(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, MessagesBody)
    model = context.check_model(body.model)
    job, rules = await make_chat_job(request, f"msg_{uuid.uuid4().hex}", body)
    fits_context = len(job.prompt_of(0)) + body.max_tokens <= context.engine.info.context_length
    answer_format = MessageFormat(job.id, model, rules.parser(), fits_context, body.omits_thinking)
    return await answer(request, job, answer_format, stream=body.stream)


@router.post("/messages/count_tokens", openapi_extra=json_body(CountTokensBody))
async def count_tokens(request: Request) -> Json:
    """How many tokens a conversation takes as a prompt."""
    context = context_of(request)
    body = await read_body(request, CountTokensBody)
    context.check_model(body.model)
    with client_errors(body.field_names):
        conversation, template = await work_on_body(request, lambda: (body.chat_messages(), body.template()))
        return {"input_tokens": len(await encode_messages(request, conversation, template, body.system_field))}
