"""The tables of docs/performance.md, made from the figures in benchmarks/results.

    python -m benchmarks.tables

Each block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`, and opens with the machine, the versions, the
day and the command. Nothing is measured here: the scripts beside this one leave the figures.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
SMALL, LARGE = "qwen3-0.6b", "qwen3-8b"
NONE = "–"
Figures = Mapping[str, Any]
Rows = list[list[str]]  # the first one is the head


@dataclass(frozen=True)
class Block:
    """What stands between two markers: a line of provenance, and rows made from files of benchmarks/results."""

    name: str
    sources: tuple[str, ...]  # the first one has the provenance
    rows: Callable[..., Rows]  # of the JSON of each source
    command: str | None = None  # where the source does not name its own
    dated: str | None = None  # the figure whose day is given, where they have different ones

    def text(self) -> str:
        """The block, without its markers. Raises FileNotFoundError where a source is missing."""
        figures = [json.loads((RESULTS / source).read_text()) for source in self.sources]
        date = figures[0]["measured"][self.dated] if self.dated else None
        return f"{provenance(figures[0], self.command, date)}\n\n{markdown(self.rows(*figures))}"


def provenance(figures: Figures, command: str | None, date: str | None = None) -> str:
    """Machine, versions, day and command in one line."""
    machine = figures.get("machine") or figures["card"]
    versions = ", ".join(f"{package} {version}" for package, version in figures["versions"].items())
    said = command or figures.get("command")
    return f"{machine}; {versions}; {date or figures['date']}{f', `{said}`' if said else ''}."


def gpu_rows(peers: Figures) -> Rows:
    """Of one GPU beside other engines: a row for each figure, a column for each engine."""
    engines = peers["engines"]
    starts = peers["server_start_s"]

    def row(name: str, key: str, shape: str, share: str | None = None) -> list[str]:
        return [name, *(_with_share(figures, key, share, shape) for figures in engines.values())]

    return [
        ["", *engines],
        row("Offline, Qwen3-0.6B, tok/s (of the floor)", "offline_tok_s", SMALL, "offline_of_floor"),
        row("Offline, Qwen3-8B", "offline_tok_s", LARGE, "offline_of_floor"),
        row("One stream, Qwen3-0.6B, tok/s (of the floor)", "single_tok_s", SMALL, "single_of_floor"),
        row("One stream, Qwen3-8B", "single_tok_s", LARGE, "single_of_floor"),
        row("TTFT of 964 tokens, Qwen3-0.6B, ms", "first_token_ms", SMALL),
        row("TTFT of 964 tokens, Qwen3-8B, ms", "first_token_ms", LARGE),
        row("Process start to first token, Qwen3-0.6B, s", "start_s", SMALL),
        row("Process start to first token, Qwen3-8B, s", "start_s", LARGE),
        ["Server start to `/health`, s", *(starts.get(engine, NONE) for engine in engines)],
    ]


def own_gpu_rows(figures: Figures) -> Rows:
    """Of gpu.py: what it measures of this engine alone."""

    def row(name: str, text: Callable[[str], str]) -> list[str]:
        return [name, text(SMALL), text(LARGE)]

    def start(state: str) -> Callable[[str], str]:
        return lambda shape: f"{figures['start_s'][shape][state]:.1f}"

    def single(key: str) -> Callable[[str], str]:
        return lambda shape: f"{figures['single_latency'][shape][key]:.2f}"

    slower = figures["deterministic_tok_s"] / figures["offline_tok_s"][LARGE]
    return [
        ["", "Qwen3-0.6B", "Qwen3-8B"],
        row("Offline, tok/s (of the floor)", lambda s: _with_share(figures, "offline_tok_s", "offline_of_floor", s)),
        row("Device idle meanwhile", lambda s: f"{figures['device_idle_share'][s]:.1%}"),
        row("One stream, tok/s (of the floor)", lambda s: _with_share(figures, "single_tok_s", "single_of_floor", s)),
        row("TTFT of 964 tokens, ms", lambda s: f"{figures['single_latency'][s]['first_token_ms']:.1f}"),
        row("ITL of one stream, p50, ms", single("token_ms_median")),
        row("ITL of one stream, p99, ms", single("token_ms_p99")),
        row("Process start to first token, s", start("warm")),
        row("The same with an empty Triton cache, s", start("cold")),
        ["Offline with `--deterministic`, tok/s", NONE, f"{figures['deterministic_tok_s']:,.0f} ({slower:.0%})"],
    ]


def quantised_rows(figures: Figures) -> Rows:
    """Of gpu.py: a row for each shape and kind of weights, measured in turns; the ratio is to bfloat16."""
    rows = [["Shape", "`--quantization`", "Offline, tok/s (of its floor)", "ratio", "One stream", "ratio"]]
    measured = figures["quantised"]
    for shape, by_kind in measured["offline_tok_s"].items():
        for kind in by_kind:
            row = [shape, kind]
            for key in ("offline", "single"):
                rates = measured[f"{key}_tok_s"][shape]
                row += [
                    f"{rates[kind]:,.0f} ({measured[f'{key}_of_floor'][shape][kind]:.0%})",
                    f"{rates[kind] / rates['none']:.2f}",
                ]
            rows.append(row)
    return rows


def online_rows(online: Figures) -> Rows:
    """Of servers under load: a row for each load and engine."""
    rows = [
        ["Load", "Engine", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "TPOT p50, ms", "output tok/s", "within limits"]
    ]
    for load in online["loads"]:
        for engine, figures in load["engines"].items():
            latencies = [_pair(figures["ttft_ms"]), _pair(figures["itl_ms"]), _number(figures["tpot_ms_p50"])]
            rows.append([load["load"], engine, *latencies, *_outcome(figures)])
    return rows


def serving_rows(serving: Figures) -> Rows:
    """Of gpu_serving.py: a row for each rate."""
    rows = [["Load", "TTFT p50 / p99, ms", "ITL p50 / p99, ms", "TPOT p50, ms", "output tok/s", "within limits"]]
    for run in serving["results"]:
        latencies = [f"{run[name]['p50']:,.0f} / {run[name]['p99']:,.0f}" for name in ("ttft_ms", "itl_ms")]
        outcome = [f"{run['output_tokens_per_second']:,.0f}", f"{run['good_share']:.0%}"]
        rows.append([f"{run['rate']:g}/s", *latencies, f"{run['tpot_ms']['p50']:.1f}", *outcome])
    return rows


def budget_rows(online: Figures) -> Rows:
    """Of servers with several token budgets of a step."""
    rows = [["Load", "Engine", "Tokens a step", "TTFT p50 / p99, ms", "ITL p99, ms", "output tok/s", "within limits"]]
    for run in online["budgets"]:
        latencies = [_pair(run["ttft_ms"]), _number(run["itl_ms_p99"])]
        rows.append([run["load"], run["engine"], _number(run["budget"]), *latencies, *_outcome(run)])
    return rows


def tp_rows(peers: Figures, own: Figures) -> Rows:
    """Of two GPUs. The floor is of the same workload on the same cards, from gpu_parallel.py's run."""
    floors = {key: own[key][f"{key}_tok_s"] / own[key][f"{key}_of_floor"] for key in ("offline", "single")}

    def row(name: str, key: str) -> list[str]:
        rates = [figures[f"{key}_tok_s"] for figures in peers["engines"].values()]
        return [name, *(f"{_number(rate)} ({rate / floors[key]:.0%})" for rate in rates)]

    return [
        ["Qwen3-32B, `--tp 2`", *peers["engines"]],
        row("Offline, tok/s (of the floor)", "offline"),
        row("One stream, tok/s (of the floor)", "single"),
        ["Process start to first token, s", *(_number(figures["start_s"]) for figures in peers["engines"].values())],
    ]


def transformers_rows(run: Figures) -> Rows:
    """Of cpu_vs_transformers.py."""
    rows = [["Weights", "Workload", "mini_sglang, tok/s", "transformers, tok/s", "ratio"]]
    for weights, workloads in run["figures"]["formats"].items():
        for workload, rates in workloads.items():
            if workload != "overhead_ms":
                rows.append([weights, workload, *_sides(rates["ours"], rates["transformers"])])
    return rows


def offline_peer_rows(peers: Figures) -> Rows:
    """Of offline engines on a CPU: each cell holds the rates of two rounds."""
    rows = [["tok/s, two rounds", *peers["workloads"]]]
    for engine, workloads in peers["tok_s"].items():
        rows.append([engine, *(", ".join(map(_number, rates)) if rates else NONE for rates in workloads)])
    return rows


def library_rows(run: Figures) -> Rows:
    """Of cpu_vs_peers.py."""
    workloads = run["figures"]["workloads"]
    engines = list(run["figures"]["peak_memory_bytes"])
    rows = [["Workload, tok/s", *engines, "ratio to the best peer"]]
    for name, figures in workloads.items():
        rows.append([name, *(_number(figures[engine]) for engine in engines), f"{figures['ratio']:.2f}"])
    return rows


def loading_rows(run: Figures) -> Rows:
    """Of first_token.py: medians, and of this engine what is beyond importing torch."""
    torch, own = "import torch", ("LLM", "serve")
    rows: Rows = []
    for case, sides in run["figures"].items():
        seconds = {
            side: statistics.median(start["first_token"] for start in of_side) for side, of_side in sides.items()
        }
        rows = rows or [["Seconds to the first token (beyond importing torch)", *seconds]]
        cells = [f"{s:.2f} ({s - seconds[torch]:.2f})" if side in own else f"{s:.2f}" for side, s in seconds.items()]
        rows.append([case, *cells])
    return rows


def peer_rows(run: Figures) -> Rows:
    """Of serving_vs_peers.py: a row for each rate, and one for both percentiles of each latency."""
    rows = [["Workload", "", "mini_sglang", run["figures"]["peer"], "ratio"]]
    for workload, by_figure in run["figures"]["workloads"].items():
        for name, figures in _latencies_joined(by_figure):
            sides = [_sides(sides["ours"], sides["peer"]) for sides in figures]
            rows.append([workload, name, *(" / ".join(column) for column in zip(*sides, strict=True))])
    return rows


def accuracy_rows(run: Mapping[str, Sequence[Figures]]) -> Rows:
    """Of load_generator_accuracy.py."""
    head = ["Requests/s", "worst error: TTFT", "ITL", "TPOT", "E2E", "CPU a request", "of a core", "late: p50", "p99"]
    rows = [head]
    for result in run["figures"]:
        errors = [max(map(abs, result["errors"][f"{name}_ms"].values())) for name in ("ttft", "itl", "tpot", "e2e")]
        late = [f"{result['late_ms'][part]:.1f} ms" for part in ("p50", "p99")]
        cost = [f"{result['cpu_us_per_request']:,.0f} µs", f"{result['cpu_share']:.1%}"]
        rows.append([f"{result['rate']:,g}", *(f"{error:.2%}" for error in errors), *cost, *late])
    return rows


BLOCKS = [
    Block("h200", ("h200-peers.json",), gpu_rows),
    Block("h200-own", ("h200.json",), own_gpu_rows, "python benchmarks/gpu.py", "offline_tok_s"),
    Block("h200-quantised", ("h200.json",), quantised_rows, "python benchmarks/gpu.py --only quantised", "quantised"),
    Block("h200-online", ("h200-online-peers.json",), online_rows),
    Block("h200-serving", ("h200-serving-online.json",), serving_rows),
    Block("h200-budget", ("h200-online-peers.json",), budget_rows),
    Block("h200-tp2", ("h200-tp2-peers.json", "h200-tp2.json"), tp_rows),
    Block("transformers", ("cpu-transformers.json",), transformers_rows),
    Block("peers", ("cpu-peers.json",), library_rows),
    Block("offline-peers", ("cpu-offline-peers.json",), offline_peer_rows),
    Block("loading", ("cpu-loading.json",), loading_rows),
    Block("vllm", ("cpu-vllm.json",), peer_rows),
    Block("llama.cpp", ("cpu-llama.cpp.json",), peer_rows),
    Block("accuracy", ("cpu-accuracy.json",), accuracy_rows),
]


def _with_share(figures: Figures, key: str, share: str | None, shape: str) -> str:
    """The figure of one shape, and in brackets what share of its floor it is; a dash where there is none."""
    value = figures[key].get(shape)
    if value is None:
        return NONE
    text = _number(round(value) if value >= 1000 else value)
    return text if share is None else f"{text} ({figures[share][shape]:.0%})"


def _number(value: float) -> str:
    """Integers are shown as they are, all others with one decimal."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def _pair(percentiles: Mapping[str, float]) -> str:
    return f"{_number(percentiles['p50'])} / {_number(percentiles['p99'])}"


def _outcome(figures: Figures) -> list[str]:
    return [_number(figures["output_tok_s"]), f"{figures['good']:.0%}"]


def _latencies_joined(by_figure: Mapping[str, Figures]) -> Iterator[tuple[str, list[Figures]]]:
    """ "TTFT p50, ms" and "TTFT p99, ms" become one "TTFT p50 / p99, ms"; others stay alone."""
    for name, sides in by_figure.items():
        if "p50" in name:
            yield name.replace("p50", "p50 / p99"), [sides, by_figure[name.replace("p50", "p99")]]
        elif "p99" not in name:
            yield name, [sides]


def _sides(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    """Medians of both sides, and of the rounds' ratios."""
    ratio = statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return [f"{statistics.median(ours):,.1f}", f"{statistics.median(theirs):,.1f}", f"{ratio:.2f}"]


def markdown(rows: Rows) -> str:
    """A table."""
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *others])


def put(document: str, name: str, text: str) -> str:
    """`document` with `text` between the markers of `name`. Raises ValueError if it has none."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{DOCUMENT.name} has no place for {name}: it needs {begin.strip()} and {end}")
    return f"{before}{begin}{text}\n{end}{after}"


def write() -> None:
    """Bring every block of the document up to date."""
    document = DOCUMENT.read_text()
    for block in BLOCKS:
        document = put(document, block.name, block.text())
    DOCUMENT.write_text(document)


if __name__ == "__main__":
    write()
