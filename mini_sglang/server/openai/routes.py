"""OpenAI's routes: each reads its body, makes a job of it and answers the job in OpenAI's format."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import answer
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.conversation import make_chat_job
from mini_sglang.server.generation import encode_prompts, make_job, parse_prompts, to_sampling_params
from mini_sglang.server.openai.bodies import ChatBody, CompletionBody
from mini_sglang.server.openai.format import ChatFormat, CompletionFormat, Envelope
from mini_sglang.server.request_body import client_errors, json_body, read_body

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", openapi_extra=json_body(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatBody)
    model = context.check_model(body.model)
    job, rules = await make_chat_job(request, f"chatcmpl-{uuid.uuid4().hex}", body)
    answer_format = ChatFormat(job, Envelope(job, body, model), rules, context.tokenizer)
    return await answer(request, job, answer_format, stream=body.stream)


@router.post("/completions", openapi_extra=json_body(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    context = context_of(request)
    body = await read_body(request, CompletionBody)
    model = context.check_model(body.model)
    with client_errors(body.field_names):
        params, prompts = to_sampling_params(body.sampling_fields()), parse_prompts(body.prompt)
        prompt_ids = await encode_prompts(context, prompts, n=body.num_choices)
        job = make_job(context, f"cmpl-{uuid.uuid4().hex}", prompt_ids, params, body)
    echoes = [
        prompt if isinstance(prompt, str) else context.tokenizer.decode(prompt, skip_special_tokens=False)
        for prompt in (prompts if body.echo else ())
    ]
    answer_format = CompletionFormat(job, Envelope(job, body, model), context.tokenizer, echoes)
    return await answer(request, job, answer_format, stream=body.stream)


@router.get("/models")
async def models(request: Request) -> Json:
    """The names of the one model that is served."""
    context = context_of(request)
    return {"object": "list", "data": [_model_card(context, name) for name in context.model_names]}


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> Json:
    """The served model, or 404."""
    context = context_of(request)
    return _model_card(context, context.check_model(name))


def _model_card(context: ServerContext, name: str) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "mini-sglang",
        "root": context.shown_model,
        "max_model_len": context.engine.info.context_length,
    }
