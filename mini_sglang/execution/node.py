"""Runs the workers of a node other than rank 0's: starts them, watches them, and ends with rank 0."""

from __future__ import annotations

import logging
import socket
from datetime import timedelta

import msgspec
import zmq
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from mini_sglang.config import EngineConfig
from mini_sglang.execution.worker_group import (
    LEAVE,
    LEAVE_S,
    MEETING_S,
    SILENT_TICKS,
    TICK_S,
    Job,
    LocalWorkers,
    encode_report,
    new_context,
    split_address,
)
from mini_sglang.parallel.tensor_parallel import RankError

logger = logging.getLogger(__name__)


def serve_node(config: EngineConfig) -> None:
    """Run this node's ranks until rank 0 ends them. Settings other than where the model lies are those of rank 0.

    Raises RankError if a rank of this node fails, or rank 0 does not appear or is lost; ValueError, naming the field,
    for settings that do not go together with rank 0's.
    """
    job = _find_job(str(config.dist_init_addr))
    if (job.config.tp, job.config.nnodes) != (config.tp, config.nnodes):
        raise ValueError(
            f"tp and nnodes must be those of rank 0, {job.config.tp} and {job.config.nnodes}; "
            f"got {config.tp} and {config.nnodes}"
        )
    here = {"model": config.model, "model_source": config.model_source, "revision": config.revision}
    job = msgspec.structs.replace(job, config=job.config.replace(**here, node_rank=config.node_rank))
    per_node = config.tp // config.nnodes
    first = config.node_rank * per_node
    context = new_context()
    workers = LocalWorkers(job, range(first, first + per_node), first)
    try:
        _watch(job, workers, context)
    finally:
        workers.kill()
        context.destroy(linger=1000)


def _find_job(address: str) -> Job:
    """What rank 0 tells all, once it has been started."""
    host, port = split_address(address)
    try:
        socket.getaddrinfo(host, port)  # an unknown name would be looked up again and again
    except OSError as error:
        raise ValueError(f"dist_init_addr {address} must be an address of node 0: {error}") from error
    logger.info("waiting for rank 0 at %s", address)
    try:
        store = TCPStore(host, port, timeout=timedelta(seconds=MEETING_S))
        return msgspec.json.decode(store.get("job"), type=Job)
    except RuntimeError as error:  # a C++ stack follows its first line
        reason = str(error).partition("\n")[0]
        raise RankError(f"no rank 0 was found at dist_init_addr {address}: {reason}") from None


def _watch(job: Job, workers: LocalWorkers, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    pulse = context.socket(zmq.SUB)
    pulse.subscribe(b"")
    pulse.connect(job.pulse)
    silent_ticks = 0
    while silent_ticks <= SILENT_TICKS:
        silent_ticks = 0 if pulse.poll(round(TICK_S * 1000)) else silent_ticks + 1
        if not silent_ticks and pulse.recv() == LEAVE:
            workers.wait(LEAVE_S)
            return
        if (ended := workers.ended()) is not None:
            workers.wait(TICK_S)  # all may be leaving
            if workers.all_left:
                return
            with context.socket(zmq.PUSH) as reports:
                reports.connect(job.reports)
                reports.send(encode_report(ended))
            raise RankError(str(ended))
    raise RankError(f"rank 0 has been silent for {SILENT_TICKS * TICK_S:.0f} s: it has ended, was stopped or cut off")
