"""A matrix in few bits, as every format of quantised checkpoints comes to kernels. Knows no format and no kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mini_sglang.parallel.sharding import Shard, copy_shard, whole

_LEAST_GROUP = 16  # to cut groups into: with its scale, a weight of 4 bits takes 6 then


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix as stored: w[o, i] = scale[o, i // group_size] * q[o, i] + minimum[o, i // group_size].

    Scales of blocks, of whole rows and of the whole matrix are all written as scales of groups of a row's inputs.
    """

    q: torch.Tensor  # [out, in] uint8 for 4 bits (values 0 to 15), int8 or float8_e4m3fn for 8 bits
    scale: torch.Tensor  # [out, groups] float32
    minimum: torch.Tensor | None  # [out, groups] float32; None: all zeros
    group_size: int  # inputs that share a scale; those of the last group may be fewer

    def dense(self) -> torch.Tensor:
        """-> w [out, in] float32"""
        columns = self.q.shape[1]
        w = self.q.float()
        if columns % self.group_size == 0:
            groups = w.view(*self.scale.shape, self.group_size)
            groups *= self.scale[:, :, None]
            if self.minimum is not None:
                groups += self.minimum[:, :, None]
            return w

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(self.group_size, 1)[:, :columns]

        w *= spread(self.scale)
        return w if self.minimum is None else w.add_(spread(self.minimum))

    def shard(self, rows: Shard, columns: Shard) -> QuantizedWeight | None:
        """A rank's part, padded with zeros; groups that are cut become smaller ones, of one size on all ranks.

        None if those would be too small to be worth their scales, or if a group were padded that has a minimum.
        """
        if (rows, columns) == (whole(rows.full), whole(columns.full)):
            return self
        group = self.group_size
        if columns != whole(columns.full):
            group = columns.size if self.scale.shape[1] == 1 else math.gcd(group, columns.size)
        length = columns.stop - columns.start
        is_cut = length > 0 and columns.start % group > 0
        is_padded = columns.size > length and length % group > 0
        if group < min(_LEAST_GROUP, self.group_size) or is_cut or (is_padded and self.minimum is not None):
            return None
        groups = Shard(*(-(-number // group) for number in (columns.full, columns.start, columns.stop, columns.size)))

        def part(values: torch.Tensor, along_inputs: Shard) -> torch.Tensor:
            target = values.new_empty(rows.size, along_inputs.size)
            copy_shard(target, values, rows, along_inputs)
            return target

        def of_groups(values: torch.Tensor) -> torch.Tensor:
            if values.shape[1] == 1:
                return part(values.expand(-1, groups.full), groups)
            return part(values.repeat_interleave(self.group_size // group, 1), groups)

        minimum = None if self.minimum is None else of_groups(self.minimum)
        return QuantizedWeight(part(self.q, columns), of_groups(self.scale), minimum, group)

    def to(self, device: torch.device) -> QuantizedWeight:
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, q=self.q.to(device), scale=self.scale.to(device), minimum=minimum)

    def split(self, parts: int) -> list[QuantizedWeight]:
        """Its rows in `parts` equal parts, in order."""
        minimums = [None] * parts if self.minimum is None else self.minimum.chunk(parts)
        pieces = zip(self.q.chunk(parts), self.scale.chunk(parts), minimums, strict=True)
        return [QuantizedWeight(q, scale, minimum, self.group_size) for q, scale, minimum in pieces]

    def fits(self, other: QuantizedWeight) -> bool:
        """Whether the rows of both can stand in one matrix."""
        return self.q.dtype == other.q.dtype and self.group_size == other.group_size

    @staticmethod
    def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Parts that fit each other as one matrix: groups run along the input, so rows simply follow each other."""
        minimums = [torch.zeros_like(part.scale) if part.minimum is None else part.minimum for part in parts]
        return QuantizedWeight(
            q=torch.cat([part.q for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            minimum=None if all(part.minimum is None for part in parts) else torch.cat(minimums),
            group_size=parts[0].group_size,
        )
