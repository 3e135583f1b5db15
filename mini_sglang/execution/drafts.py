"""Steps that verify drafted tokens: what is written into the request table before, and what stays of it after.

A row's last tokens are drafted, and each token's successor is sampled as if those before it were the request's own.
Only steps with drafts come here.
"""

from __future__ import annotations

import torch

from mini_sglang.execution.request_table import RequestTable
from mini_sglang.scheduling.batch import Row, ScheduledBatch


def write_drafts(table: RequestTable, batch: ScheduledBatch) -> None:
    """Write drafted tokens behind the known ones."""
    for row in batch.rows:
        if (draft := batch.drafts.get(row.slot)) is not None:
            end = row.start + row.count
            table.tokens[row.slot, end - len(draft) : end] = table.send(draft, torch.int32)


def draws(rows: list[Row]) -> list[Row]:
    """A row for each token that is sampled: it ends with the token before that one, as if nothing was drafted."""
    return [
        row if row.samples == 1 else Row(row.slot, row.start, row.count - left, 1)
        for row in rows
        for left in range(row.samples - 1, -1, -1)
    ]


def accept(table: RequestTable, batch: ScheduledBatch, token_ids: torch.Tensor) -> None:
    """Let each slot go on behind the first token that was not drafted as it was drawn.

    token_ids [S]: what the step has sampled, and written into the table already
    """
    longest = max(map(len, batch.drafts.values()))
    slots, starts, drafts, drawn, first = [], [], [], [], 0
    for row in batch.rows:
        if row.samples > 1:
            draft, missing = batch.drafts[row.slot], longest - row.samples + 1
            slots.append(row.slot)
            starts.append(row.start)
            drafts.append(draft + [-1] * missing)
            drawn.append([*range(first, first + len(draft)), *[first] * missing])
        first += row.samples
    is_same = token_ids[table.send(drawn)] == table.send(drafts)
    table.num_computed[table.send(slots)] = table.send(starts) + 1 + is_same.long().cumprod(1).sum(1)
