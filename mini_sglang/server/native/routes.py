"""The server's own routes: /generate with tokens and text in one small answer, and the routes for operators."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

import mini_sglang
from mini_sglang.errors import shorten
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import answer
from mini_sglang.server.context import context_of
from mini_sglang.server.conversation import encode_messages
from mini_sglang.server.errors import ApiError
from mini_sglang.server.generation import encode_prompts, make_job, off_loop, parse_prompt, to_sampling_params
from mini_sglang.server.native.bodies import AbortBody, DetokenizeBody, GenerateBody, ProfileBody, TokenizeBody
from mini_sglang.server.native.format import GenerateFormat
from mini_sglang.server.native.probes import ask_engine
from mini_sglang.server.request_body import check_body, json_body, read_body, read_object
from mini_sglang.server.sglang import routes as sglang_routes
from mini_sglang.server.sglang.bodies import SGLANG_FIELDS, SglangBody

Reply = TypeVar("Reply")

_SECRETS = ("api_key", "api_key_file", "ssl_keyfile")

router = APIRouter(tags=["mini-sglang"])


@router.post("/generate", openapi_extra=json_body(GenerateBody, SglangBody))
async def generate(request: Request) -> Response:
    """Continue a prompt. In a stream, each event has the `text` and `token_ids` that are new.

    A body with `text`, `input_ids` or `sampling_params` is SGLang's and gets SGLang's answer.
    """
    context = context_of(request)
    fields = await read_object(request)
    if not SGLANG_FIELDS.isdisjoint(fields):
        return await sglang_routes.generate(request, check_body(fields, SglangBody))
    body = check_body(fields, GenerateBody)
    params, prompt = to_sampling_params(body.sampling_fields()), parse_prompt(body.prompt)
    prompt_ids = await encode_prompts(context, [prompt])
    job = make_job(context, f"gen-{uuid.uuid4().hex}", prompt_ids, params, body, client_id=body.request_id)
    return await answer(request, job, GenerateFormat(job.id), stream=body.stream)


@router.post("/tokenize", openapi_extra=json_body(TokenizeBody))
async def tokenize(request: Request) -> Json:
    """The token ids of a prompt or of a conversation."""
    context = context_of(request)
    body = await read_body(request, TokenizeBody)
    context.check_model(body.model)
    if body.messages is not None:
        tokens = await encode_messages(request, body.messages, body)
    else:
        [tokens] = await encode_prompts(context, [body.prompt or ""], add_special_tokens=body.add_special_tokens)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": context.engine.info.context_length}


@router.post("/detokenize", openapi_extra=json_body(DetokenizeBody))
async def detokenize(request: Request) -> Json:
    """The text of token ids."""
    context = context_of(request)
    body = await read_body(request, DetokenizeBody)
    context.check_model(body.model)
    vocab_size = context.engine.info.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            message = f"tokens must be between 0 and {vocab_size - 1}, got {shorten(token_id)}"
            raise ApiError(400, message, param="tokens")
    skip = body.skip_special_tokens
    text = await off_loop(len(body.tokens), lambda: context.tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return {"text": text, "prompt": text}  # vLLM's clients look for a prompt


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Json:
    """The texts of the tokens with a role, and the chat template: what evaluation programs ask a server for."""
    tokenizer = context_of(request).tokenizer
    return {**tokenizer.role_tokens, "chat_template": tokenizer.chat_template or None}


@router.post("/flush_cache")
@router.post("/reset_prefix_cache", include_in_schema=False)  # vLLM's name
async def flush_cache(request: Request) -> Json:
    """Empty the prefix cache, except for pages that running requests use."""
    return {"flushed_pages": await ask_engine(context_of(request).engine.flush_cache())}


@router.post("/drain")
async def drain(request: Request) -> Json:
    """Take no new work (503), let running requests end, then end the server; `/ready` says 503 from now on.

    The answer comes at once, with the number of requests that still run.
    """
    context = context_of(request)
    context.drain()
    return {"draining": True, "requests": len(context.jobs)}


@router.post("/abort", openapi_extra=json_body(AbortBody))
async def abort(request: Request) -> Json:
    """End a request by its id, with all its choices; they answer what they have, with finish_reason "abort"."""
    context = context_of(request)
    body = await read_body(request, AbortBody)
    choices = context.jobs.get(body.request_id, ())
    return {"aborted": sum(context.engine.abort(name) for name in choices)}


@router.post("/start_profile", openapi_extra=json_body(ProfileBody, required=False))
async def start_profile(request: Request) -> Json:
    """Trace the engine process: its steps' phases, PyTorch's operations, and on a GPU its kernels.

    Needs `--profile-dir`. One trace at a time; it slows the engine down while it is made, and halts it while it is
    written.
    """
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    body = await read_body(request, ProfileBody) if has_body else ProfileBody()
    await _profile(context_of(request).engine.start_trace(body.num_steps))
    return {"profiling": True}


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Json:
    """End the trace, unless its steps are over; `trace` is the path of its file, for Perfetto or chrome://tracing."""
    return {"profiling": False, "trace": await _profile(context_of(request).engine.stop_trace())}


async def _profile(reply: Awaitable[Reply]) -> Reply:
    try:
        return await ask_engine(reply)
    except ValueError as error:
        raise ApiError(400, str(error), code="no_profile") from None


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)  # SGLang's older name
async def server_info(request: Request) -> Response:
    """What is served, with all settings but the keys, and where the engine stands."""
    context = context_of(request)
    stats = await ask_engine(context.engine.stats())
    server = {name: value for name, value in dataclasses.asdict(context.config).items() if name not in _SECRETS}
    info = {
        "version": mini_sglang.__version__,
        "model": context.model_name,
        # SGLang's router reads these two
        "served_model_name": context.model_name,
        "model_path": context.engine.info.model,
        "engine": context.engine.info,
        "stats": stats,
        "internal_states": [stats],  # where SGLang's load generator looks
        "uptime_s": round(time.monotonic() - context.started, 3),
        "requests": sorted(context.jobs),  # ids of running jobs
        "server": server,
    }
    return Response(msgspec.json.encode(info), media_type="application/json")
