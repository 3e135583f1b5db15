"""What SGLang's own clients and router ask for beside the OpenAI routes: its form of /generate, and what it serves."""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from mini_sglang.errors import FieldError
from mini_sglang.server.bodies import Json
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.generation import (
    Job,
    collect,
    encode_answer,
    encode_prompts,
    make_job,
    off_loop,
    parse_prompts,
    run_job,
    to_sampling_params,
)
from mini_sglang.server.request_body import client_errors
from mini_sglang.server.sglang.bodies import SglangBody
from mini_sglang.server.sglang.format import SglangFormat
from mini_sglang.server.streaming import DONE, EventStream, event, while_connected

router = APIRouter(tags=["SGLang"])


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)  # its older name
async def model_info(request: Request) -> Json:
    """The model that is served."""
    context = context_of(request)
    path = context.engine.info.model
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": context.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "max_model_len": context.engine.info.context_length,
    }


async def generate(request: Request, body: SglangBody) -> Response:
    """POST /generate with a body of this kind."""
    context = context_of(request)
    context.check_model(body.model)
    with client_errors(body.field_names):
        params, prompts = to_sampling_params(body.sampling_fields()), _parse_prompts(body)
        prompt_ids = await encode_prompts(context, prompts, n=body.num_choices)
        job = make_job(context, body.rid or uuid.uuid4().hex, prompt_ids, params, body)
    answer_format = SglangFormat(job, body, context.tokenizer)
    if body.stream:
        return EventStream(_events(context, job, answer_format))
    outputs = await while_connected(request.receive, collect(context, job))

    def whole() -> Json | list[Json]:
        choices = [answer_format.whole(index, output) for index, output in enumerate(outputs)]
        return choices[0] if body.is_single else choices

    return Response(await encode_answer(job, outputs, whole), media_type="application/json")


def _parse_prompts(body: SglangBody) -> list[str | list[int]]:
    """Raises FieldError."""
    prompts = parse_prompts(body.prompt)
    kind, expected = (str, "strings") if body.text is not None else (list, "token ids")
    if not all(isinstance(prompt, kind) for prompt in prompts):
        raise FieldError("prompt", f"must hold {expected} only")
    return prompts


async def _events(context: ServerContext, job: Job, answer_format: SglangFormat) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    async with contextlib.aclosing(run_job(context, job)) as outputs:
        async for index, output in outputs:
            num_logprobs = job.num_logprobs(index, output.num_new_tokens, with_prompt=index not in begun)
            begun.add(index)
            yield event(await off_loop(num_logprobs, functools.partial(answer_format.delta, index, output)))
    yield DONE
