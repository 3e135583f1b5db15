"""Checks of L9: the loop and its handles on a device in simulated time, graphs on recorded addresses (or real ones)."""

from __future__ import annotations

import runpy
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_sglang.attention.kv_pool import staged
from mini_sglang.execution import cuda_graph
from mini_sglang.execution.cuda_graph import DecodeGraphs, GraphStep, StepGraphs, graph_sizes
from mini_sglang.execution.executor import StepHandle
from mini_sglang.execution.request_table import RequestTable
from mini_sglang.execution.sampler import Sampled
from mini_sglang.learn.checking import LessonError, expect, guards
from mini_sglang.observability.observer import EngineObserver, PhaseName
from mini_sglang.outputs import StepOutputs
from mini_sglang.scheduling.batch import Row, ScheduledBatch
from mini_sglang.scheduling.scheduler import Scheduler

DEVICE = runpy.run_path(str(Path(__file__).with_name("device.py")))  # the simulated device, beside this file
simulated_engine, add_request, tokens_of = (DEVICE[name] for name in ("simulated_engine", "add_request", "tokens_of"))
CPU = torch.device("cpu")

# -- the loop -------------------------------------------------------------------------------------------------------


def step(engine: Any) -> StepOutputs:
    """One step. An engine goes on after an error in a launch; a function that is not written yet is no such error."""
    outputs: StepOutputs = engine.step()
    for output in outputs.others:
        if output.error is not None and output.error.startswith("NotImplementedError: "):
            raise NotImplementedError(output.error.removeprefix("NotImplementedError: "))
    return outputs


def run(engine: Any, steps: int = 40) -> int:
    """Step until nothing is left, or so often; returns how many tokens came."""
    tokens = 0
    for _ in range(steps):
        if not engine.has_work:
            break
        tokens += tokens_of(step(engine))
    return tokens


def test_without_run_ahead_each_step_is_read_at_once() -> None:
    engine, device = simulated_engine(run_ahead=0)
    add_request(engine, "a", tokens=3)
    run(engine)
    wanted = ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]
    expect(device.order(), wanted, "what the host did for three tokens, run-ahead 0", read="L9: One loop")


@guards("read-before-launch", "newest-read-first")
def test_with_run_ahead_the_next_step_is_launched_before_the_last_is_read() -> None:
    engine, device = simulated_engine(run_ahead=1)
    add_request(engine, "a", tokens=5)
    for _ in range(4):
        try:
            step(engine)
        except ValueError as error:
            raise LessonError(
                str(error), "no error", "reading a step", "steps are read in the order of launching"
            ) from error
    expect(
        device.order(),
        ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "launch 4", "read 3"],
        "what the host did in its first four calls of step(), run-ahead 1",
        invariant="at most run_ahead + 1 steps are in flight, and the oldest is read",
        read="L9: One loop",
    )
    expect(device.idle_ms(), 0.0, "ms that the device had nothing to do, steps of 10 ms and 6 ms of host work each")


@guards("last-step-never-read")
def test_what_is_in_flight_is_read_when_nothing_more_can_be_launched() -> None:
    engine, device = simulated_engine(run_ahead=1)
    add_request(engine, "a", tokens=3)
    tokens = run(engine)
    expect(
        (tokens, device.order()[-1:]),
        (3, ["read 3"]),
        "tokens that came of a request for 3, and what the host did last",
        invariant="with nothing to launch, a step in flight is due at once",
        read="L9: One loop",
    )


@guards("failed-launch-escapes")
def test_a_launch_that_fails_ends_its_requests_alone() -> None:
    engine, device = simulated_engine(run_ahead=1)
    device.fail_launch_of = 2
    add_request(engine, "a", tokens=4)
    errors = []
    try:
        for _ in range(10):
            errors += [output.error for output in step(engine).others if output.error]
    except RuntimeError as error:
        raise LessonError(f"RuntimeError: {error}", "an output with the error", "a launch that fails") from error
    expect(errors, ["RuntimeError: step 2 cannot be launched"], "errors told to requests", read="L9: One loop")
    add_request(engine, "b", tokens=2)
    expect(run(engine), 2, "tokens of a request that came later")


@guards("failed-read-blamed-on-the-newest")
def test_a_read_that_fails_ends_the_requests_of_the_step_that_was_read() -> None:
    engine, device = simulated_engine(run_ahead=1)
    device.fail_read_of = 1
    add_request(engine, "a", tokens=6)
    step(engine)
    add_request(engine, "b", tokens=3)  # is in step 2, not in step 1
    ended = [(output.request_id, output.error) for output in step(engine).others]
    expect(
        ended,
        [("a", "RuntimeError: step 1 cannot be read")],
        "who is told that step 1 failed",
        invariant="the error belongs to the step that was read, not to the one just launched",
        read="L9: One loop",
    )
    expect(run(engine), 3, "tokens of the request that was not in that step")


class ListeningObserver(EngineObserver):
    """An engine's observer that keeps what it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    @contextmanager
    def phase(self, name: PhaseName, step: int) -> Iterator[None]:
        self.heard.append(f"{name} {step}")
        yield

    def scheduled(self, batch: ScheduledBatch, scheduler: Scheduler) -> None:
        self.heard.append(f"scheduled {batch.step}")

    def read(
        self,
        batch: ScheduledBatch,
        device_us: int | None = None,
        predicted_us: int | None = None,
        error: str | None = None,
        outputs: StepOutputs | None = None,
    ) -> None:
        self.heard.append(f"read {batch.step}, {device_us} us")


def test_the_observer_hears_of_every_phase() -> None:
    engine, _ = simulated_engine(run_ahead=1)
    engine._observer = observer = ListeningObserver()
    add_request(engine, "a", tokens=2)
    run(engine)
    calls = [
        "schedule 1 / scheduled 1 / launch 1",
        "schedule 2 / scheduled 2 / launch 2 / wait 1 / update 1 / read 1, 10000 us",
        "schedule 3 / wait 2 / update 2 / read 2, 10000 us",
    ]
    expect(
        " / ".join(observer.heard),
        " / ".join(calls),
        "what the observer heard of a request for two tokens",
        invariant="every phase has the number of its own step",
        read="L9: The exercise",
    )


# -- tokens on their way to the host --------------------------------------------------------------------------------


class Stream:
    """A device's queue: what is in it happens when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.blocked = 0  # times that the host was made to wait by a copy

    def run(self, count: int) -> None:
        for work in self.queue[:count]:
            work()
        self.queue[:count] = [lambda: None] * count


class OnDevice:
    """Sampled tokens as a CUDA tensor would hold them."""

    is_cuda = True

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)


class Pinned:
    """Host memory that the device writes to by itself; 0 until then."""

    def __init__(self, stream: Stream, cells: list[int]) -> None:
        self.stream, self.cells = stream, cells

    def __getitem__(self, part: slice) -> PinnedPart:
        return PinnedPart(self, len(self.cells[part]))


class PinnedPart:
    def __init__(self, memory: Pinned, count: int) -> None:
        self.memory, self.count = memory, count

    def copy_(self, source: OnDevice, non_blocking: bool = False) -> PinnedPart:
        def work() -> None:
            self.memory.cells[: self.count] = source.tokens

        self.memory.stream.queue.append(work)
        if not non_blocking:
            self.memory.stream.blocked += 1
            self.memory.stream.run(len(self.memory.stream.queue))
        return self

    def tolist(self) -> list[int]:
        return self.memory.cells[: self.count]


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, 0

    def elapsed_time(self, later: Event) -> float:
        """In ms: here as many as there was work between the two events."""
        return float(later.position - self.position)

    def record(self) -> None:
        self.position = len(self.stream.queue)

    def synchronize(self) -> None:
        self.stream.run(self.position)


class HostBuffer:
    def __init__(self, stream: Stream) -> None:
        self.token_ids, self.arrived, self.started = Pinned(stream, [0] * 4), Event(stream), Event(stream)


def handle_of(tokens: list[int], host_buffers: list[HostBuffer]) -> StepHandle:
    """The handle of a step that gets a free host buffer, as the executor hands it out."""
    sampled = Sampled(OnDevice(tokens), [None] * len(tokens), {})  # type: ignore[arg-type]
    return StepHandle(sampled, host_buffers.pop(), host_buffers)  # type: ignore[arg-type]


@guards("copy-that-blocks")
def test_a_launch_does_not_wait_for_the_tokens() -> None:
    stream = Stream()
    handle_of([7, 8], [HostBuffer(stream)])
    expect(
        (len(stream.queue), stream.blocked),
        (1, 0),
        "copies queued by a launch, and times that it made the host wait",
        invariant="the copy is queued behind the step like everything else: non_blocking",
        read="L9: Tokens on their way",
    )


@guards("read-without-waiting")
def test_tokens_are_read_when_they_have_arrived() -> None:
    expect(
        handle_of([7, 8], [HostBuffer(Stream())]).result().token_ids,
        [7, 8],
        "tokens of a step that sampled 7 and 8",
        invariant="pinned memory holds what it held before, until the event behind the copy has come",
        read="L9: Tokens on their way",
    )


@guards("host-buffer-free-too-early")
def test_a_host_buffer_belongs_to_one_step_until_it_is_read() -> None:
    stream = Stream()
    host_buffers = [HostBuffer(stream), HostBuffer(stream)]
    first, second = handle_of([1, 2], host_buffers), handle_of([3, 4], host_buffers)
    stream.run(2)  # the device has done both before the host looks
    expect(
        (first.result().token_ids, second.result().token_ids),
        ([1, 2], [3, 4]),
        "tokens of two steps in flight",
        invariant="a host buffer is free when its tokens have been read, not before",
        read="L9: Tokens on their way",
    )


@guards("host-buffer-never-free")
def test_a_host_buffer_is_used_again() -> None:
    host_buffers = [HostBuffer(Stream())]
    handle = handle_of([1], host_buffers)
    expect(len(host_buffers), 0, "free host buffers while a step is in flight")
    handle.result()
    expect(handle.result().token_ids, [1], "tokens when the result is asked for again")
    expect(
        len(host_buffers),
        1,
        "free host buffers after the step was read, twice",
        invariant="pinned memory is allocated once, since allocating it makes host and device wait",
        read="L9: Tokens on their way",
    )


def test_tokens_that_the_step_leaves_on_the_host_are_not_copied() -> None:
    stream, on_host = Stream(), array("q", [0, 0])
    host_buffers = [HostBuffer(stream)]
    sampled = Sampled(OnDevice([7, 8]), [None, None], {}, memoryview(on_host))  # type: ignore[arg-type]
    handle = StepHandle(sampled, host_buffers.pop(), host_buffers)  # type: ignore[arg-type]
    expect(len(stream.queue), 0, "copies queued by the launch of a step whose graph leaves its tokens in pinned memory")
    on_host[:] = array("q", [7, 8])
    expect(handle.result().token_ids, [7, 8], "tokens that it left there", read="L9: Nothing beside the replay")


def test_a_result_comes_with_the_devices_time() -> None:
    handle = handle_of([7], [HostBuffer(Stream())])
    expect(handle.device_us, None, "microseconds of a step that has not been read")
    handle.result()
    expect(handle.device_us, 1000, "microseconds between the host buffer's two events, once both have happened")


def test_without_a_gpu_the_tokens_are_there() -> None:
    handle = StepHandle(Sampled(torch.tensor([7, 8]), [None, None], {}), None, [])
    result = handle.result()
    expect(result.token_ids, [7, 8], "tokens of a step on a CPU, which has no host buffer", read="L9: The exercise")
    expect(handle.device_us, None, "its microseconds on a device")


@guards("written-over-the-last")
def test_the_next_step_finds_the_token_on_the_device() -> None:
    table = RequestTable(2, context_length=16, page_size=4, device=CPU, idle_page=9)
    table.tokens[1, :4] = torch.tensor([5, 6, 7, 0])
    table.append([Row(slot=1, start=0, count=3, samples=True)], torch.tensor([42]))
    expect(
        (table.tokens[1, :4].tolist(), table.expand([Row(1, 3, 1, True)]).input_ids.tolist()),
        ([5, 6, 7, 42], [42]),
        "the slot's tokens after tokens 0 to 2 were computed and 42 was sampled, and the next step's input",
        invariant="the sampled token stands at start + count, where the next step looks for it",
        read="L9: State on the device",
    )


# -- graphs ---------------------------------------------------------------------------------------------------------


class RecordedGraphs(StepGraphs):
    """Stands for CUDA graphs where there is no GPU: a replay sees the memory that was there at capture, no other."""

    whole: torch.Tensor  # what the last replay saw, padding included
    first_kernel: Callable[[], None]

    def __init__(self, step: Callable[[int], GraphStep], sizes: list[int], name: str, pool: Any) -> None:
        self.sizes = sizes
        self._captured = {size: step(size) for size in sizes}

    def replay(self, size: int, rows: int) -> GraphStep:
        self.first_kernel()
        RecordedGraphs.whole = self._captured[size].token_ids.clone()
        return GraphStep(self.whole[:rows], self.whole[:rows])


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Graphs for up to 6 rows, idle slot 99, whose step gives back the slots that it computes."""
    from mini_sglang.execution import pinned_ring  # needs Triton
    from mini_sglang.kernels.triton.decode_step import update_page_table_reference, write_tokens_reference

    monkeypatch.setattr(cuda_graph, "StepGraphs", RecordedGraphs)
    monkeypatch.setattr(pinned_ring, "update_page_table", update_page_table_reference)
    monkeypatch.setattr(pinned_ring, "write_tokens", write_tokens_reference)
    ring = pinned_ring.PinnedRing(small_table(CPU).page_table, 6)
    graphs = DecodeGraphs(lambda slots: GraphStep(slots, slots), ring, 99, None)
    graphs._graphs.first_kernel = graphs._ring.take  # type: ignore[attr-defined]
    return graphs


def small_table(device: torch.device) -> RequestTable:
    """99 slots of four pages each."""
    return RequestTable(99, context_length=16, page_size=4, device=device, idle_page=0)


@guards("largest-not-captured")
def test_the_largest_batch_has_a_graph() -> None:
    expect(
        (graph_sizes(20), graph_sizes(8), graph_sizes(3)),
        ([1, 2, 4, 8, 16, 20], [1, 2, 4, 8], [1, 2, 3]),
        "sizes for up to 20, 8 and 3 rows",
        invariant="every batch up to max_rows finds a size that holds it",
        read="L9: A step as one launch",
    )


@guards("rounded-down")
def test_a_batch_takes_the_next_larger_graph(graphs: DecodeGraphs) -> None:
    got = [graphs._graphs.size_for(count) for count in range(1, 7)]
    expect(
        got,
        [1, 2, 4, 4, 6, 6],
        "graphs for batches of 1 to 6 rows, of the sizes 1, 2, 4 and 6",
        invariant="no row is left out: sizes are rounded up",
        read="L9: A step as one launch",
    )


@guards("inputs-moved")
def test_a_replay_reads_the_memory_that_was_captured(graphs: DecodeGraphs) -> None:
    expect(
        graphs.replay((3, 1, 4, 5), {}).token_ids.tolist(),
        [3, 1, 4, 5],
        "slots that a graph of 4 rows computes, ordered (3, 1, 4, 5)",
        invariant="a graph holds addresses: write into the tensor that it captured, never put another in its place",
        read="L9: A step as one launch",
    )


@guards("padded-with-slot-0")
def test_spare_rows_belong_to_the_idle_slot(graphs: DecodeGraphs) -> None:
    graphs.replay((3, 1, 0, 5), {})
    rows = graphs.replay((2, 0, 1), {}).token_ids.tolist()
    expect(
        (rows, RecordedGraphs.whole.tolist()),
        ([2, 0, 1], [2, 0, 1, 99]),
        "rows handed out and rows computed by the graph of 4 rows, for three slots after a step of four",
        invariant="a spare row changes nothing that anybody reads",
        read="L9: A step as one launch",
    )


@guards("stale-slots")
def test_other_slots_are_sent_even_if_there_are_as_many(graphs: DecodeGraphs) -> None:
    graphs.replay((3, 1), {})
    expect(
        graphs.replay((4, 1), {}).token_ids.tolist(),
        [4, 1],
        "slots computed after a step of as many other slots",
        invariant="nothing is sent only if the very same batch is on the device already",
        read="L9: A step as one launch",
    )


@guards("sent-every-step")
def test_the_same_batch_is_sent_once(graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []

    def counted(numbers: Sequence[object], device: torch.device) -> torch.Tensor:
        sent.append(numbers)
        return staged(numbers, device)

    monkeypatch.setattr(cuda_graph, "staged", counted)
    slots = (3, 1)
    for _ in range(5):
        graphs.replay(slots, {})
    expect(
        len(sent),
        1,
        "copies to the device for five steps of one and the same batch",
        invariant="the host's work per step grows with what has changed, not with the batch",
        read="L9: State on the device",
    )


@guards("ring-out-of-step")
def test_new_pages_arrive_in_the_step_that_gains_them(graphs: DecodeGraphs) -> None:
    table = graphs._ring._page_table
    handed: list[dict[int, int]] = [{}, {5: 70}, {}, {}, {6: 71, 20: 72}]
    for step, pages in enumerate(handed, 1):
        graphs.replay((3, 1), pages)
        got = {place: int(table.view(-1)[place]) for place in pages}
        expect(
            got,
            pages,
            f"places of the page table and what is there after step {step}",
            invariant="host and device count the same steps: each has its entry of the ring, be it empty",
            read="L9: Nothing beside the replay",
        )


def test_real_graphs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU; everything above holds without one")
    from mini_sglang.execution.pinned_ring import PinnedRing  # needs Triton

    device = torch.device("cuda")
    with torch.inference_mode():
        table = small_table(device)
        pool = torch.cuda.graph_pool_handle()
        real = DecodeGraphs(lambda slots: GraphStep(slots * 10, slots), PinnedRing(table.page_table, 6), 99, pool)
        for page, slots in enumerate([(3, 1, 4, 5), (2, 0, 1), (5,), (1, 2, 3, 4, 5, 0)], 50):
            got = real.replay(slots, {4 * slots[0]: page} if page % 2 else {}).token_ids.tolist()
            expect(got, [10 * slot for slot in slots], f"a real graph's result for the slots {slots}")
            expect(real.on_host(len(slots)).tolist(), got, "and what it left on the host")
            if page % 2:
                first = int(table.page_table[slots[0], 0])
                expect(first, page, f"first page of slot {slots[0]}, which the step gained")
