"""An executor without a model: it obeys batches on symbolic KV and finds every page that is not what it should be.

Each cell of the pool holds a fingerprint of the tokens up to and including its own, as a real one holds keys and values
that depend on them. A row may only be computed if its page table leads to precisely its own prefix. The next token
is a function of the fingerprint, so a request has one right output however it is chunked, cached, batched or resumed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mini_sglang.config import ResolvedConfig
from mini_sglang.outputs import FinishReason, StepOutputs, TokenLogprobs
from mini_sglang.request import Request
from mini_sglang.scheduling.batch import NewRequest, Row, ScheduledBatch, StepResult
from mini_sglang.scheduling.radix_cache import common_prefix, token_array
from mini_sglang.scheduling.scheduler import Scheduler
from mini_sglang.scheduling.speculation import Gate
from mini_sglang.scheduling.step_cost import StepCost

GARBAGE = -1  # fingerprint or token id that a failed step left, and all that was computed from one
_MASK = (1 << 61) - 1


def fingerprint(before: int, token_id: int) -> int:
    """Of the tokens up to `token_id`, given that of the tokens before it (at the start: the request's seed)."""
    return GARBAGE if GARBAGE in (before, token_id) else (before * 1_000_003 + token_id * 7919 + 12_345) & _MASK


def next_token(value: int, vocab_size: int) -> int:
    """The token that follows tokens of this fingerprint."""
    return GARBAGE if value == GARBAGE else (value >> 7) % vocab_size


def generate(prompt_ids: list[int], seed: int, count: int, vocab_size: int) -> list[int]:
    """The `count` tokens that follow a prompt: what any correct schedule must produce."""
    value, output = seed, []
    for token_id in prompt_ids:
        value = fingerprint(value, token_id)
    for _ in range(count):
        output.append(next_token(value, vocab_size))
        value = fingerprint(value, output[-1])
    return output


class WrongPageError(Exception):
    """A row was ordered to read or write a cell that is not its own."""


class WrongMaskError(Exception):
    """A row was ordered to sample under a mask that is not the one for its next token."""


def mask_for(position: int) -> bytes:
    """What stands for the mask under which the token at `position` is drawn."""
    return str(position).encode()


@dataclass(slots=True)
class _Slot:
    seed: int
    tokens: list[int]
    num_asked: int = 0  # prompt tokens, if their log-probabilities are asked for
    is_constrained: bool = False
    page_table: list[int] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)


class SimulatedExecutor:
    """Has the pool, the request table and the sampler of a real executor, in integers.

    `NewRequest.seed` stands for the cache salt: requests may share pages only if their seeds are equal.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int, vocab_size: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._pages = [[GARBAGE] * page_size for _ in range(num_pages)]
        self._slots: list[_Slot | None] = [None] * num_slots
        self._masks: dict[int, list[bytes]] = {}

    def launch(self, batch: ScheduledBatch, *, fail: bool = False) -> StepResult:
        """Run one step. With `fail`, what it computes is garbage. Raises WrongPageError or WrongMaskError."""
        self._masks = batch.masks
        for new in batch.new_requests:
            self._take(new)
        for pages in batch.new_pages:
            table = self._slot(pages.slot).page_table
            if pages.first_index > len(table):
                raise WrongPageError(f"slot {pages.slot} has {len(table)} pages and gains one at {pages.first_index}")
            table[pages.first_index : pages.first_index + len(pages.page_ids)] = pages.page_ids
        self._copy(batch.page_copies)
        self._take_drafts(batch)
        # All rows read before any row writes, as if they ran at the same time.
        rows = batch.rows
        sound = [self._read(row) and not fail for row in rows]
        written: dict[tuple[int, int], int] = {}
        for row, is_sound in zip(rows, sound, strict=True):
            self._compute(row, written, is_sound)
        pairs = zip(rows, sound, strict=True)
        sampled = [token_id for row, is_sound in pairs for token_id in self._sample(row, is_sound)]
        return StepResult(sampled, [None] * len(sampled), {row.slot: self._look_up(row) for row in rows})

    def _take_drafts(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            slot, draft = self._slot(row.slot), batch.drafts.get(row.slot, [])
            if len(draft) != max(row.samples - 1, 0):
                raise WrongPageError(f"{row} verifies {len(draft)} tokens")
            if draft:
                slot.tokens[row.start + row.count - len(draft) :] = draft

    def _take(self, new: NewRequest) -> None:
        num_asked = 0 if new.params.prompt_logprobs is None else new.num_prompt_tokens
        self._slots[new.slot] = _Slot(new.seed, list(new.token_ids), num_asked, new.params.is_constrained)

    def _look_up(self, row: Row) -> list[TokenLogprobs]:
        """Stand-ins for the log-probabilities of the row's tokens' successors in the prompt, if they are asked for."""
        slot = self._slot(row.slot)
        following = slot.tokens[row.start + 1 : min(row.start + row.count + 1, slot.num_asked)]
        return [TokenLogprobs([token_id], [0.0]) for token_id in following]

    def _slot(self, index: int) -> _Slot:
        slot = self._slots[index]
        if slot is None:
            raise WrongPageError(f"slot {index} was never given to a request")
        return slot

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        if len({destination for _, destination in copies}) != len(copies):
            raise WrongPageError(f"two copies have the same destination: {copies}")
        contents = [self._pages[source].copy() for source, _ in copies]
        for (_, destination), cells in zip(copies, contents, strict=True):
            self._pages[destination] = cells

    def _read(self, row: Row) -> bool:
        """Whether the cells before `row` hold its prefix; False if some hold what a failed step left there."""
        slot, size = self._slot(row.slot), self._page_size
        end = row.start + row.count
        if end > len(slot.tokens) or end > len(slot.page_table) * size:
            raise WrongPageError(f"{row} goes beyond its {len(slot.tokens)} tokens or {len(slot.page_table)} pages")
        while len(slot.fingerprints) < end:
            before = slot.fingerprints[-1] if slot.fingerprints else slot.seed
            slot.fingerprints.append(fingerprint(before, slot.tokens[len(slot.fingerprints)]))
        cells = [cell for page in slot.page_table[: -(-row.start // size)] for cell in self._pages[page]]
        if cells[: row.start] == slot.fingerprints[: row.start]:
            return slot.fingerprints[end - 1] != GARBAGE
        for position, (found, expected) in enumerate(zip(cells, slot.fingerprints[: row.start], strict=False)):
            if found != expected and GARBAGE not in (found, expected):
                raise WrongPageError(f"{row} finds foreign content at its token {position}")
        return False

    def _compute(self, row: Row, written: dict[tuple[int, int], int], is_sound: bool) -> None:
        slot, size = self._slot(row.slot), self._page_size
        for position in range(row.start, row.start + row.count):
            cell = (slot.page_table[position // size], position % size)
            if cell in written:
                raise WrongPageError(f"slots {written[cell]} and {row.slot} write the same cell {cell}")
            written[cell] = row.slot
            self._pages[cell[0]][cell[1]] = slot.fingerprints[position] if is_sound else GARBAGE

    def _sample(self, row: Row, is_sound: bool) -> list[int]:
        slot, first = self._slot(row.slot), row.start + row.count - row.samples + 1
        if not row.samples:
            return []
        masks = self._masks.get(row.slot)
        if masks != ([mask_for(first + place) for place in range(row.samples)] if slot.is_constrained else None):
            raise WrongMaskError(f"{row} samples under the masks {masks!r}")
        computed = slot.fingerprints[first - 1 : first - 1 + row.samples]
        sampled = [next_token(value, self._vocab_size) if is_sound else GARBAGE for value in computed]
        kept = common_prefix(token_array(slot.tokens[first:]), token_array(sampled))
        slot.tokens[first:] = sampled
        del slot.fingerprints[first + kept :]
        return sampled


class Simulation:
    """The engine's loop around a real Scheduler and a SimulatedExecutor.

    The masks for a constrained request's next token, and along its draft, are known `mask_delay` steps after the token
    before it.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        vocab_size: int = 3,
        mask_delay: int = 0,
        cost: StepCost | None = None,
        gate: Gate | None = None,
    ) -> None:
        self.scheduler = Scheduler(config, cost, gate=gate)
        self.executor = SimulatedExecutor(
            self.scheduler.kv.num_pages, config.page_size, self.scheduler.num_slots, vocab_size
        )
        self.vocab_size = vocab_size
        self.mask_delay = mask_delay
        self._due_masks: dict[str, tuple[int, list[int]]] = {}  # by request: steps until they are known, and the draft
        self.run_ahead = config.run_ahead
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, FinishReason] = {}
        self.looked_up: dict[str, list[TokenLogprobs]] = {}  # of prompts
        self._inflight: deque[tuple[ScheduledBatch, StepResult, bool]] = deque()

    def add(self, request: Request) -> None:
        """Queue a request; its output is then to be found in `requests`."""
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        if request.is_constrained:
            self._due_masks[request.request_id] = self.mask_delay, []

    def step(self, *, fail_launch: bool = False, fail_read: bool = False) -> StepOutputs:
        """Launch the next step and read the oldest one that is due.

        With `fail_launch` the executor never sees the step; with `fail_read` it leaves garbage, which shows when read.
        """
        self._deliver_masks()
        batch = self.scheduler.schedule()
        if batch is not None and fail_launch:
            return self._note(self.scheduler.fail(batch, "the launch failed"))
        if batch is not None:
            result = self.executor.launch(batch, fail=fail_read)
            self._inflight.append((batch, result, fail_read))
        if not self._inflight or (batch is not None and len(self._inflight) <= self.run_ahead):
            return StepOutputs()
        oldest, result, failed = self._inflight.popleft()
        if failed:
            return self._note(self.scheduler.fail(oldest, "the step failed"))
        return self._note(self.scheduler.update(oldest, result))

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left to do. Raises RuntimeError if that does not happen."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise RuntimeError(f"work is left after {max_steps} steps: {self.scheduler.stats()}")

    def _note(self, outputs: StepOutputs) -> StepOutputs:
        for output in outputs.others:
            if output.prompt_logprobs is not None:
                self.looked_up.setdefault(output.request_id, []).extend(output.prompt_logprobs)
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
            elif self.requests[output.request_id].is_constrained:
                draft = self.scheduler.propose(output.request_id) or []
                self._due_masks[output.request_id] = self.mask_delay, draft
        return outputs

    def _deliver_masks(self) -> None:
        for request_id, (steps, draft) in list(self._due_masks.items()):
            self._due_masks[request_id] = steps - 1, draft
            if steps == 0:
                del self._due_masks[request_id]
                known = self.requests[request_id].num_known_tokens
                masks = [mask_for(known + place) for place in range(len(draft) + 1)]
                self.scheduler.set_masks(request_id, masks, draft, [place % 3 == 0 for place in range(len(draft))])

    def check_outputs(self) -> None:
        """Raise RuntimeError unless every output so far is what follows its prompt, looked up if that was asked for."""
        for request in self.requests.values():
            if request.params.prompt_logprobs is not None and request.output_ids:
                found = [entry.token_ids[0] for entry in self.looked_up[request.request_id]]
                if found != request.prompt_ids[1:]:
                    raise RuntimeError(f"request {request.request_id} has log-probabilities of {found}")
            output = request.output_ids
            if output != generate(request.prompt_ids, request.seed, len(output), self.vocab_size):
                raise RuntimeError(f"request {request.request_id} has a wrong output: {output}")
