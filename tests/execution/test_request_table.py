"""A step's tensors are what its rows say, whatever the order of slots, chunks and decodes."""

from __future__ import annotations

import torch

from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import TorchSampler
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRequest, Row

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
