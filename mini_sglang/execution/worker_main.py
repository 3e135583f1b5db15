"""A tensor-parallel worker: `python -m mini_sglang.execution.worker_main`, its assignment as a line of JSON on stdin.

It builds its part of the model and computes every batch that rank 0 broadcasts, until it is told to leave. It never
outlives its parent, whose end closes its standard input, and says every second that it lives. Decides nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import msgspec
import torch
import zmq

from mini_sglang.child_process import die_with_parent, leave_signals_to_parent
from mini_sglang.execution.load_drafter import find_drafter
from mini_sglang.execution.worker import Worker
from mini_sglang.execution.worker_group import (
    HEARTBEAT_S,
    LEAVE,
    Alive,
    Assignment,
    Failed,
    decode_batch,
    encode_report,
    new_context,
)
from mini_sglang.parallel.tensor_parallel import CollectiveError
from mini_sglang.weights.hub import find_model
from mini_sglang.weights.model_config import load_model_config

logger = logging.getLogger(__name__)

_WAIT_FOR_THE_END_S = 60.0


def main() -> int:
    """Be one rank, in a process of its own; returns the exit status."""
    die_with_parent()
    leave_signals_to_parent()
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {assignment.rank}: %(message)s")
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    return run(assignment)


def run(assignment: Assignment) -> int:
    """Be one rank, from loading until it is told to leave. Returns 0, or 1 after a failure that rank 0 was told of."""
    context = new_context()
    stopped = threading.Event()
    heart = threading.Thread(target=_beat, args=(assignment, context, stopped), daemon=True)
    heart.start()
    try:
        _serve(assignment, context)
        return 0
    except CollectiveError as error:
        _report(assignment, context, f"failed: {error}", is_echo=True)
        time.sleep(_WAIT_FOR_THE_END_S)  # an end before that of its cause would be taken for the cause
    except (ValueError, OSError) as error:  # a setting or a file is wrong: the message says all
        _report(assignment, context, f"failed: {error}")
    except Exception as error:  # rank 0 must learn why, whatever it was
        logger.exception("this rank failed")
        _report(assignment, context, f"failed: {type(error).__name__}: {error}")
    finally:
        stopped.set()
        heart.join()
        context.destroy(linger=1000)
    return 1


def _serve(assignment: Assignment, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    job, config = assignment.job, assignment.job.config
    if config.device == "cuda":
        torch.cuda.set_device(assignment.device_index)
    source = find_model(config)
    batches = context.socket(zmq.SUB)
    batches.rcvhwm = 0
    batches.subscribe(b"")
    batches.connect(job.batches)
    parallel = job.connect(assignment.rank)
    model_config = load_model_config(source)
    draft = find_drafter(config, model_config)
    worker = Worker(config, model_config, source, draft, parallel, lambda: None, fit_pages=job.fit_pages)
    while (message := batches.recv()) != LEAVE:
        worker.runner.run(decode_batch(message))
    del worker  # before what its graphs hold is given back
    parallel.abort()


def _beat(assignment: Assignment, context: zmq.Context[zmq.Socket[bytes]], stopped: threading.Event) -> None:
    with context.socket(zmq.PUSH) as socket:
        socket.connect(assignment.job.reports)
        while True:
            socket.send(encode_report(Alive(assignment.rank)))
            if stopped.wait(HEARTBEAT_S):
                return


def _report(
    assignment: Assignment, context: zmq.Context[zmq.Socket[bytes]], how: str, *, is_echo: bool = False
) -> None:
    with context.socket(zmq.PUSH) as socket:
        socket.connect(assignment.job.reports)
        socket.send(encode_report(Failed(assignment.rank, how, is_echo)))


def _leave_with_parent() -> None:
    """The pipe holds nothing more; it ends when the parent has ended, in whatever way."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a GPU that waits for lost ranks would hold up an orderly end
