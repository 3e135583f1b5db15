"""What each rank holds: everything once, in order, the same amount on all ranks, and zeros where nothing is left."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mini_sglang.parallel.sharding import copy_shard, shard_evenly, shard_heads, whole

ranks = st.integers(1, 9)


@given(st.integers(1, 3000), ranks, st.sampled_from([1, 16, 32]))
def test_even_shards_cover_the_dimension_once(full: int, size: int, multiple: int) -> None:
    shards = [shard_evenly(full, rank, size, multiple) for rank in range(size)]
    assert [i for shard in shards for i in range(shard.start, shard.stop)] == list(range(full))
    assert len({shard.size for shard in shards}) == 1
    if size > 1:
        assert shards[0].size % multiple == 0
        assert shards[0].size < full / size + multiple
    else:
        assert shards == [whole(full)]


@given(st.integers(1, 12), st.integers(1, 12), ranks)
def test_every_query_head_is_on_one_rank_beside_its_kv_head(num_kv_heads: int, group: int, size: int) -> None:
    num_heads = num_kv_heads * group
    shards = [shard_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]
    assert len({(shard.queries.size, shard.kv.size) for shard in shards}) == 1
    queries = []
    for shard in shards:
        local_group = shard.queries.size // shard.kv.size
        assert shard.queries.size == local_group * shard.kv.size
        assert group % local_group == 0
        assert shard.kv.stop - shard.kv.start == -(-(shard.queries.stop - shard.queries.start) // local_group)
        for local, head in enumerate(range(shard.queries.start, shard.queries.stop)):
            assert shard.kv.start + local // local_group == head // group, "the KV head that it attends to"
            queries.append(head)
    assert queries == list(range(num_heads))


@given(st.integers(1, 16), st.integers(1, 16), ranks)
def test_no_rank_holds_more_kv_heads_than_it_must(num_kv_heads: int, group: int, size: int) -> None:
    shard = shard_heads(num_kv_heads * group, num_kv_heads, 0, size)
    assert shard.kv.size == max(1, -(-num_kv_heads // size))


def test_kv_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    shards = [shard_heads(32, 2, rank, 4) for rank in range(4)]
    assert [(shard.kv.start, shard.kv.stop) for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert {shard.queries.size for shard in shards} == {8}


def test_one_rank_pads_nothing() -> None:
    shard = shard_heads(9, 3, 0, 1)
    assert (shard.queries, shard.kv) == (whole(9), whole(3))


@given(st.integers(1, 40), st.integers(1, 40), ranks)
def test_parts_of_a_matrix_join_to_the_whole(rows: int, columns: int, size: int) -> None:
    matrix = torch.randn(rows, columns)
    parts = []
    for rank in range(size):
        shard = shard_evenly(rows, rank, size, 4)
        part = torch.full((shard.size, columns), torch.nan)
        copy_shard(part, matrix, shard, whole(columns))
        parts.append(part)
    joined = torch.cat(parts)
    assert joined[:rows].equal(matrix)
    assert not joined[rows:].any()
