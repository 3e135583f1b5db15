"""Tensor parallelism as a layer sees it: a rank, the number of ranks, sums over them, and columns gathered from them.

gloo on CPUs, NCCL on GPUs, in a process group of this object's own: no global state of torch.distributed is used, so
several engines can live in one process. With one rank every operation is the identity. Knows tensors only.
"""

from __future__ import annotations

import datetime
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d

from mini_sglang.parallel.sharding import HeadShards, Shard, shard_evenly, shard_heads

if TYPE_CHECKING:  # it needs private parts of torch
    from mini_sglang.parallel.symm_mem import SymmMemAllReduce

logger = logging.getLogger(__name__)

_c10d: Any = distributed_c10d  # its classes of backends have few types
_TIMEOUT = datetime.timedelta(minutes=30)  # a rank may wait long for another to load; lost ranks are noticed elsewhere
_SHARD_MULTIPLE = 16  # sizes of shards are rounded up to it: kernels read rows of 32 bytes and more


class RankError(RuntimeError):
    """A rank has failed, and all ranks end with it; the message names the rank and says why."""


class CollectiveError(RuntimeError):
    """An operation over all ranks failed, most likely because another rank has ended."""


class TensorParallel:
    """One of `size` ranks, made by `connect_cpus` or `connect_gpus`. `SINGLE` is the rank of an engine that has one."""

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        if size > 1 and collectives is None:
            raise ValueError(f"{size} ranks need collectives: make them with connect_cpus or connect_gpus")
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def shard(self, full: int) -> Shard:
        """This rank's part of a dimension."""
        return shard_evenly(full, self.rank, self.size, _SHARD_MULTIPLE)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShards:
        """This rank's part of attention."""
        return shard_heads(num_heads, num_kv_heads, self.rank, self.size)

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of all ranks' x (contiguous), with the same bits on every rank; may overwrite x and return it.

        `residual`, which is like x and the same on all ranks, is added last: terms are small beside it, and would be
        rounded at its magnitude.
        """
        if self._collectives is None or not x.numel():
            return x if residual is None else x.add_(residual)
        return self._collectives.all_reduce(x, residual)

    def all_gather(self, x: torch.Tensor, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """All ranks' x [rows, n] side by side, cut to `width` columns -> [rows, width], in `out` if that is given"""
        if self._collectives is None:
            return x if out is None else out.copy_(x)
        rows, columns = x.shape
        if not rows:
            return x.new_empty(0, width) if out is None else out
        gathered = x.new_empty(self.size * rows, columns)
        self._collectives.all_gather(gathered, x)
        parts = [
            part[:, : max(0, width - rank * columns)] for rank, part in enumerate(gathered.view(self.size, rows, -1))
        ]
        return torch.cat(parts, 1) if out is None else torch.cat(parts, 1, out=out)

    def minimum(self, number: int) -> int:
        """The least of all ranks' numbers; waits for all ranks."""
        return number if self._collectives is None else self._collectives.minimum(number)

    def barrier(self) -> None:
        """Wait until all ranks have come so far."""
        self.minimum(0)

    def abort(self) -> None:
        """Give up what runs on this rank; any thread may call it. No operation is possible afterwards."""
        if self._collectives is not None:
            self._collectives.abort()


SINGLE = TensorParallel()


class Collectives:
    """The operations of `TensorParallel` over one of torch's process groups, gloo's or NCCL's."""

    def __init__(
        self, group: Any, device: torch.device, symm_mem: SymmMemAllReduce | None = None, *, deterministic: bool = False
    ) -> None:
        self._group = group
        self._device = device
        self._symm_mem = symm_mem  # for small tensors
        self._deterministic = deterministic

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self._symm_mem is not None and self._symm_mem.supports(x):
            return self._symm_mem.all_reduce(x, residual)
        if self._deterministic:
            return self._all_reduce_in_order(x, residual)
        options = _c10d.AllreduceOptions()
        options.asyncOp = False  # on a GPU: on the stream that computes, so that a graph can capture it
        with _as_collective_error():
            _wait(self._group.allreduce([x], options))
        return x if residual is None else x.add_(residual)

    def _all_reduce_in_order(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Sum in the order of the ranks, in float32, rounded once, as `one_shot_all_reduce` does.

        NCCL's order depends on a tensor's size and an element's place in it, and it rounds before the residual.
        """
        size = self._group.size()
        parts = x.new_empty(size, *x.shape)
        self.all_gather(parts.view(size * x.shape[0], *x.shape[1:]), x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        if residual is not None:
            total += residual
        return total.to(x.dtype)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        options = _c10d.AllgatherOptions()
        options.asyncOp = False
        with _as_collective_error():
            _wait(self._group._allgather_base(out, x, options))

    def minimum(self, number: int) -> int:
        tensor = torch.tensor([number], dtype=torch.int64, device=self._device)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        with _as_collective_error():
            _wait(self._group.allreduce([tensor], options))
        return int(tensor.item())

    def abort(self) -> None:
        self._group.abort()


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


@contextmanager
def _as_collective_error() -> Iterator[None]:
    """Raise CollectiveError instead of the plain RuntimeError by which torch reports a lost peer."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"a collective operation over all ranks failed: {error}") from error


def connect_cpus(store: Any, rank: int, size: int, address: str) -> TensorParallel:
    """Join the other ranks through `store`, listening at `address`; waits for all of them."""
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = _TIMEOUT
    with _as_collective_error():
        group = _c10d.ProcessGroupGloo(store, rank, size, options)
    return TensorParallel(rank, size, Collectives(group, torch.device("cpu")))


def connect_gpus(
    store: Any, rank: int, size: int, dtype: torch.dtype, *, name: str, symm_mem: bool, deterministic: bool = False
) -> TensorParallel:
    """Join the other ranks through `store`, on the current device; waits for all of them.

    Most of what is summed will be of `dtype`. `name` is the same on all ranks, and new. With `symm_mem` small tensors
    are summed through symmetric memory if the GPUs, all of one node, can access each other's memory. With
    `deterministic` the bits of a sum depend on its terms alone, not on what else is summed with it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    with _as_collective_error():
        nccl = _c10d.ProcessGroupNCCL(store, rank, size, options)
        nccl.eager_connect_single_device(device)
    symm_mem_all_reduce = None
    # two ranks sum everything through one_shot_all_reduce, which adds in order
    if symm_mem and (size <= 2 or not deterministic):
        from mini_sglang.parallel.symm_mem import SymmMemAllReduce  # needs private parts of torch

        if SymmMemAllReduce.is_available(dtype, size):
            symm_mem_all_reduce = SymmMemAllReduce(store, nccl, name, device, dtype)
    if rank == 0:
        small = "NCCL too" if symm_mem_all_reduce is None else "symmetric memory"
        logger.info("%d ranks sum through NCCL, small tensors through %s", size, small)
    return TensorParallel(rank, size, Collectives(nccl, device, symm_mem_all_reduce, deterministic=deterministic))


def own_address(peer: str, port: int) -> str:
    """The address of this machine that packets to `peer` leave from."""
    family = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, port))  # sends nothing
        return str(probe.getsockname()[0])
