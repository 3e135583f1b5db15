"""Tensor parallelism, as a layer sees it: a rank, a number of ranks, and sums and columns over all of them.

gloo on CPUs, NCCL on GPUs, in a group of this object's own: no global state of torch.distributed is used, so several
engines can live in one process. With one rank everything here is the identity. Knows tensors only.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d

from mini_sglang.parallel.sharding import HeadShards, Shard, shard_evenly, shard_heads
from mini_sglang.parallel.symm_mem import SymmMemAllReduce

logger = logging.getLogger(__name__)

_c10d: Any = distributed_c10d  # whose classes of backends have few types
_TIMEOUT = datetime.timedelta(minutes=30)  # a rank may wait long for another to load; the dead are noticed otherwise
_LANES = 16  # what sizes of shards are rounded up to: kernels read rows of 32 bytes and more


class RankError(RuntimeError):
    """One rank has failed, and with it all; the message names it and says why."""


class CollectiveError(RuntimeError):
    """An operation over all ranks failed, most likely because another rank has ended."""


class TensorParallel:
    """One of `size` ranks. Made by `connect_cpus` or `connect_gpus`; `SINGLE` is the only rank there is."""

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        if size > 1 and collectives is None:
            raise ValueError(f"{size} ranks need a way to each other")
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def shard(self, full: int) -> Shard:
        """This rank's part of a dimension."""
        return shard_evenly(full, self.rank, self.size, _LANES)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShards:
        """This rank's part of attention."""
        return shard_heads(num_heads, num_kv_heads, self.rank, self.size)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' x (contiguous), of which x is the memory or may be overwritten; same bits everywhere

        Plus `residual`, which is like x, and the same on all ranks. It comes last: terms are small beside it, and would
        be rounded at its magnitude.
        """
        if self._collectives is None or not x.numel():
            return x if residual is None else x.add_(residual)
        return self._collectives.sum(x, residual)

    def all_gather(self, x: torch.Tensor, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' x [rows, n] side by side, cut to `width` columns -> [rows, width], in `out` where that is given"""
        if self._collectives is None:
            return x if out is None else out.copy_(x)
        rows, columns = x.shape
        if not rows:
            return x.new_empty(0, width) if out is None else out
        gathered = x.new_empty(self.size * rows, columns)
        self._collectives.gather(gathered, x)
        parts = [
            part[:, : max(0, width - rank * columns)] for rank, part in enumerate(gathered.view(self.size, rows, -1))
        ]
        return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)

    def minimum(self, number: int) -> int:
        """The least of all ranks' numbers. Waits for all ranks."""
        return number if self._collectives is None else self._collectives.minimum(number)

    def abort(self) -> None:
        """Give up what runs on this rank, from any thread; no operation is possible afterwards."""
        if self._collectives is not None:
            self._collectives.abort()


SINGLE = TensorParallel()


class Collectives:
    """The operations of `TensorParallel` over a process group of torch's, gloo's or NCCL's."""

    def __init__(
        self, group: Any, device: torch.device, direct: SymmMemAllReduce | None = None, *, in_order: bool = False
    ) -> None:
        self._group = group
        self._device = device
        self._direct = direct  # for small tensors
        self._in_order = in_order

    def sum(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._direct is not None and self._direct.takes(x):
            return self._direct.sum(x, residual)
        if self._in_order:
            return self._sum_in_order(x, residual)
        options = _c10d.AllreduceOptions()
        options.asyncOp = False  # on a GPU: in the stream that computes, so that it can lie in a graph
        with _told_apart():
            _wait(self._group.allreduce([x], options))
        return x if residual is None else x.add_(residual)

    def _sum_in_order(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """In the order of the ranks, in float32, rounded once, as `one_shot_all_reduce` does it

        NCCL's order depends on a tensor's size and an element's place in it, and it rounds before the residual.
        """
        size = self._group.size()
        parts = x.new_empty(size, *x.shape)
        self.gather(parts.view(size * x.shape[0], *x.shape[1:]), x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        if residual is not None:
            total += residual
        return total.to(x.dtype)

    def gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        with _told_apart():
            _wait(self._group._allgather_base(out, x, options))

    def minimum(self, number: int) -> int:
        tensor = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        with _told_apart():
            _wait(self._group.allreduce([tensor], options))
        return int(tensor.item())

    def abort(self) -> None:
        self._group.abort()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@contextmanager
def _told_apart() -> Iterator[None]:
    """torch reports a lost peer as a plain RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"a sum or exchange over all ranks failed: {error}") from error


def connect_cpus(store: Any, rank: int, size: int, address: str) -> TensorParallel:
    """Meet the other ranks at `store`, listening at `address`; waits for all of them."""
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _TIMEOUT
    with _told_apart():
        group = _c10d.ProcessGroupGloo(store, rank, size, options)
    return TensorParallel(rank, size, Collectives(group, torch.device("cpu")))


def connect_gpus(
    store: Any, rank: int, size: int, dtype: torch.dtype, *, name: str, direct: bool, in_order: bool = False
) -> TensorParallel:
    """Meet the other ranks at `store`, this one on the current device; waits for all of them.

    Most of what is summed will be of `dtype`. `name` is the same on all ranks, and new. With `direct` small tensors are
    summed through symmetric memory, where the GPUs, all of this node, can read each other's. With `in_order` the bits
    of a sum depend on its terms alone, not on what else is summed with it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    with _told_apart():
        nccl = _c10d.ProcessGroupNCCL(store, rank, size, options)
        nccl.eager_connect_single_device(device)
    small_sums = None
    direct = direct and not (
        in_order and size > 2
    )  # between two all goes through one_shot_all_reduce, which sums in order
    if direct and SymmMemAllReduce.is_possible(dtype, size):
        small_sums = SymmMemAllReduce(store, nccl, name, device, dtype)
    if rank == 0:
        small = "NCCL too" if small_sums is None else "symmetric memory"
        logger.info("%d ranks sum through NCCL, small tensors through %s", size, small)
    return TensorParallel(rank, size, Collectives(nccl, device, small_sums, in_order=in_order))


def own_address(peer: str, port: int) -> str:
    """The address of this machine that packets to `peer` leave from."""
    family = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return str(probe.getsockname()[0])
