"""OpenAI's routes. Each is the same walk: read the body, make tokens of the prompt, run the job, format the answer."""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncGenerator

import msgspec
from fastapi import APIRouter, Request, Response

from mini_sglang.outputs import RequestOutput, Usage
from mini_sglang.server.bodies import Json
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.generation import (
    Job,
    collect,
    encode_answer,
    encode_prompts,
    make_chat_job,
    make_job,
    off_loop,
    parse_prompts,
    run_job,
    to_sampling_params,
    total_usage,
)
from mini_sglang.server.openai.bodies import ChatBody, CompletionBody, OpenAIBody
from mini_sglang.server.openai.format import AnswerFormat, ChatFormat, CompletionFormat, EchoedPrompt, Envelope
from mini_sglang.server.request_body import client_errors, read_body, takes
from mini_sglang.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", openapi_extra=takes(ChatBody))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    body = await read_body(request, ChatBody)
    context.check_model(body.model)
    job_id = f"chatcmpl-{uuid.uuid4().hex}"
    with client_errors(body.field_names):
        params = to_sampling_params(body.sampling_fields())
        job, plan = await make_chat_job(context, job_id, body.messages, body, params, body)
    return await _answer(request, context, body, job, ChatFormat(context.tokenizer, plan))


@router.post("/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    context = context_of(request)
    body = await read_body(request, CompletionBody)
    context.check_model(body.model)
    with client_errors(body.field_names):
        params, prompts = to_sampling_params(body.sampling_fields()), parse_prompts(body.prompt)
        prompt_ids = await encode_prompts(context, prompts, n=body.num_choices)
        job = make_job(context, f"cmpl-{uuid.uuid4().hex}", prompt_ids, params, body)
    echoes = [
        EchoedPrompt(prompt if isinstance(prompt, str) else context.tokenizer.decode(prompt, False), token_ids)
        for prompt, token_ids in zip(prompts, prompt_ids, strict=True)
        if body.echo
    ]
    return await _answer(request, context, body, job, CompletionFormat(context.tokenizer, echoes, job.n))


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
        "root": context.engine.info.model,
        "max_model_len": context.engine.info.context_length,
    }


async def _answer(
    request: Request, context: ServerContext, body: OpenAIBody, job: Job, answer_format: AnswerFormat
) -> Response:
    envelope = Envelope(job.id, int(time.time()), context.check_model(body.model))
    if body.stream:
        return EventStream(_events(context, job, envelope, answer_format, body))
    outputs = await while_connected(request.receive, collect(context, job))

    def whole() -> Json:
        choices = [answer_format.whole(index, output) for index, output in enumerate(outputs)]
        return envelope.wrap(answer_format.whole_kind, choices, _usage(job, outputs, answer_format))

    return Response(await encode_answer(job, outputs, whole), media_type="application/json")


async def _events(
    context: ServerContext, job: Job, envelope: Envelope, answer_format: AnswerFormat, body: OpenAIBody
) -> AsyncGenerator[bytes, None]:
    """One chunk per engine output, then the usage if it was asked for."""
    kind = answer_format.chunk_kind
    latest: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(run_job(context, job)) as outputs:
        async for index, output in outputs:
            if index not in latest and (opening := answer_format.opening(index)) is not None:
                yield event(envelope.wrap(kind, [opening]))
            num_logprobs = job.num_logprobs(index, output.num_new_tokens, with_prompt=index not in latest)
            latest[index] = output
            delta = await off_loop(num_logprobs, functools.partial(answer_format.delta, index, output))
            if delta is None:
                continue
            usage = None
            if body.continuous_usage:
                tokens = answer_format.reasoning_tokens(index, output)
                usage = msgspec.structs.replace(output.usage, reasoning_tokens=tokens)
            yield event(envelope.wrap(kind, [delta], usage))
    if body.include_usage:
        usage = _usage(job, [latest[index] for index in range(job.num_choices)], answer_format)
        yield event(envelope.wrap(kind, [], usage))
    yield DONE


def _usage(job: Job, outputs: list[RequestOutput], answer_format: AnswerFormat) -> Usage:
    """Of the whole answer, which has been made."""
    tokens = sum(answer_format.reasoning_tokens(index, output) for index, output in enumerate(outputs))
    return msgspec.structs.replace(total_usage(job, outputs), reasoning_tokens=tokens)
