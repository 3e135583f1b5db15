"""The store through which symmetric memory finds the other ranks, tested without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch._C._distributed_c10d as _c10d

from mini_sglang.parallel.symm_mem import RenumberedStore


def exchange(store: _c10d.Store, number: int, rank: int) -> list[bytes]:
    """As torch's symmetric memory does it: what both ranks have written under this number of their process."""
    store.set(f"CUDASymmetricMemory/{number}/{rank}", f"from {rank}")
    keys = [f"CUDASymmetricMemory/{number}/{peer}" for peer in range(2)]
    store.wait(keys)
    return [store.get(key) for key in keys]


def test_ranks_find_each_other_whatever_their_processes_did_before(tmp_path: Path) -> None:
    def work(rank: int) -> list[list[bytes]]:
        store = RenumberedStore(_c10d.FileStore(str(tmp_path / "store"), 2))
        within = _c10d.PrefixStore("symmetric_memory", store)  # torch calls it from C++, as this does
        earlier = 7 if rank == 0 else 0
        return [exchange(within, number, rank) for number in range(earlier, earlier + 3)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[[b"from 0", b"from 1"]] * 3] * 2


def test_other_keys_stay_as_they_are(tmp_path: Path) -> None:
    plain = _c10d.FileStore(str(tmp_path / "store"), 1)
    store = RenumberedStore(plain)
    store.set("0/1", "kept")
    assert plain.get("0/1") == b"kept"
    assert store.add("count/3", 2) == 2
    assert plain.add("count/3", 1) == 3
