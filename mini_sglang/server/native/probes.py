"""What orchestrators, load balancers, routers and Prometheus ask: is the server alive, is it ready, does it generate,
how loaded is it, and its metrics.

These routes need no API key and tell nothing but figures. They know no prompt and no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

import mini_sglang
from mini_sglang.ipc.async_engine import EngineDeadError
from mini_sglang.outputs import FinishReason
from mini_sglang.sampling_params import Json, SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats
from mini_sglang.server.context import ServerContext, context_of
from mini_sglang.server.errors import ApiError
from mini_sglang.server.metrics import CONTENT_TYPE

Reply = TypeVar("Reply")

GENERATE_TIMEOUT_S = 10.0  # an engine from which no token comes for so long counts as stuck
LOOK_S = 0.05  # how often is looked whether another request got a token

router = APIRouter(tags=["monitoring"])


async def ask_engine(reply: Awaitable[Reply]) -> Reply:
    """The engine's reply. Raises ApiError 503 if it does not come in time."""
    try:
        return await reply
    except TimeoutError as error:
        raise ApiError(503, str(error), code="engine_stuck") from None


@router.get("/health")
async def health(request: Request) -> Json:
    """Alive: 200 after a round trip through the engine loop; 503 if that takes 5 s or the engine is dead."""
    await ask_engine(context_of(request).engine.ping())
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Json:
    """Ready for new requests: as `/health`, but 503 as well while the server drains or stops."""
    context = context_of(request)
    context.check_accepting()
    if context.stopping.is_set():
        raise ApiError(503, "the server is stopping", code="stopping")
    await ask_engine(context.engine.ping())
    return {"status": "ok"}


@router.get("/health_generate")
async def health_generate(request: Request) -> Json:
    """200 once a token has been generated, for this or another request; 503 if none comes within 10 s, or if draining.

    Callers at the same time share one generation.
    """
    context = context_of(request)
    context.check_accepting()
    if not context.probes:
        probe = asyncio.create_task(_see_a_token(context))
        context.probes.add(probe)
        probe.add_done_callback(lambda probe: _forget(context, probe))
    [probe] = context.probes
    await asyncio.shield(probe)
    return {"status": "ok"}


def _forget(context: ServerContext, probe: asyncio.Task[None]) -> None:
    context.probes.discard(probe)
    if not probe.cancelled():
        probe.exception()  # else asyncio complains where every caller has left


async def _see_a_token(context: ServerContext) -> None:
    """Return when a token has come from the engine. In a full queue that is another request's. Raises ApiError 503."""
    begun = time.perf_counter()
    own = asyncio.create_task(_generate_a_token(context))
    try:
        while not own.done() and context.metrics.latest_token < begun:
            if time.perf_counter() - begun > GENERATE_TIMEOUT_S:
                message = f"the engine has generated nothing for {GENERATE_TIMEOUT_S:g} s"
                raise ApiError(503, message, code="engine_stuck")
            await asyncio.wait((own,), timeout=LOOK_S)
        if own.done():
            own.result()
    finally:
        own.cancel()
        await asyncio.gather(own, return_exceptions=True)


async def _generate_a_token(context: ServerContext) -> None:
    params = SamplingParams(max_tokens=1, temperature=0)
    outputs = context.engine.generate([0], params, request_id=f"health-{uuid.uuid4().hex}")
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise ApiError(503, output.error or "the engine cannot generate", code="engine_failed")


@router.get("/get_load")
async def get_load(request: Request) -> list[Json]:
    """The load as SGLang's routers read it: requests, and tokens that are held or wait. One entry: the one engine."""
    context = context_of(request)
    stats = await ask_engine(context.engine.stats())
    load = _load(context, stats)
    return [
        {
            "dp_rank": 0,
            "num_reqs": load["num_total_reqs"],
            "num_waiting_reqs": load["num_waiting_reqs"],
            "num_tokens": load["num_total_tokens"],
            "num_pending_tokens": stats.num_waiting_tokens,
            "ts_tic": time.perf_counter(),
        }
    ]


@router.get("/v1/loads")
async def loads(request: Request) -> Json:
    """The same as SGLang's newer routers read it, and how full the KV pool is."""
    context = context_of(request)
    load = _load(context, await ask_engine(context.engine.stats()))
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": mini_sglang.__version__,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": load["num_running_reqs"],
            "total_waiting_reqs": load["num_waiting_reqs"],
            "total_reqs": load["num_total_reqs"],
            "total_used_tokens": load["num_used_tokens"],
            "total_tokens": load["num_total_tokens"],
            "avg_token_usage": load["token_usage"],
        },
    }


def _load(context: ServerContext, stats: SchedulerStats) -> Json:
    """SGLang's entry for an engine. Tokens are held where a page is; cached ones that no request holds do not count."""
    info = context.engine.info
    used = stats.num_used_pages * info.page_size
    return {
        "dp_rank": 0,
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_total_reqs": stats.num_running + stats.num_waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.num_waiting_tokens,
        "max_total_num_tokens": info.kv_pool_tokens,
        "token_usage": stats.num_used_pages / stats.num_pages,
        "cache_hit_rate": stats.num_cached_tokens / max(stats.num_prompt_tokens, 1),
        "max_running_requests": info.max_running_requests,
    }


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus."""
    context = context_of(request)
    stats: SchedulerStats | None = None
    with contextlib.suppress(TimeoutError, EngineDeadError):  # the metric engine_up says so
        stats = await context.engine.stats()
    return Response(context.metrics.render(stats), media_type=CONTENT_TYPE)
