"""The state of slots on the device stays what their tokens say, through steps, new requests and resumed ones."""

from __future__ import annotations

from array import array

import torch

from mini_sglang.execution.device_sampler import DeviceSampler
from mini_sglang.execution.drafts import draws
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import SamplingBatch, sample
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewRequest, Row, ScheduledBatch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 40
PENALTIES = [
    SamplingParams(repetition_penalty=1.8, temperature=0.7),
    SamplingParams(frequency_penalty=0.9, presence_penalty=0.4, top_p=0.9),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, temperature=0),
]


class Requests:
    """Requests in the slots of a table, with their tokens written down here as well."""

    def __init__(self, num_slots: int = 4, context_length: int = 60) -> None:
        self.table = RequestTable(num_slots, context_length, page_size=4, device=DEVICE, idle_page=0)
        self.sampler = DeviceSampler(self.table, VOCAB)
        self.rows: dict[int, NewRequest] = {}

    def place(self, slot: int, params: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> None:
        new = NewRequest(slot, list(tokens), num_prompt_tokens, params, seed=slot + 11)
        self.rows[slot] = new
        self.table.take([new])
        self.sampler.take(ScheduledBatch(0, [], [new], [], []))

    def step(self, logits: torch.Tensor, slots: list[int]) -> tuple[list[int], list[int]]:
        """Draw one token per slot; returns the device's and those that `sample` defines."""
        rows = [self.rows[slot] for slot in slots]
        positions = [len(row.token_ids) for row in rows]
        defined = sample(
            logits,
            SamplingBatch(
                [row.params for row in rows],
                [row.seed for row in rows],
                positions,
                [row.num_prompt_tokens for row in rows],
                lambda index: torch.tensor(rows[index].token_ids, dtype=torch.int32),
            ),
        )
        drawn = self.sampler.draw(
            logits.to(DEVICE),
            torch.tensor(slots, device=DEVICE),
            torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        )
        for row, token in zip(rows, drawn.tolist(), strict=True):
            row.token_ids.append(token)
        return drawn.tolist(), defined.tolist()


def test_penalties_count_every_token_drawn_and_survive_a_preemption() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB, generator=generator) * 2
    requests = Requests()
    for slot, params in enumerate(PENALTIES):
        requests.place(slot, params, [slot, 5, 5, 7], num_prompt_tokens=4)
    for _ in range(8):
        drawn, defined = requests.step(logits, [0, 1, 2])
        assert drawn == defined
    resumed = requests.rows[1]
    requests.place(1, PENALTIES[0], [1, 2], num_prompt_tokens=2)  # another request has the slot meanwhile
    requests.step(logits[:1], [1])
    requests.place(3, resumed.params, resumed.token_ids, num_prompt_tokens=4)
    for _ in range(4):
        drawn, defined = requests.step(logits, [0, 3, 2])
        assert drawn == defined


def test_a_token_may_repeat_more_often_than_its_count_can_say() -> None:
    requests = Requests(num_slots=1, context_length=40_000)
    params = SamplingParams(frequency_penalty=-1e-4, repetition_penalty=0.5, temperature=0)
    requests.place(0, params, [3] * 33_000, num_prompt_tokens=2)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 1.0
    for _ in range(2):
        assert requests.step(logits, [0])[0] == [3]


def test_the_idle_slot_changes_nothing_however_often_it_is_there() -> None:
    requests = Requests()
    idle = requests.table.idle_slot
    requests.sampler.draw(
        torch.randn(3, VOCAB, device=DEVICE),
        torch.tensor([idle] * 3, device=DEVICE),
        torch.ones(3, dtype=torch.int32, device=DEVICE),
    )
    assert requests.table.num_computed[idle] == 0
    assert not requests.table.tokens[idle].any()


def test_a_slot_forgets_the_request_before() -> None:
    requests = Requests()
    requests.place(0, SamplingParams(top_k=1, repetition_penalty=3.0), [1, 2, 3], num_prompt_tokens=3)
    requests.place(0, SamplingParams(), [4], num_prompt_tokens=1)
    logits = torch.zeros(1, VOCAB)
    for _ in range(6):
        drawn, defined = requests.step(logits, [0])
        assert drawn == defined


def test_a_token_of_the_prompt_counts_as_repeated_once_however_often_it_is_there() -> None:
    requests = Requests()
    requests.place(0, SamplingParams(repetition_penalty=3.0, temperature=0), [3, 3, 4], num_prompt_tokens=3)
    requests.place(1, SamplingParams(frequency_penalty=2.0, temperature=0), [3, 3, 4], num_prompt_tokens=3)
    logits = torch.zeros(2, VOCAB)
    logits[:, 3], logits[:, 4], logits[:, 5] = 2.0, 1.9, 0.5
    assert requests.step(logits, [0, 1]) == ([3, 3], [3, 3])  # 2 / 3 is above 0.5, but 2 / 9 would not be
    logits[:, 5] = 1.0
    assert requests.step(logits[:1], [0]) == ([5], [5])


def mask_of(token_id: int) -> bytes:
    return (1 << token_id).to_bytes(VOCAB // 8, "little")


def test_a_row_under_a_grammar_draws_by_the_mask_of_its_step() -> None:
    requests = Requests()
    requests.place(0, SamplingParams(regex="a|b"), [1, 2], num_prompt_tokens=2)
    row, logits = Row(0, 0, 2, True), torch.zeros(1, VOCAB, device=DEVICE)
    for token in (9, 30):
        requests.sampler.take(ScheduledBatch(1, [row], [], [], [], {0: [mask_of(token)]}))
        assert requests.sampler.sample([row], logits).token_ids.tolist() == [token]


def test_what_follows_each_token_of_a_draft_is_drawn_by_a_mask_of_its_own() -> None:
    requests = Requests()
    requests.place(0, SamplingParams(regex="a|b"), [1, 2, 9, 30], num_prompt_tokens=2)
    requests.place(1, SamplingParams(temperature=0), [1, 2], num_prompt_tokens=2)
    rows, logits = [Row(0, 1, 3, 3), Row(1, 1, 1, 1)], torch.zeros(4, VOCAB, device=DEVICE)
    masks = {0: [mask_of(token) for token in (9, 30, 7)]}
    requests.sampler.take(ScheduledBatch(1, rows, [], [], [], masks, {0: [9, 30]}))
    assert requests.sampler.sample(draws(rows), logits).token_ids.tolist() == [9, 30, 7, 0]


def test_the_tokens_that_a_step_left_on_the_host_hold_unless_a_row_is_drawn_again() -> None:
    requests = Requests()
    requests.place(0, SamplingParams(temperature=0), [1, 2], num_prompt_tokens=2)
    requests.place(1, SamplingParams(temperature=0, logit_bias={7: 5.0}), [1, 2], num_prompt_tokens=2)
    plain, biased = Row(0, 0, 2, True), Row(1, 0, 2, True)
    logits, on_host = torch.zeros(2, VOCAB, device=DEVICE), memoryview(array("q", [0, 0]))
    drawn = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    sampled = requests.sampler.complete([plain], drawn[:1], logits[:1], on_host)
    assert sampled.on_host is on_host
    sampled = requests.sampler.complete([plain, biased], drawn, logits, on_host)
    assert sampled.on_host is None
    assert sampled.token_ids.tolist() == [0, 7]
