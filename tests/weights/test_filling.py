"""Layers load beside each other, the tensors of one layer in order; and of a tensor only the rows that are needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mini_sglang.parallel.sharding import Shard, shard_evenly, whole
from mini_sglang.weights.filling import fill_slots
from mini_sglang.weights.tensor import CheckpointTensor, WeightSlot


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Slots:
    """Slots that note what they are given, and on which thread."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, str]] = []

    def pair(self, name: str, size: int = 1) -> tuple[CheckpointTensor, WeightSlot]:
        return CheckpointTensor(name, (size,), lambda: torch.zeros(size)), WeightSlot((size,), self.load)

    def load(self, tensor: CheckpointTensor) -> None:
        self.loaded.append((tensor.name, threading.current_thread().name))


def fill(plan: list[tuple[CheckpointTensor, WeightSlot]]) -> None:
    fill_slots(plan, "Loading", show_progress=False)


def test_every_tensor_is_loaded_once_and_a_layer_in_order_on_one_thread() -> None:
    slots = Slots()
    names = [f"model.layers.{layer}.{part}" for part in "abc" for layer in range(12)] + ["lm_head.weight"]
    fill([slots.pair(name) for name in names])
    assert sorted(name for name, _ in slots.loaded) == sorted(names)
    for layer in range(12):
        of_layer = [(name, thread) for name, thread in slots.loaded if f".{layer}." in name]
        assert [name[-1] for name, _ in of_layer] == ["a", "b", "c"]
        assert len({thread for _, thread in of_layer}) == 1


def test_two_layers_load_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)

    def meet(tensor: CheckpointTensor) -> None:
        both.wait()

    slot = WeightSlot((1,), meet)
    fill([(CheckpointTensor(f"model.layers.{layer}.a", (1,), lambda: torch.zeros(1)), slot) for layer in range(2)])
    assert not both.broken


def test_the_layer_with_the_largest_tensor_comes_first() -> None:
    torch.set_num_threads(1)
    slots = Slots()
    fill(
        [
            slots.pair("model.layers.0.a", 2),
            slots.pair("model.embed_tokens.weight", 9),
            slots.pair("model.layers.1.a", 5),
        ]
    )
    assert [name for name, _ in slots.loaded] == ["model.embed_tokens.weight", "model.layers.1.a", "model.layers.0.a"]
    assert {thread for _, thread in slots.loaded} == {threading.current_thread().name}


def test_torch_computes_on_the_loading_thread_alone_and_afterwards_as_before() -> None:
    seen: list[int] = []
    slot = WeightSlot((1,), lambda tensor: seen.append(torch.get_num_threads()))
    fill([(CheckpointTensor(f"model.layers.{layer}.a", (1,), lambda: torch.zeros(1)), slot) for layer in range(8)])
    assert seen == [1] * 8
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2


def test_an_error_is_raised_and_no_further_layer_begins() -> None:
    slots = Slots()

    def fail(tensor: CheckpointTensor) -> None:
        raise ValueError(f"{tensor.name} is damaged")

    plan = [(slots.pair("model.layers.0.a", 100)[0], WeightSlot((100,), fail))]

    def take_a_while(tensor: CheckpointTensor) -> None:
        time.sleep(0.01)
        slots.load(tensor)

    plan += [(slots.pair(f"model.layers.{layer}.a")[0], WeightSlot((1,), take_a_while)) for layer in range(1, 500)]
    with pytest.raises(ValueError, match=r"layers\.0\.a is damaged"):
        fill(plan)
    assert len(slots.loaded) < 499
    assert torch.get_num_threads() == 2


# -- the rows that are needed ------------------------------------------------------------------------------------------


def in_chunks(values: torch.Tensor, size: int, asked: list[tuple[int, int]]) -> CheckpointTensor:
    def chunks(start: int, stop: int) -> Iterator[torch.Tensor]:
        asked.append((start, stop))
        for at in range(start, stop, size):
            yield values[at : min(at + size, stop)]

    return CheckpointTensor("a", tuple(values.shape), lambda: values, chunks=chunks)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_asks_for_its_rows_alone_and_pads_with_zeros(ranks: int, size: int) -> None:
    values = torch.arange(10.0 * 7).view(10, 7)
    for rank in range(ranks):
        for rows, columns in (
            (shard_evenly(10, rank, ranks, 4), whole(7)),
            (whole(10), shard_evenly(7, rank, ranks, 4)),
        ):
            asked: list[tuple[int, int]] = []
            target, expected = (torch.full((rows.size, columns.size), torch.nan) for _ in range(2))
            in_chunks(values, size, asked).copy_to(target, rows, columns)
            CheckpointTensor("a", (10, 7), lambda: values).copy_to(expected, rows, columns)
            assert asked == [(rows.start, rows.stop)]
            assert torch.equal(target, expected)
            assert int((target != 0).sum()) == sum(
                bool(value) for value in values[rows.start : rows.stop, columns.start : columns.stop].flatten()
            )


def test_vectors_are_cut_and_converted_too() -> None:
    target = torch.full((4,), torch.nan, dtype=torch.bfloat16)
    in_chunks(torch.arange(10.0), 2, []).copy_to(target, Shard(10, 8, 10, 4))
    assert target.tolist() == [8, 9, 0, 0]
