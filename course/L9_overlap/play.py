"""L9 in the terminal: the engine's loop on a device in simulated time, drawn as it happened."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mini_sglang.execution.cuda_graph import DecodeGraphs, GraphStep, graph_sizes
from mini_sglang.execution.request_table import RequestTable

DEVICE = runpy.run_path(str(Path(__file__).with_name("device.py")))  # the simulated device, beside this file
STYLES = {
    "launch": "white on bright_blue",
    "read": "white on dark_orange3",
    "device": "white on green4",
    "wait": "grey50",
}
TOKENS, SHOWN_MS = 6, 72


def main() -> None:
    console = Console(highlight=False)
    console.print(
        "The engine's own loop; a step takes the device 10 ms, launching 4 ms and reading 2 ms of the host.\n"
    )
    for run_ahead in (0, 1):
        draw(console, run_ahead, run(run_ahead))
    table = Table(
        "device ms", "host ms", "run-ahead 0", "run-ahead 1", "run-ahead 2", title="ms per token, of 40 tokens"
    )
    for step_ms, launch_ms, read_ms in [(10, 4, 2), (30, 4, 2), (6, 4, 2), (2, 4, 2)]:
        row = [
            run(ahead, tokens=40, step_ms=step_ms, launch_ms=launch_ms, read_ms=read_ms).now / 40 for ahead in (0, 1, 2)
        ]
        table.add_row(str(step_ms), str(launch_ms + read_ms), *(f"{ms:.2f}" for ms in row))
    console.print(table)
    console.print(
        "A second step ahead brings nothing, and where the host is the slower one nothing but less host work helps:"
    )
    console.print("that is what graphs are for.\n")
    show_graphs(console)


def run(run_ahead: int, tokens: int = TOKENS, **times: float) -> Any:
    engine, device = DEVICE["simulated_engine"](run_ahead, **times)
    DEVICE["add_request"](engine, "a", tokens=tokens)
    while engine.has_work:
        engine.step()
    engine.close()
    return device


def draw(console: Console, run_ahead: int, device: Any) -> None:
    """One character per millisecond."""
    host, lane = Text("  host   "), Text("  device ")
    for line, kinds in ((host, ("launch", "read", "wait")), (lane, ("device",))):
        now = 0.0
        for span in (span for span in device.spans if span.who in kinds and span.begin < SHOWN_MS):
            line.append("·" * round(span.begin - now), "grey50")
            label = {"launch": f"L{span.step}", "read": f"R{span.step}", "device": f" step {span.step}", "wait": ""}[
                span.who
            ]
            width = round(min(span.end, SHOWN_MS) - span.begin)
            line.append(label[:width].ljust(width, "·" if span.who == "wait" else " "), STYLES[span.who])
            now = span.end
    console.print(
        f"[bold]run-ahead {run_ahead}[/]: {device.now:.0f} ms for {TOKENS} tokens, "
        f"device idle for {device.idle_ms():.0f} ms"
    )
    console.print(host, lane, sep="\n", soft_wrap=True)
    console.print()


def show_graphs(console: Console) -> None:
    console.print(f"graphs for up to 40 rows: {graph_sizes(40)}")
    if not torch.cuda.is_available():
        console.print("No GPU here: `check L9` replays on recorded addresses instead of real graphs.")
        return
    from mini_sglang.execution.pinned_ring import PinnedRing  # needs Triton

    device, weights = torch.device("cuda"), torch.randn(512, 512, device="cuda") / 23

    def step(slots: torch.Tensor) -> GraphStep:
        x = slots[:, None].float().expand(-1, 512).contiguous()
        for _ in range(100):  # a hundred small kernels and more
            x = (x @ weights).tanh()
        return GraphStep(slots, x)

    with torch.inference_mode():
        table = RequestTable(8, context_length=16, page_size=4, device=device, idle_page=0)
        ring = PinnedRing(table.page_table, 8)
        graphs = DecodeGraphs(step, ring, table.idle_slot, torch.cuda.graph_pool_handle())
        slots = torch.tensor([3, 1, 4, 0], device=device)
        steps: dict[str, Callable[[], GraphStep]] = {
            "kernel by kernel": lambda: step(slots),
            "as a graph": lambda: graphs.replay((3, 1, 4, 0), {}),
        }
        for name, call in steps.items():
            call()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            ms = 1000 * (time.perf_counter() - began) / 20
            console.print(f"{name}: {ms:.3f} ms a step of 200 small kernels")


if __name__ == "__main__":
    main()
