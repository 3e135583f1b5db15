"""Tables of what was measured. Knows the figures alone, not what measured them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mini_sglang.bench.host_time import HostTime
from mini_sglang.bench.kernel_time import KernelTime
from mini_sglang.bench.latency import Streams
from mini_sglang.bench.offline import Offline
from mini_sglang.bench.output import table
from mini_sglang.bench.profile import Profile
from mini_sglang.bench.roofline import Ceilings, Traffic

_NAME_WIDTH = 60


def offline_tables(offline: Offline, traffic: Traffic, ceilings: Ceilings) -> list[Table]:
    runs = table("Offline throughput", "run", "output tok/s", "seconds", "steps")
    for index, run in enumerate(offline.runs):
        best = " (counts)" if run is offline.best else ""
        runs.add_row(f"{index + 1}{best}", f"{run.tokens_per_second:,.0f}", f"{run.seconds:.2f}", str(run.steps))
    if offline.best.drafts is not None:
        runs.caption = str(offline.best.drafts)
    tables = [runs, roofline_table(traffic, ceilings, offline.best.seconds), host_table(offline.host)]
    if offline.profiles:
        title = (
            f"Where the device's time went, ms a step (of a whole run: idle {offline.idle_share or 0:.1%}, "
            f"waiting for the host {offline.host_gap_share or 0:.1%})"
        )
        tables += [profile_table(title, offline.profiles), top_table(offline.profiles[-1])]
    return tables


def latency_tables(streams: Sequence[Streams], traffic: Traffic, ceilings: Ceilings) -> list[Table]:
    best = max(streams, key=lambda run: run.tokens_per_second)
    made = table("Latency", "run", "tok/s", "first token, ms", "ms a token, median", "99th percentile")
    for index, run in enumerate(streams):
        made.add_row(
            f"{index + 1}{' (counts)' if run is best else ''}",
            f"{run.tokens_per_second:,.1f}",
            f"{run.first_token_ms:.1f}",
            f"{run.token_ms_median:.3f}",
            f"{run.token_ms_p99:.3f}",
        )
    return [made, roofline_table(traffic, ceilings, best.seconds)]


def roofline_table(traffic: Traffic, ceilings: Ceilings, seconds: float) -> Table:
    """What had to be done, the least time each part takes, and how much of the time taken the floor is."""
    made = table("Roofline", "", "amount", "at the ceiling, s")
    for name, num_bytes in (
        ("weights read", traffic.weight_bytes),
        ("KV read", traffic.kv_read_bytes),
        ("KV written", traffic.kv_written_bytes),
    ):
        made.add_row(name, f"{num_bytes / 1e9:,.2f} GB", f"{num_bytes / ceilings.bytes_per_second:.3f}")
    prompt_seconds = traffic.prompt_flops / ceilings.flops_per_second
    made.add_row("products of prompts", f"{traffic.prompt_flops / 1e12:,.2f} TFLOP", f"{prompt_seconds:.3f}")
    made.add_row("products of decodes", f"{traffic.decode_flops / 1e12:,.2f} TFLOP", "with the weights")
    floor = traffic.floor_seconds(ceilings)
    made.add_row("floor", "", f"{floor:.3f}", end_section=True)
    made.add_row("taken", f"{floor / seconds:.1%} of the floor's speed", f"{seconds:.3f}")
    made.caption = (
        f"ceilings: copy {ceilings.bytes_per_second / 1e12:.3g} TB/s, product {ceilings.flops_per_second / 1e12:.3g} "
        "TFLOP/s"
    )
    return made


def host_table(times: Sequence[HostTime]) -> Table:
    launch = "launch (on a CPU the step itself, and not counted)"
    made = table("Host, µs a decode step", "running requests", "schedule", launch, "update", "in all")
    for time in times:
        parts = (time.schedule_us, time.launch_us, time.update_us, time.total_us)
        made.add_row(str(time.running), *(f"{part:,.0f}" for part in parts))
    return made


def profile_table(title: str, profiles: Sequence[Profile]) -> Table:
    made = table(title, "", *(f"{profile.window} ({profile.steps} steps)" for profile in profiles))
    for name, field in (
        ("attention", "attention_ms"),
        ("matrix products", "products_ms"),
        ("sums over ranks", "all_reduce_ms"),
        ("other kernels", "other_ms"),
        ("gaps between kernels", "short_gaps_ms"),
        ("waiting for the host", "host_gaps_ms"),
    ):
        parts = [(getattr(profile, field), profile) for profile in profiles]
        made.add_row(name, *(f"{part / of.steps:.3f} ({part / of.elapsed_ms:.1%})" for part, of in parts))
    return made


def top_table(profile: Profile) -> Table:
    made = table(f"Kernels that took most ({profile.window})", "kernel", "ms a step")
    for name, milliseconds in profile.top:
        made.add_row(name[:_NAME_WIDTH], f"{milliseconds / profile.steps:.3f}")
    return made


def kernel_table(times: Sequence[KernelTime], ceilings: Ceilings) -> Table:
    made = table(
        f"Kernels in CUDA graphs (ceilings: {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"{ceilings.flops_per_second / 1e12:.0f} TFLOP/s)",
        "kernel", "shape", "µs", "TB/s", "TFLOP/s", "of ceiling", "of cuDNN",
    )  # fmt: skip
    for time in times:
        made.add_row(
            time.kernel,
            time.shape,
            f"{time.microseconds:,.1f}",
            f"{time.bytes / time.microseconds / 1e6:.2f}",
            f"{time.flops / time.microseconds / 1e6:.1f}",
            f"{time.of_ceiling:.0%}",
            "" if time.of_cudnn is None else f"{time.of_cudnn:.0%}",
        )
    return made
