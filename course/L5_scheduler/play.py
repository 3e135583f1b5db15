"""The scheduler on a clock: what chunks do for a stream beside a long prompt, and what preemption does when pages end.

No model: a step is taken to cost 4 ms and 0.1 ms for every token in it, which is about what a small GPU does.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_sglang.config import ResolvedConfig
from mini_sglang.request import Request, RequestStatus
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import Row, ScheduledBatch
from mini_sglang.scheduling.simulation import Simulation

Arrival = tuple[int, str, int, int]  # step, name, prompt tokens, output tokens
STREAMS: list[Arrival] = [(0, "A", 6, 18), (3, "B", 90, 6), (4, "C", 20, 8)]
CROWD: list[Arrival] = [(0, "A", 6, 18), (0, "B", 6, 18), (0, "C", 6, 18)]
PAUSE_S = 0.6


def main() -> None:
    console = Console()
    for title, arrivals, budget, num_pages in (
        ("A long prompt in one piece: A and C wait for it", STREAMS, 512, 64),
        ("The same requests, at most 16 tokens a step", STREAMS, 16, 64),
        ("Three requests in 10 pages of 4 tokens: the last one gives way and comes back", CROWD, 16, 10),
    ):
        console.print(_drawn(title, *_run(arrivals, budget, num_pages)))
        console.print()
        _rest(console)
    console.print("[dim]digits: prompt tokens in the step · ━ one token of a stream · × preempted, waiting again[/]")


def _run(arrivals: list[Arrival], budget: int, num_pages: int) -> tuple[dict[str, Text], dict[str, list[float]]]:
    """One line of cells per request, and when each of its tokens came, in ms."""
    simulation = Simulation(
        ResolvedConfig(
            page_size=4, num_pages=num_pages, context_length=200, max_prefill_tokens=budget, max_running_requests=8
        )
    )
    simulation.scheduler.expected_output = 0.0
    lines = {name: Text() for _, name, _, _ in arrivals}
    times: dict[str, list[float]] = {name: [] for name in lines}
    clock, schedule = 0.0, simulation.scheduler.schedule
    rows: dict[int, Row] = {}  # of the step

    def watched_schedule() -> ScheduledBatch | None:
        batch = schedule()
        rows.clear()
        rows.update({row.slot: row for row in batch.rows} if batch is not None else {})
        return batch

    simulation.scheduler.schedule = watched_schedule  # type: ignore[method-assign]
    for step in range(200):
        for at, name, prompt, output in arrivals:
            if at == step:
                simulation.add(Request(name, [ord(name)] * prompt, SamplingParams(max_tokens=output)))
        slots = {name: request.slot for name, request in simulation.requests.items()}
        outputs = simulation.step()
        clock += 4 + 0.1 * sum(row.count for row in rows.values())
        for name, request in simulation.requests.items():
            slot = request.slot if request.slot is not None else slots.get(name)
            waits = request.status is RequestStatus.WAITING
            row = None if slot is None or waits else rows.get(slot)
            if row is not None:
                lines[name].append(
                    "━  " if row.count == 1 else f"{row.count:<3}", "green" if row.count == 1 else "cyan"
                )
            elif waits and request.was_admitted:
                lines[name].append("×  ", "red")
            else:
                lines[name].append("   ")
        for name in lines.keys() - simulation.requests.keys():
            lines[name].append("   ")
        for token in outputs:
            times[token.request_id].append(clock)
        if len(simulation.finished) == len(arrivals):
            break
    simulation.check_outputs()
    return lines, times


def _drawn(title: str, lines: dict[str, Text], times: dict[str, list[float]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for column in ("", "steps →", "first token at", "longest gap", "end at"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("", "steps →") else "right")
    for name, line in lines.items():
        gaps = [after - before for before, after in zip(times[name], times[name][1:], strict=False)]
        figures = (times[name][0], max(gaps), times[name][-1])
        table.add_row(name, line, *(f"{figure:.0f} ms" for figure in figures))
    return table


def _rest(console: Console) -> None:
    if console.is_terminal:  # else nobody watches
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
