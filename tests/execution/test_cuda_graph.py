"""Which sizes of decode steps are captured; that graphs compute the right thing is tested on GPUs."""

from __future__ import annotations

import pytest

from mini_sglang.execution.cuda_graph import graph_sizes


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 8, 9, 16, 21, 256])
def test_every_batch_up_to_the_limit_fits_a_size_with_less_than_eight_idle_rows(limit: int) -> None:
    sizes = graph_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit
    for rows in range(1, limit + 1):
        assert min(size for size in sizes if size >= rows) - rows < 8
