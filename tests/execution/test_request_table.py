"""A step's tensors are what its rows say, whatever the order of slots, chunks and decodes."""

from __future__ import annotations

import pytest
import torch

from mini_sglang.execution.drafts import draws
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import TorchSampler
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRequest, Row, ScheduledBatch

PARAMS = SamplingParams(temperature=0)


def table() -> RequestTable:
    """Slot 2 holds tokens 100 to 106 on pages 5, 1 and 7 of 3 cells; slot 0 holds 200 and 201 on page 4."""
    result = RequestTable(num_slots=3, context_length=9, page_size=3, device=torch.device("cpu"), idle_page=8)
    new_requests = [NewRequest(2, list(range(100, 107)), 7, PARAMS, 0), NewRequest(0, [200, 201], 1, PARAMS, 5)]
    result.take(new_requests)
    new_pages = [NewPages(2, 0, [5, 6]), NewPages(0, 0, [4]), NewPages(2, 1, [1]), NewPages(2, 2, [7])]
    result.write_pages(result.places_of(new_pages))  # page 6 is replaced by page 1 in the same step
    return result


def test_chunks_and_decodes_expand_to_tokens_positions_and_cells() -> None:
    inputs = table().expand([Row(0, 1, 1, True), Row(2, 2, 4, False), Row(2, 6, 1, True)])
    assert inputs.input_ids.tolist() == [201, 102, 103, 104, 105, 106]
    assert inputs.positions.tolist() == [1, 2, 3, 4, 5, 6]
    assert inputs.attention.cells.tolist() == [4 * 3 + 1, 5 * 3 + 2, 1 * 3, 1 * 3 + 1, 1 * 3 + 2, 7 * 3]
    assert inputs.logits_indices.tolist() == [0, 5]
    assert inputs.attention.page_table.tolist() == [[4, 0, 0], [5, 1, 7], [5, 1, 7]]


def test_sampled_tokens_are_the_next_inputs() -> None:
    requests = table()
    rows = [Row(2, 6, 1, True), Row(0, 1, 1, True)]
    requests.append(rows, torch.tensor([300, 301]))
    inputs = requests.expand([Row(0, 2, 1, True), Row(2, 7, 1, True)])
    assert inputs.input_ids.tolist() == [301, 300]


def test_the_idle_slot_lies_on_the_idle_page() -> None:
    requests = table()
    assert requests.page_table[requests.idle_slot].tolist() == [8, 8, 8]
    assert requests.num_computed[requests.idle_slot] == 0


def test_a_step_advances_what_is_computed_of_its_rows_alone() -> None:
    requests = table()
    requests.expand([Row(2, 2, 4, False)])
    assert requests.num_computed.tolist() == [0, 0, 6, 0]
    requests.expand([Row(0, 1, 1, True), Row(2, 6, 1, True)])
    assert requests.num_computed.tolist() == [2, 0, 7, 0]


def test_a_slot_takes_the_bytes_that_are_said() -> None:
    requests = table()
    tables = (requests.tokens, requests.page_table, requests.num_computed)
    assert RequestTable.bytes_per_slot(context_length=9, page_size=3) == sum(t[0].nbytes for t in tables)


def test_who_asks_for_log_probabilities_of_the_prompt_is_known_by_slot() -> None:
    requests = table()
    rows = [Row(0, 1, 1, True), Row(2, 6, 1, True)]
    assert not requests.ask_prompt_logprobs(rows)
    requests.take([NewRequest(2, [1, 2], 2, SamplingParams(prompt_logprobs=0), 0)])
    assert requests.ask_prompt_logprobs(rows)
    assert not requests.ask_prompt_logprobs(rows[:1])
    requests.take([NewRequest(2, [1, 2], 2, PARAMS, 0)])
    assert not requests.ask_prompt_logprobs(rows)


def test_a_slot_that_was_never_taken_has_no_request() -> None:
    assert table().request(2).token_ids == list(range(100, 107))
    with pytest.raises(ValueError, match="slot 1 samples but no request was ever placed in it"):
        table().request(1)


def test_rows_are_drawn_by_their_own_requests_and_appended() -> None:
    requests = table()
    requests.take([NewRequest(0, [200, 201], 1, SamplingParams(temperature=0, logprobs=1), 5)])
    rows = [Row(0, 1, 1, True), Row(2, 6, 1, True)]
    logits = torch.zeros(2, 400)
    logits[0, 300], logits[1, 301] = 9, 9
    sampled = TorchSampler(requests).sample(rows, logits)
    assert sampled.token_ids.tolist() == [300, 301]
    assert [requests.tokens[0, 2].item(), requests.tokens[2, 7].item()] == [300, 301]
    first, second = sampled.logprobs
    assert first is not None
    assert (first.token_ids, second) == ([300, 300], None)


def test_a_row_under_a_grammar_is_drawn_by_the_mask_of_its_step() -> None:
    requests = table()
    requests.take([NewRequest(0, [200, 201], 1, SamplingParams(temperature=0, regex="a"), 5)])
    rows, logits, sampler = [Row(0, 1, 1, True)], torch.zeros(1, 8), TorchSampler(requests)
    with pytest.raises(ValueError, match="slot 0 samples token 2 under a grammar but the step has no mask for it"):
        sampler.sample(rows, logits)
    for token in (3, 6):
        sampler.take(ScheduledBatch(1, rows, [], [], [], {0: [bytes([1 << token])]}))
        assert sampler.sample(rows, logits).token_ids.tolist() == [token]


def test_what_follows_each_token_of_a_draft_is_drawn_by_a_mask_of_its_own() -> None:
    requests = table()
    for slot, params in enumerate((SamplingParams(temperature=0, regex="a"), SamplingParams(temperature=0))):
        requests.take([NewRequest(slot, [1, 2], 1, params, 5)])
    rows = [Row(1, 1, 1, 1), Row(0, 1, 3, 3)]
    sampler = TorchSampler(requests)
    masks = [bytes([1 << token]) for token in (3, 6, 5)]
    sampler.take(ScheduledBatch(1, rows, [], [], [], {0: masks}, {0: [3, 6]}))
    assert sampler.sample(draws(rows), torch.zeros(4, 8)).token_ids.tolist() == [0, 3, 6, 5]


def test_the_last_token_of_a_full_context_has_a_place() -> None:
    requests = table()
    requests.append([Row(2, 8, 1, True)], torch.tensor([9]))
    assert TorchSampler(requests).sampling([Row(2, 9, 1, True)]).history(0)[-1].item() == 9


def test_penalties_see_prompt_and_output_apart() -> None:
    sampling = TorchSampler(table()).sampling([Row(0, 1, 1, True)])
    assert sampling.history(0).tolist() == [200, 201]
    assert sampling.prompt_lengths == [1]
    assert sampling.positions == [2]
    assert sampling.seeds == [5]
