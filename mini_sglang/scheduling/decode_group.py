"""The running requests that compute one token in every step, and the steps in which one of them needs attention.

Between such steps nothing of a member is touched: what a step has made of it follows from the step's number, and its
tokens are noted as one column for all. Knows requests and step numbers; does not know the pool, and decides nothing.

        step         7   8   9  10  11  12  13          a member with offset 11 computes its token 11 + n in step n
        token       18  19  20  21  22  23  24
                        │           │       │
                        └ joined    │       └ its last: the calendar of ends has it under step 13
                                    └ begins a page: the calendar of pages has it under step 11
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mini_sglang.request import Request
from mini_sglang.scheduling.batch import NO_DECODES, DecodeRows

_MOST_COLUMNS = 16  # so many steps' tokens are written into the requests' lists at once


class Members(NamedTuple):
    """The group as some step was launched with it, one entry per row. Steps share it until somebody joins or leaves."""

    rows: DecodeRows
    requests: tuple[Request, ...]
    request_ids: tuple[str, ...]
    output_ids: tuple[list[int], ...]  # the requests' own lists
    want_logprobs: bool  # any of them


NOBODY = Members(NO_DECODES, (), (), (), want_logprobs=False)


class _Member(NamedTuple):
    """One row of Members, fixed while the request is one: a snapshot only turns these rows into columns."""

    request: Request
    request_id: str
    output_ids: list[int]
    slot: int
    offset: int  # the token that it computes in step n, less n
    wants_logprobs: bool


class DecodeGroup:
    """Every step that is launched contains every member. Who cannot keep up, or is to stop, has to leave before."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._rows: dict[Request, _Member] = {}  # in row order, which is that of joining
        self._beginning_pages = _Calendar()
        self._ending = _Calendar()
        self._stop_ids: dict[int, int] = {}  # token id -> how many members it may end
        self._members: Members | None = NOBODY  # None: somebody came or went since
        self._columns: list[list[int]] = []  # tokens of read steps that are still to be written into `output_ids` ...
        self._owners = NOBODY  # ... of these

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: Request) -> bool:
        return request in self._rows

    def __iter__(self) -> Iterator[Request]:
        return iter(self._rows)

    @property
    def members(self) -> Members:
        """The group of now."""
        if self._members is None:
            self._members = self._snapshot()
        return self._members

    def _snapshot(self) -> Members:
        if not self._rows:
            return NOBODY
        requests, request_ids, output_ids, slots, offsets, wants_logprobs = zip(*self._rows.values(), strict=True)
        return Members(DecodeRows(slots, offsets), requests, request_ids, output_ids, any(wants_logprobs))

    def may_stop(self, token_ids: list[int]) -> bool:
        """Whether any of the sampled tokens is an end token of any member. A look-up per token, none per request."""
        return bool(self._stop_ids) and not self._stop_ids.keys().isdisjoint(token_ids)

    def rows_that_may_stop(self, token_ids: list[int]) -> list[int]:
        """Where in `token_ids` such a token is."""
        return [row for row, token_id in enumerate(token_ids) if token_id in self._stop_ids]

    # -- tokens -------------------------------------------------------------------------------------------------------

    def note(self, members: Members, token_ids: list[int]) -> None:
        """Note the next token of each of `members`, all of whom are still in the group."""
        if members is not self._owners or len(self._columns) == _MOST_COLUMNS:
            self.write_down()
            self._owners = members
        self._columns.append(token_ids)

    def write_down(self) -> None:
        """Write what was noted into the requests' `output_ids`. To be called before anybody looks at them."""
        if self._columns:
            deque(map(list.extend, self._owners.output_ids, zip(*self._columns, strict=True)), maxlen=0)
            self._columns.clear()

    # -- coming and going ---------------------------------------------------------------------------------------------

    def join(self, request: Request, step: int) -> None:
        """Take in a request with one token to compute, from `step`, the next to be launched, on."""
        slot, offset = request.slot, request.num_computed_tokens - step
        if slot is None:
            raise ValueError(f"request {request.request_id} cannot decode without a slot")
        wants_logprobs = request.params.logprobs is not None
        self._rows[request] = _Member(request, request.request_id, request.output_ids, slot, offset, wants_logprobs)
        self._members = None
        self.expect_page(request)
        self._ending.add(_last_step(request, offset), request)
        for token_id in request.stop_ids:
            self._stop_ids[token_id] = self._stop_ids.get(token_id, 0) + 1

    def leave(self, request: Request, launched: int) -> None:
        """Let a member go, its counters up to date. `launched` is the step launched last."""
        self.write_down()
        self.settle(request, launched)
        offset = self._rows.pop(request).offset
        self._members = None
        self._beginning_pages.remove(self._page_step(request, offset), request)
        self._ending.remove(_last_step(request, offset), request)
        for token_id in request.stop_ids:
            self._stop_ids[token_id] -= 1
            if self._stop_ids[token_id] == 0:
                del self._stop_ids[token_id]

    def settle(self, request: Request, launched: int) -> None:
        """Bring a member's counters up to date: what `launched`, the last step, and those before have computed."""
        request.num_computed_tokens, request.last_step = self.progress(request, launched)

    def progress(self, request: Request, launched: int) -> tuple[int, int]:
        """A member's number of computed tokens, and the last step that contains it: not yet `launched` if it has just
        joined."""
        computed = self._rows[request].offset + launched + 1
        return computed, launched if computed > request.num_computed_tokens else request.last_step

    # -- the calendars ------------------------------------------------------------------------------------------------

    def expect_page(self, request: Request) -> None:
        """Note in which step this member will begin a page that it does not have yet."""
        self._beginning_pages.add(self._page_step(request, self._rows[request].offset), request)

    def take_beginning_page(self, step: int) -> Due:
        """Members that begin a page in `step`, the next one. Each has to get one (`expect_page`) or leave."""
        return self._beginning_pages.take(step)

    def expect_next_pages(self, due: Due, step: int) -> None:
        """`expect_page` for those who were due in `step` and have got one page each: all together, as they were."""
        self._beginning_pages.add_all(step + self._page_size, due)

    def began_page_since(self, step: int) -> list[Request]:
        """Members that were given their last page in a later step."""
        return [request for due, request in self._beginning_pages.entries() if due - self._page_size > step]

    def take_ending(self, step: int) -> Due:
        """Members whose longest possible answer ends with what `step`, just launched, samples. Each has to leave."""
        return self._ending.take(step)

    def _page_step(self, request: Request, offset: int) -> int:
        return len(request.page_ids) * self._page_size - offset

    # -- checking -----------------------------------------------------------------------------------------------------

    def check(self, launched: int) -> None:
        """Raise RuntimeError, saying what is wrong, unless both calendars have every member, in a step to come."""
        for calendar, step_of in ((self._beginning_pages, self._page_step), (self._ending, _last_step)):
            expected = sorted((step_of(row.request, row.offset), row.request.arrival) for row in self._rows.values())
            found = sorted((step, request.arrival) for step, request in calendar.entries())
            if expected != found or (found and found[0][0] <= launched):
                raise RuntimeError(f"after step {launched} a calendar has {found}, and the members ask for {expected}")


def _last_step(request: Request, offset: int) -> int:
    """The step that samples the last token `request` may have."""
    return request.max_num_tokens - 2 - offset


class Due:
    """Requests that are due in the same step, in the order in which they were added; and their columns, made once."""

    __slots__ = ("_columns", "_requests")

    def __init__(self) -> None:
        self._requests: dict[Request, None] = {}
        self._columns: tuple[list[int], list[list[int]]] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, requests: Iterable[Request]) -> None:
        self._requests.update(dict.fromkeys(requests))
        self._columns = None

    def remove(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._columns = None

    @property
    def columns(self) -> tuple[list[int], list[list[int]]]:
        """Slots and `page_ids` (the lists themselves) of the requests."""
        if self._columns is None:
            slots = [request.slot for request in self._requests if request.slot is not None]
            self._columns = slots, [request.page_ids for request in self._requests]
        return self._columns


class _Calendar:
    """Which requests are due in which step."""

    def __init__(self) -> None:
        self._due: dict[int, Due] = {}

    def add(self, step: int, request: Request) -> None:
        if step not in self._due:
            self._due[step] = Due()
        self._due[step].add((request,))

    def add_all(self, step: int, due: Due) -> None:
        """All that were taken together: nearly always nobody else is due in `step` so far."""
        if due and (there := self._due.setdefault(step, due)) is not due:
            there.add(due)

    def remove(self, step: int, request: Request) -> None:
        """Strike an entry out, unless it was taken already."""
        due = self._due.get(step)
        if due is not None:
            due.remove(request)
            if not due:
                del self._due[step]

    def take(self, step: int) -> Due:
        return self._due.pop(step, None) or Due()

    def entries(self) -> Iterator[tuple[int, Request]]:
        for step, requests in self._due.items():
            for request in requests:
                yield step, request
