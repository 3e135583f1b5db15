"""SGLang's form of /generate and its route about the model, for SGLang's own clients and router."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import answer
from mini_sglang.server.context import context_of
from mini_sglang.server.generation import encode_prompts, make_job, parse_prompts, to_sampling_params
from mini_sglang.server.request_body import client_errors
from mini_sglang.server.sglang.bodies import SglangBody
from mini_sglang.server.sglang.format import SglangFormat

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
        job = make_job(context, uuid.uuid4().hex, prompt_ids, params, body, client_id=body.rid)
    return await answer(request, job, SglangFormat(job, body, context.tokenizer), stream=body.stream)


def _parse_prompts(body: SglangBody) -> list[str | list[int]]:
    """The prompts, all of the kind that the field holds. Raises FieldError."""
    prompts = parse_prompts(body.prompt)
    kind, expected = (str, "strings") if body.text is not None else (list, "token ids")
    if not all(isinstance(prompt, kind) for prompt in prompts):
        raise FieldError("prompt", f"must hold {expected} only")
    return prompts
