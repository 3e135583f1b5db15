"""OpenAI's routes. Each is the same walk: read the body, make tokens of the prompt, run the job, format the answer."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request, Response

from mini_sglang.request import RequestOutput
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.errors import invalid
from mini_sglang.server.generation import (
    Job,
    collect,
    encode_messages,
    encode_prompts,
    make_job,
    run_job,
    total_usage,
)
from mini_sglang.server.openai_format import AnswerFormat, ChatFormat, CompletionFormat, Envelope, Json
from mini_sglang.server.protocol import ChatBody, CompletionBody, OpenAIBody, parse_prompts
from mini_sglang.server.request_body import read_body, takes
from mini_sglang.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", openapi_extra=takes(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatBody)
    context.check_model(body.model)
    try:
        params = body.sampling_params()
    except ValueError as error:
        raise invalid(error) from None
    prompt_ids = await encode_messages(context, body.messages, body)
    job_id = f"chatcmpl-{uuid.uuid4().hex}"
    job = make_job(context, job_id, [prompt_ids], params, body, body.num_choices, field="messages")
    return await _answer(request, context, body, job, ChatFormat(context.tokenizer))


@router.post("/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    context = context_of(request)
    body = await read_body(request, CompletionBody)
    context.check_model(body.model)
    try:
        params, prompts = body.sampling_params(), parse_prompts(body.prompt)
    except ValueError as error:
        raise invalid(error) from None
    prompt_ids = await encode_prompts(context, prompts, n=body.num_choices)
    job = make_job(context, f"cmpl-{uuid.uuid4().hex}", prompt_ids, params, body, body.num_choices)
    return await _answer(request, context, body, job, CompletionFormat(context.tokenizer))


@router.get("/models")
async def models(request: Request) -> Json:
    """The one model that is served."""
    return {"object": "list", "data": [_model_card(context_of(request))]}


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> Json:
    """The served model, or 404."""
    context = context_of(request)
    context.check_model(name)
    return _model_card(context)


def _model_card(context: ServerContext) -> Json:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "mini-sglang",
        "root": context.engine.info.model,
        "max_model_len": context.engine.info.context_length,
    }


async def _answer(
    request: Request, context: ServerContext, body: OpenAIBody, job: Job, answer_format: AnswerFormat
) -> Response:
    envelope = Envelope(job.id, int(time.time()), context.model_name)
    if body.stream:
        return EventStream(_events(context, job, envelope, answer_format, body.include_usage))
    outputs = await while_connected(request.receive, collect(context, job))
    choices = [answer_format.whole(index, output) for index, output in enumerate(outputs)]
    whole = envelope.wrap(answer_format.whole_kind, choices, total_usage(job, outputs))
    return Response(msgspec.json.encode(whole), media_type="application/json")


async def _events(
    context: ServerContext, job: Job, envelope: Envelope, answer_format: AnswerFormat, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """One chunk per engine output, then the usage if it was asked for."""
    kind = answer_format.chunk_kind
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(run_job(context, job)) as outputs:
        async for index, output in outputs:
            if index not in latest and (opening := answer_format.opening(index)) is not None:
                yield event(envelope.wrap(kind, [opening]))
            latest[index] = output
            yield event(envelope.wrap(kind, [answer_format.delta(index, output)]))
    if include_usage:
        usage = total_usage(job, [latest[index] for index in range(job.num_choices)])
        yield event(envelope.wrap(kind, [], usage))
    yield DONE
