"""OpenAI's /v1/responses. Keeps nothing between requests."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from mini_sglang.server.answering import answer
from mini_sglang.server.context import context_of
from mini_sglang.server.conversation import make_chat_job
from mini_sglang.server.request_body import json_body, read_body
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.server.responses.format import ResponseFormat

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/responses", openapi_extra=json_body(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ResponsesBody)
    model = context.check_model(body.model)
    job, rules = await make_chat_job(request, f"resp_{uuid.uuid4().hex}", body)
    answer_format = ResponseFormat(job.id, model, body, rules.parser(), context.tokenizer)
    return await answer(request, job, answer_format, stream=body.stream)
