"""OpenAI's /v1/responses: the walk of `conversation.py` with OpenAI's body and answer. Keeps nothing."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from mini_sglang.server.answers.model_format import AnswerPlan
from mini_sglang.server.context import context_of
from mini_sglang.server.conversation import answer_conversation
from mini_sglang.server.generation import Job
from mini_sglang.server.request_body import read_body, takes
from mini_sglang.server.responses.bodies import ResponsesBody
from mini_sglang.server.responses.format import ResponseFormat

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/responses", openapi_extra=takes(ResponsesBody))
async def responses(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ResponsesBody)
    model = context.check_model(body.model)

    def make_format(job: Job, plan: AnswerPlan) -> ResponseFormat:
        return ResponseFormat(job.id, model, body, plan.parser(), context.tokenizer)

    return await answer_conversation(request, body, f"resp_{uuid.uuid4().hex}", make_format)
