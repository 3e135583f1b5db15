"""Checks of L10: who holds what, by numbers; layers and a whole model on two and three ranks against one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import FileStore  # type: ignore[attr-defined]

from mini_sglang.attention.base import AttentionMetadata
from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.reference import ReferenceBackend
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.embedding import Embedding
from mini_sglang.layers.forward_batch import ForwardBatch
from mini_sglang.layers.linear import Linear
from mini_sglang.layers.norm import NO_NORMS, BlockNorms, RMSNorm
from mini_sglang.layers.placement import Placement
from mini_sglang.learn.checking import expect, expect_close, guards
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.parallel.sharding import Shard, copy_shard, shard_evenly, shard_heads, whole
from mini_sglang.parallel.tensor_parallel import SINGLE, CollectiveError, TensorParallel, connect_cpus
from mini_sglang.weights.dummy import dummy_tensor, load_dummy_weights

CPU = torch.device("cpu")


def on_ranks(work: Callable[[TensorParallel], Any], size: int = 2) -> list[Any]:
    """What `work` gives on each of `size` ranks, which are threads; an error of one ends what the others wait for."""
    with tempfile.TemporaryDirectory() as folder:
        connected: list[TensorParallel] = []

        def one(rank: int) -> Any:
            parallel = connect_cpus(FileStore(str(Path(folder, "store")), size), rank, size, "127.0.0.1")
            connected.append(parallel)
            try:
                return work(parallel)
            except Exception as error:
                for other in connected:
                    other.abort()
                return error

        with ThreadPoolExecutor(size) as pool:
            results = list(pool.map(one, range(size)))
    errors = [result for result in results if isinstance(result, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, CollectiveError)):
        raise error
    return results


def placement(parallel: TensorParallel) -> Placement:
    return Placement(CPU, torch.float32, TorchKernels(), parallel=parallel)


def spans(shards: list[Shard]) -> list[tuple[int, int]]:
    return [(shard.start, shard.stop) for shard in shards]


# -- who holds what -------------------------------------------------------------------------------------------------


@guards("remainder-dropped")
def test_nothing_has_to_divide() -> None:
    shards = [shard_evenly(10, rank, 4) for rank in range(4)]
    invariant = "all of 0 to 9 are on some rank, and every rank has equal room"
    expect(spans(shards), [(0, 3), (3, 6), (6, 9), (9, 10)], "10 elements on 4 ranks", invariant=invariant)
    expect({shard.size for shard in shards}, {3}, "room on each rank", invariant=invariant, read="L10: Who holds what")
    expect(shard_evenly(10, 0, 1, 16), whole(10), "10 elements on one rank, which needs no padding")


@guards("begins-behind-the-end")
def test_a_rank_may_have_nothing() -> None:
    shards = [shard_evenly(10, rank, 4, multiple=4) for rank in range(4)]
    expect(
        spans(shards),
        [(0, 4), (4, 8), (8, 10), (10, 10)],
        "10 elements on 4 ranks in multiples of 4",
        invariant="start <= stop <= full: an empty part is empty, not negative",
        read="L10: Who holds what",
    )


@guards("heads-torn-apart")
def test_a_kv_head_stays_with_its_queries() -> None:
    shards = [shard_heads(9, 3, rank, 2) for rank in range(2)]
    invariant = "queries 0-2 attend to KV head 0, 3-5 to 1, 6-8 to 2: a rank holds whole groups"
    read = "L10: Heads"
    expect(
        spans([shard.queries for shard in shards]), [(0, 6), (6, 9)], "9 query heads", invariant=invariant, read=read
    )
    expect(spans([shard.kv for shard in shards]), [(0, 2), (2, 3)], "their 3 KV heads", invariant=invariant, read=read)
    rooms = {(shard.queries.size, shard.kv.size) for shard in shards}
    expect(rooms, {(6, 2)}, "room for query and KV heads on each rank", invariant=invariant, read=read)


@guards("kv-heads-by-rank", "ranks-without-heads")
def test_a_kv_head_is_repeated_where_there_are_more_ranks() -> None:
    shards = [shard_heads(32, 2, rank, 4) for rank in range(4)]
    invariant = "a KV head lies wherever one of its queries does, and no rank is without work"
    expect(
        spans([shard.queries for shard in shards]),
        [(0, 8), (8, 16), (16, 24), (24, 32)],
        "32 query heads with 2 KV heads on 4 ranks",
        invariant=invariant,
        read="L10: Heads",
    )
    expect(
        spans([shard.kv for shard in shards]),
        [(0, 1), (0, 1), (1, 2), (1, 2)],
        "their 2 KV heads",
        invariant=invariant,
        read="L10: Heads",
    )


@guards("padding-left-dirty")
def test_what_is_missing_is_zero() -> None:
    target = torch.full((4, 2), torch.nan)
    copy_shard(target, torch.arange(12.0).view(6, 2), shard_evenly(6, 1, 2, multiple=4), whole(2))
    expect(
        [[repr(value) for value in row] for row in target.tolist()],
        [["8.0", "9.0"], ["10.0", "11.0"], ["0.0", "0.0"], ["0.0", "0.0"]],
        "rows 4 and 5 of 6 in room for 4, where memory held NaN",
        invariant="zeros add nothing to any result; NaN times zero is NaN",
        read="L10: Who holds what",
    )


def test_columns_are_cut_like_rows() -> None:
    target = torch.empty(2, 3)
    copy_shard(target, torch.arange(12.0).view(2, 6), whole(2), shard_evenly(6, 1, 2))
    expect(target.tolist(), [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]], "columns 3 to 5 of a matrix [2, 6]")


# -- what ranks say to each other -----------------------------------------------------------------------------------


@guards("gathered-rows-mixed")
def test_parts_stand_side_by_side() -> None:
    full = torch.arange(12.0).view(3, 4)
    results = on_ranks(lambda parallel: parallel.all_gather(full[:, 2 * parallel.rank :][:, :2].contiguous(), 4))
    for rank, got in enumerate(results):
        expect_close(
            got,
            full,
            f"columns 0, 1 of rank 0 and 2, 3 of rank 1, gathered on rank {rank}",
            invariant="ranks' blocks arrive one under the other, [size, rows, columns]",
            read="L10: Four places",
        )


@guards("padding-among-the-logits")
def test_what_was_added_is_cut_off() -> None:
    full = torch.arange(5.0).view(1, 5)
    padded = F.pad(full, (0, 1))
    results = on_ranks(lambda parallel: parallel.all_gather(padded[:, 3 * parallel.rank :][:, :3].contiguous(), 5))
    for rank, got in enumerate(results):
        expect(
            got.tolist(),
            full.tolist(),
            f"5 logits on two ranks with room for 3 each, gathered on rank {rank}",
            invariant="a logit of 0 for a token that does not exist may well be the largest",
            read="L10: Four places",
        )


def test_a_gather_fills_the_room_that_is_given() -> None:
    def gather(parallel: TensorParallel) -> list[object]:
        out = torch.empty(1, 2)
        got = parallel.all_gather(torch.tensor([[float(parallel.rank)]]), 2, out)
        return [got is out, out.tolist(), parallel.all_gather(torch.empty(0, 1), 2).shape]

    for got in on_ranks(gather):
        expect(got, [True, [[0.0, 1.0]], torch.Size([0, 2])], "a gather into `out`, and one of no rows")
    x = torch.ones(2, 3)
    expect(SINGLE.all_gather(x, 3) is x, True, "whether one rank's gather is what it is given")


def summed_layer(parallel: TensorParallel, *, bias: bool = False, norms: BlockNorms = NO_NORMS) -> Linear:
    """Row-parallel, 6 inputs and 3 outputs, filled from tensors that depend on their name alone."""
    inputs = shard_evenly(6, parallel.rank, parallel.size)
    layer = Linear(inputs, {"o": 3}, placement(parallel), bias=bias, summed=True, norms=norms)
    for name, slot in layer.weight_slots("").items():
        slot.load(dummy_tensor(name, slot.shape, 0, CPU))
    return layer


X = torch.linspace(-1, 1, 12).view(2, 6)
WEIGHT, BIAS = dummy_tensor("o.weight", (3, 6), 0, CPU).dense(), dummy_tensor("o.bias", (3,), 0, CPU).dense()


def columns(parallel: TensorParallel) -> torch.Tensor:
    """This rank's inputs."""
    inputs = shard_evenly(6, parallel.rank, parallel.size)
    return X[:, inputs.start : inputs.stop].contiguous()


def expect_on_ranks(results: list[torch.Tensor], expected: torch.Tensor, what: str, invariant: str) -> None:
    for rank, got in enumerate(results):
        expect_close(got, expected, f"{what}, on rank {rank}", invariant=invariant, read="L10: Four places")


@guards("sum-forgotten")
def test_a_row_parallel_product_is_summed() -> None:
    results = on_ranks(lambda parallel: summed_layer(parallel).add_to(torch.zeros(2, 3), columns(parallel)).x)
    expect_on_ranks(
        results, X @ WEIGHT.T, "x W^T of 6 inputs, 3 on each rank", "the whole product is the sum of the parts"
    )


@guards("residual-on-every-rank")
def test_the_residual_counts_once() -> None:
    residual = torch.full((2, 3), 10.0)
    results = on_ranks(lambda parallel: summed_layer(parallel).add_to(residual.clone(), columns(parallel)).x)
    expect_on_ranks(
        results, 10 + X @ WEIGHT.T, "a residual of 10 + x W^T", "every rank holds the residual; one adds it"
    )


@guards("bias-on-every-rank")
def test_the_bias_counts_once() -> None:
    results = on_ranks(
        lambda parallel: summed_layer(parallel, bias=True).add_to(torch.zeros(2, 3), columns(parallel)).x
    )
    expect_on_ranks(results, X @ WEIGHT.T + BIAS, "x W^T + bias", "every rank is given the bias; one adds it")


@guards("norm-before-the-sum")
def test_a_norm_behind_the_product_sees_the_sum() -> None:
    def work(parallel: TensorParallel) -> torch.Tensor:
        norm = RMSNorm(3, 1e-5, placement(parallel))
        norm.weight.fill_(1.0)
        layer = summed_layer(parallel, norms=BlockNorms(after=norm))
        return layer.add_to(torch.zeros(2, 3), columns(parallel)).x

    wanted = F.rms_norm(X @ WEIGHT.T, (3,), None, 1e-5)
    expect_on_ranks(on_ranks(work), wanted, "norm(x W^T)", "norm(a + b) is not norm(a) + norm(b)")


@guards("foreign-tokens-counted")
def test_a_token_is_looked_up_where_its_row_lies() -> None:
    table = dummy_tensor("table", (40, 4), 0, CPU)  # 32 rows on rank 0, 8 on rank 1

    def work(parallel: TensorParallel) -> torch.Tensor:
        embedding = Embedding(40, 4, placement(parallel))
        embedding.weight_slot().load(table)
        return embedding(torch.tensor([0, 31, 32, 39]))

    expect_on_ranks(
        on_ranks(work),
        table.dense()[[0, 31, 32, 39]],
        "embeddings of tokens 0, 31 (of rank 0), 32 and 39 (of rank 1)",
        "one rank gives the row, all others zeros",
    )


# -- all of it ------------------------------------------------------------------------------------------------------


def logits_of(parallel: TensorParallel) -> torch.Tensor:
    """Of a prompt of 7 in a random model whose sizes divide by nothing."""
    config = ModelConfig(
        architecture="llama",
        vocab_size=83,
        hidden_size=36,
        intermediate_size=52,
        num_layers=2,
        num_heads=9,
        num_kv_heads=3,
        head_dim=4,
        context_length=32,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        mlp_bias=True,
    )
    model = build_model(config, placement(parallel))
    load_dummy_weights(model.weight_slots(), seed=0, device=CPU, show_progress=False)
    heads = parallel.heads(config.num_heads, config.num_kv_heads)
    pool = KVPool(
        num_layers=2,
        num_pages=2,
        page_size=8,
        num_kv_heads=heads.kv.size,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    plan = ReferenceBackend(pool, torch.float32).plan(
        AttentionMetadata([0], [7], torch.tensor([[1]]), torch.arange(8, 15))
    )
    with torch.inference_mode():
        return model(ForwardBatch(torch.tensor([3, 80, 15, 31, 32, 64, 82]), torch.arange(7), None, plan))


def test_a_model_says_on_many_ranks_what_it_says_on_one() -> None:
    alone = logits_of(SINGLE)
    for size in (2, 3):
        results = on_ranks(logits_of, size)
        expect_on_ranks(
            results, alone, f"logits of a model on {size} ranks [token, vocabulary]", "same sums, other places"
        )
        expect(
            [bool(got.equal(results[0])) for got in results],
            [True] * size,
            "whether all ranks have the same bits",
            invariant="every rank samples for itself: a different last bit is sooner or later a different token",
            read="L10: The same bits",
        )
