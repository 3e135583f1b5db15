"""Starts, watches and ends the worker processes of tensor parallelism, and broadcasts batches to them.

        rank 0 ── batches: each step, to all ──────────▶ workers (worker_main.py), here and on other nodes
          ▲                                                 │
        monitor thread ◀── reports: alive, or why not ──────┘        (sums of tensors go their own way: parallel/)

Whatever happens to one worker ends all ranks within seconds, with an error that names it: one that died is seen by its
parent, one that was stopped by its silence, one that failed says so itself. All workers end with rank 0; one that is
stopped holds them up, as it would hold up itself alone. Knows batches as bytes, no model.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec
import zmq
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from mini_sglang.config import EngineConfig, ResolvedConfig
from mini_sglang.execution.resolve import DTYPES
from mini_sglang.parallel.tensor_parallel import (
    CollectiveError,
    RankError,
    TensorParallel,
    connect_cpus,
    connect_gpus,
    own_address,
)
from mini_sglang.scheduling.batch import ScheduledBatch

logger = logging.getLogger(__name__)

LEAVE = b""  # behind the last batch and the last pulse
HEARTBEAT_S = 1.0
TICK_S = 0.25
SILENT_TICKS = round(8 / TICK_S)  # counted, not measured: time stands still for processes that are stopped together
_VERDICT_TICKS = round(10 / TICK_S)  # until somebody who noticed a failure counts as its cause
LEAVE_S = 5.0  # for workers to leave by themselves
_GRACE_S = 5.0  # for rank 0 to come out of what it waits for, which a kernel that reads a lost GPU's memory never does
MEETING_S = 600.0  # for the other nodes to be started


class Job(msgspec.Struct, frozen=True):
    """What all ranks are told."""

    name: str  # new for each engine
    config: ResolvedConfig
    fit_pages: bool  # into a GPU's memory: `num_pages` is the most that can be of use
    store: str  # a file, or host:port of a TCPStore
    batches: str  # ZeroMQ addresses
    reports: str
    pulse: str  # for the parents of workers on other nodes

    def connect(self, rank: int) -> TensorParallel:
        """Join the others as `rank`; waits for all."""
        config = self.config
        one_node = config.nnodes == 1
        store = FileStore(self.store, config.tp) if one_node else TCPStore(*split_address(self.store))
        if config.device == "cuda":
            return connect_gpus(
                store,
                rank,
                config.tp,
                DTYPES[config.dtype],
                name=self.name,
                symm_mem=one_node and config.all_reduce == "auto",
                deterministic=config.deterministic,
            )
        address = "127.0.0.1" if one_node else own_address(*split_address(self.store))
        return connect_cpus(store, rank, config.tp, address)


class Assignment(msgspec.Struct, frozen=True):
    """What one worker is told, on its standard input."""

    job: Job
    rank: int
    device_index: int


class Alive(msgspec.Struct, tag=True):
    rank: int


class Failed(msgspec.Struct, tag=True):
    """`is_echo`: what failed was an operation over all ranks, so that the cause is most likely another rank."""

    rank: int
    how: str  # what the rank's number is the subject of
    is_echo: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} {self.how}"


encode_report = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(Alive | Failed).decode
_encode_batch = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(ScheduledBatch).decode


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """ZeroMQ's, whose sockets take IPv6 addresses too."""
    context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    return context


def split_address(address: str) -> tuple[str, int]:
    """host:port, IPv6 hosts in brackets"""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class LocalWorkers:
    """The workers of one node, children of this process: they end with it."""

    def __init__(self, job: Job, ranks: range, first_of_node: int) -> None:
        self._processes = {rank: _spawn(Assignment(job, rank, rank - first_of_node)) for rank in ranks}

    def ended(self) -> Failed | None:
        """A rank that has ended; None while all run."""
        for rank, process in self._processes.items():
            if process.poll() is not None:
                return Failed(rank, _describe(process.returncode))
        return None

    @property
    def all_left(self) -> bool:
        """Whether all have ended as they were told to."""
        return all(process.poll() == 0 for process in self._processes.values())

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, and then end those that have not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes.values()):
            time.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _spawn(assignment: Assignment) -> subprocess.Popen[bytes]:
    """Its standard input stays open: a worker leaves when it closes, that is when this process has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mini_sglang.execution.worker_main"], stdin=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(assignment) + b"\n")
    return process


def _describe(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _open_meeting_point(config: EngineConfig) -> TCPStore | None:
    """Where other nodes find rank 0."""
    if config.nnodes == 1:
        return None
    host, port = split_address(str(config.dist_init_addr))
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise ValueError(f"dist_init_addr {config.dist_init_addr} must be a free port of this node: {error}") from error


class WorkerGroup:
    """All ranks but this one, which is rank 0: started when this is made, watched by a thread until `close`."""

    def __init__(self, config: ResolvedConfig, *, fit_pages: bool) -> None:
        self._size = config.tp
        self._on_gpus, self._process = config.device == "cuda", os.getpid()
        self._may_hang = self._on_gpus or config.nnodes > 1  # where a peer that is lost does not break a wait for it
        self._store = _open_meeting_point(config)  # here as long as others may look it up
        self._failure: str | None = None
        self._failed, self._noticed, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._busy = False
        self._parallel: TensorParallel | None = None
        self._directory = tempfile.mkdtemp(prefix="mini-sglang-")  # mode 0700: nobody else can connect
        self._context = new_context()
        self._batches = self._context.socket(zmq.XPUB)
        self._batches.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of every subscriber
        self._batches.sndhwm = 0  # no batch is ever dropped
        self._batches.linger = 1000
        self._reports, self._pulse = self._context.socket(zmq.PULL), self._context.socket(zmq.PUB)
        self._job = Job(
            name=f"mini_sglang_{os.urandom(8).hex()}",
            config=config,
            fit_pages=fit_pages,
            store=f"{self._directory}/store" if config.nnodes == 1 else str(config.dist_init_addr),
            batches=self._bind(self._batches, "batches", config),
            reports=self._bind(self._reports, "reports", config),
            pulse=self._bind(self._pulse, "pulse", config),
        )
        if self._store is not None:
            self._store.set("job", msgspec.json.encode(self._job).decode())
        self._workers = LocalWorkers(self._job, range(1, config.tp // config.nnodes), 0)
        if self._on_gpus:
            atexit.register(self._end_at_once)
        self._monitor = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._monitor.start()

    def _bind(self, socket: zmq.Socket[bytes], name: str, config: EngineConfig) -> str:
        if config.nnodes == 1:
            socket.bind(f"ipc://{self._directory}/{name}")
        else:
            address = own_address(*split_address(str(config.dist_init_addr)))
            socket.bind(f"tcp://[{address}]:*" if ":" in address else f"tcp://{address}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self) -> TensorParallel:
        """Wait for all ranks and join them as rank 0. Raises RankError."""
        deadline = time.monotonic() + MEETING_S
        waiting = self._size - 1
        while waiting:
            self.check()
            if time.monotonic() > deadline:
                raise RankError(f"{waiting} of {self._size} ranks did not appear within {MEETING_S:.0f} s")
            if self._batches.poll(round(TICK_S * 1000)):
                self._batches.recv()  # a worker listens from here on
                waiting -= 1
        self._parallel = self._job.connect(0)
        return self._parallel

    def broadcast(self, batch: ScheduledBatch) -> None:
        """Have all other ranks compute `batch`."""
        self._batches.send(_encode_batch(batch))

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self._failure is not None:
            self._noticed.set()
            raise RankError(self._failure)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around what this rank does together with the others: errors that another rank has caused become RankError."""
        self._busy = True  # before the check: either this thread sees a failure here, or the monitor sees it busy
        try:
            self.check()
            yield
        except CollectiveError as error:
            self._failed.wait(TICK_S * (_VERDICT_TICKS + SILENT_TICKS))  # the monitor finds out who it was
            self._failure = self._failure or str(error)
            self._noticed.set()
            raise RankError(self._failure) from error
        except Exception as error:
            self._noticed.set()
            if self._failure is None or isinstance(error, RankError):
                raise
            raise RankError(self._failure) from error
        finally:
            self._busy = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: after any error in it this rank is not where the others are, so all have failed."""
        with self.guard():
            try:
                yield
            except (CollectiveError, RankError):
                raise
            except Exception as error:
                self._failure = self._failure or f"rank 0 failed: {type(error).__name__}: {error}"
                raise RankError(self._failure) from error

    def close(self) -> None:
        """End all ranks; by force those that do not leave within seconds, and after a failure."""
        self._closing.set()
        self._monitor.join()
        self._pulse.send(LEAVE)
        if self._failure is None:
            self._batches.send(LEAVE)
            self._workers.wait(LEAVE_S)
        self._workers.kill()
        if not self.is_beyond_closing:
            atexit.unregister(self._end_at_once)
            if self._parallel is not None:
                self._parallel.abort()
        self._context.destroy(linger=1000)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def is_beyond_closing(self) -> bool:
        """Whether NCCL and CUDA would wait in their destructors for what a lost rank never sends."""
        return self._on_gpus and self._failure is not None

    def _end_at_once(self) -> None:
        """At the end of a process that is beyond closing."""
        if not self.is_beyond_closing or os.getpid() != self._process:
            return
        self._monitor.join(_GRACE_S)  # it sees to it that the others have ended
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # nobody reads it, it was closed, there is none
                stream.flush()
        self._exit()

    def _exit(self) -> NoReturn:
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)

    def _watch(self) -> None:
        """The monitor: listens to reports and looks after this node's workers, until `close` or the first failure."""
        silence: dict[int, int] = {}  # ticks since a rank was last heard of
        echo: str | None = None
        echo_ticks = 0
        while not self._closing.is_set():
            if self._failure is not None:
                return self._fail(self._failure)
            self._pulse.send(b"alive")
            ended = self._workers.ended()  # before its last report is read
            for report in self._read_reports():
                silence[report.rank] = 0
                if isinstance(report, Failed) and report.is_echo:
                    echo = echo or str(report)
                elif isinstance(report, Failed):
                    return self._fail(str(report))
            if ended is not None:
                return self._fail(str(ended))
            for rank, ticks in silence.items():
                if ticks > SILENT_TICKS:
                    silent_s = SILENT_TICKS * TICK_S
                    return self._fail(f"rank {rank} has been silent for {silent_s:.0f} s: stopped, or cut off")
                silence[rank] = ticks + 1
            echo_ticks += echo is not None
            if echo is not None and echo_ticks > _VERDICT_TICKS:
                return self._fail(echo)
        return None

    def _read_reports(self) -> list[Alive | Failed]:
        """What has arrived, after one tick."""
        self._closing.wait(TICK_S)
        reports = []
        while self._reports.poll(0):
            reports.append(_decode_report(self._reports.recv()))
        return reports

    def _fail(self, failure: str) -> None:
        """Say so, end the other ranks, and free this one from what it may wait for."""
        logger.error("%s; ending all ranks", failure)
        self._failure = failure
        self._workers.kill()
        self._pulse.send(LEAVE)
        self._failed.set()
        if not self._busy or self._noticed.wait(TICK_S):
            return  # nothing waits for the lost rank
        if self._parallel is not None:  # NCCL comes back from it when no graph holds its operations any more
            threading.Thread(target=self._parallel.abort, name="abort", daemon=True).start()
        deadline = time.monotonic() + _GRACE_S
        while self._may_hang and self._busy and not self._noticed.wait(TICK_S):
            if time.monotonic() > deadline:
                logger.critical("this process is held up where it waits for the lost rank, and ends too")
                self._exit()
