"""A step computed from what the device knows alone samples what a step planned by the host samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from mini_sglang.attention.kv_pool import KVPool
from mini_sglang.attention.select import GraphBackends, graph_backends, make_backends
from mini_sglang.execution import cuda_graph
from mini_sglang.execution.cuda_graph import GraphStep
from mini_sglang.execution.device_sampler import DeviceSampler
from mini_sglang.execution.graph_runner import GraphRunner, GraphSteps
from mini_sglang.execution.model_runner import ModelRunner
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import TorchSampler
from mini_sglang.execution.worker import Eager
from mini_sglang.kernels.torch_kernels import TorchKernels
from mini_sglang.layers.placement import Placement
from mini_sglang.models.architectures import build_model
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import NewPages, NewRequest, Row, ScheduledBatch
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.model_config import load_model_config
from tests.tiny import Checkpoints

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, PAGES_PER_SLOT, PAGE_SIZE = 6, 3, 16
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12], [13, 14, 14], [15, 16]]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, min_p=0.01),
    SamplingParams(logit_bias={3: 4.0}, presence_penalty=2.0, min_tokens=4),
    SamplingParams(temperature=0.8, logprobs=2, prompt_logprobs=1),
]
MakeRunner = Callable[[str], Eager]


@pytest.fixture(scope="module")
def make_runner(checkpoints: Checkpoints) -> MakeRunner:
    """`make_runner(backend)` → a runner of a tiny model; "host" samples in PyTorch, the others with kernels."""
    source = resolve_model(str(checkpoints.write("qwen3").path))
    config = load_model_config(source)
    model = build_model(config, Placement(DEVICE, torch.float32, TorchKernels(), packed=False))
    load_weights(source, config, model.weight_slots(), show_progress=False)

    def make(backend: str) -> Eager:
        num_pages = SLOTS * PAGES_PER_SLOT
        pool = KVPool(
            num_layers=config.num_layers,
            num_pages=num_pages + 1,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=DEVICE,
        )
        name = "reference" if backend == "host" else backend
        backends = make_backends(name, pool, num_heads=config.num_heads, dtype=torch.float32, max_rows=SLOTS)
        table = RequestTable(SLOTS, PAGES_PER_SLOT * PAGE_SIZE, PAGE_SIZE, DEVICE, idle_page=num_pages)
        if backend == "host":
            return Eager(ModelRunner(model, pool, backends, table, TorchSampler(table)), None, backends)
        sampler = DeviceSampler(table, config.vocab_size)
        return Eager(ModelRunner(model, pool, backends, table, sampler), sampler, backends)

    return make


def prompts() -> ScheduledBatch:
    """All prompts at once, the request of index i in slot 5 - i."""
    slots = [5 - index for index in range(len(PROMPTS))]
    return ScheduledBatch(
        step=1,
        rows=[Row(slot, 0, len(prompt), True) for slot, prompt in zip(slots, PROMPTS, strict=True)],
        new_requests=[
            NewRequest(slot, prompt, len(prompt), params, seed=7 * slot, end_token_ids=[3])
            for slot, prompt, params in zip(slots, PROMPTS, PARAMS, strict=True)
        ],
        new_pages=[NewPages(slot, 0, pages) for slot, pages in pages_of_prompts().items()],
        page_copies=[],
    )


def pages_of_prompts() -> dict[int, list[int]]:
    """By slot."""
    slots = range(SLOTS - len(PROMPTS), SLOTS)
    return {slot: list(range(slot * PAGES_PER_SLOT, (slot + 1) * PAGES_PER_SLOT)) for slot in slots}


def decodes(step: int) -> ScheduledBatch:
    """The `step`-th token after the prompts of every request."""
    rows = [Row(5 - index, len(prompt) + step, 1, True) for index, prompt in enumerate(PROMPTS)]
    return ScheduledBatch(step + 2, rows, [], [], [])


def test_host_and_device_sample_the_same_tokens_and_log_probabilities(make_runner: MakeRunner) -> None:
    host, device = make_runner("host").runner, make_runner("reference").runner
    for batch in (prompts(), *(decodes(step) for step in range(6))):
        want, got = host.run(batch), device.run(batch)
        assert got.token_ids.tolist() == want.token_ids.tolist(), f"step {batch.step}"
        assert [row is None for row in got.logprobs] == [True, True, True, True, False]
        ours, theirs = got.logprobs[4], want.logprobs[4]
        assert ours is not None
        assert theirs is not None
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert got.token_ids[3] != 3 or batch.step > 4  # which its bias would draw
        if batch.new_requests:
            [entry], [expected] = got.prompt_logprobs[1], want.prompt_logprobs[1]
            assert entry.token_ids == expected.token_ids
            assert entry.token_ids[0] == PROMPTS[4][1]
            assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_what_a_graph_captures_decodes_from_slots_alone(make_runner: MakeRunner) -> None:
    host, eager = make_runner("host").runner, make_runner("triton")
    assert eager.sampler is not None
    unbiased = [0, 1, 2, 4]
    host.run(prompts())
    eager.runner.run(prompts())
    slots = torch.tensor([5 - index for index in unbiased] + [SLOTS, SLOTS], device=DEVICE)  # filled up
    device = GraphSteps(eager.runner, eager.sampler, graph_backends(eager.backends), SLOTS + 1)
    with torch.inference_mode():
        for step in range(5):
            want = host.run(decodes(step)).token_ids[unbiased].tolist()
            got = device.decode(slots)
            assert got.token_ids[: len(unbiased)].tolist() == want, f"token {step}"
            assert (got.logits.data_ptr(), got.logits.shape) == (device.logits.data_ptr(), (SLOTS, 320))


class Uncaptured:
    """Steps that are computed anew where a GPU would replay a graph of them."""

    def __init__(self, step: Callable[[int], GraphStep], sizes: list[int], name: str, pool: Any) -> None:
        self._step, self._sizes = step, sizes

    def size_for(self, count: int) -> int:
        return min(size for size in self._sizes if size >= count)

    def replay(self, size: int, rows: int) -> GraphStep:
        outputs = self._step(size)
        return GraphStep(outputs.token_ids[:rows], outputs.logits[:rows])


def test_a_replayed_step_may_gain_more_pages_than_it_has_rows(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where requests with equal answers change over to each other's pages."""
    monkeypatch.setattr(cuda_graph, "StepGraphs", Uncaptured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    host, eager = make_runner("host").runner, make_runner("triton")
    assert eager.sampler is not None
    backends = GraphBackends(graph_backends(eager.backends).decode, prefill=None)
    device = GraphRunner(eager.runner, eager.sampler, backends, len(PROMPTS), max_tokens=0, most_samples=len(PROMPTS))
    host.run(prompts())
    device.run(prompts())
    table, num_pages = pages_of_prompts(), SLOTS * PAGES_PER_SLOT
    moved = {slot: [(page + PAGES_PER_SLOT) % num_pages for page in pages] for slot, pages in table.items()}
    for step in range(4):
        batch = decodes(step)
        want = host.run(batch).token_ids.tolist()
        if step == 2:
            batch = msgspec.structs.replace(
                batch,
                new_pages=[NewPages(slot, 0, pages) for slot, pages in moved.items()],
                page_copies=[pair for slot in table for pair in zip(table[slot], moved[slot], strict=True)],
            )
        assert device.run(batch).token_ids.tolist() == want, f"token {step}"
