"""What steps take, read from a step log whose steps are known, and kept in a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from mini_sglang.observability.step_log import Arrived, Chunk, Ended, Header, Step, StepLog
from mini_sglang.outputs import FinishReason
from mini_sglang.scheduling.step_cost import Work
from mini_sglang.simulate.cost import DeviceTimes, HostTimes, ReplicaCost, fit_cost, fit_latency, load_cost
from tests.simulate.conftest import SETTINGS

DEVICE = DeviceTimes(5000.0, 40.0, 0.5, 20.0, 0.01, 12.0)
HOST = HostTimes(300.0, 5.0, 2.0)


def write_log(path: Path, steps: int, *, on_gpu: bool, spread: float = 0.0, pause_us: int = 0) -> ReplicaCost:
    """The log of an engine whose steps take `DEVICE` and `HOST`, and the cost that they were made with.

    Requests come in the first steps, each prompt in two chunks, and decode from then on. With `pause_us` the engine
    has no request for this long in between.
    """
    cost = ReplicaCost(dict(SETTINGS), DEVICE, HOST)
    chance = np.random.default_rng(0)
    log = StepLog(str(path))
    log.write(Header(began=0.0, config={**SETTINGS, "device": "cuda" if on_gpu else "cpu"}))
    now = 0
    lengths: dict[str, int] = {}
    decoding: dict[str, int] = {}  # position of the next token that each computes
    for number in range(1, steps + 1):
        if pause_us and number == steps // 2:
            for name in lengths:
                log.write(Ended(at_us=now, request_id=name, reason=FinishReason.LENGTH))
            now, lengths, decoding = now + pause_us, {}, {}
        chunks = []
        if number % 5 in (1, 2):
            name = f"r{number - number % 5}"
            if name not in lengths:
                lengths[name] = int(chance.integers(20, 400))
                log.write(Arrived(at_us=now, request_id=name, prompt_tokens=lengths[name] * 2))
            start = 0 if number % 5 == 1 else lengths[name]
            chunks = [Chunk(name, start, lengths[name], number % 5 == 2)]
        elif not lengths:
            continue
        tokens = sum(chunk.count for chunk in chunks)
        pairs = sum(chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2 for chunk in chunks)
        work = Work(1, len(decoding), sum(decoding.values()), tokens, pairs)
        device = round(cost.device_step_us(work) * (1 + spread * chance.standard_normal()))
        host = round(cost.host_step_us(work))
        phases = {"schedule": host // 2, "update": host - host // 2}
        phases |= {"launch": 0, "wait": device} if on_gpu else {"launch": device, "wait": 0}
        log.write(
            Step(
                step=number, at_us=now, read_us=now + host + device, host_us=phases, decodes=len(decoding),
                device_us=device if on_gpu else None, tokens=tokens + len(decoding), chunks=chunks,
                decode_ids=tuple(decoding),
            )
        )  # fmt: skip
        now += host + device
        decoding = {name: position + 1 for name, position in decoding.items()}
        for chunk in chunks:
            if chunk.samples:
                decoding[chunk.request_id] = chunk.start + chunk.count
    log.close()
    return cost


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_times_that_a_log_was_made_with_are_found(tmp_path: Path, on_gpu: bool) -> None:
    write_log(tmp_path / "log", 300, on_gpu=on_gpu)
    fit = fit_cost(tmp_path / "log")
    assert msgspec.structs.astuple(fit.cost.device_us) == pytest.approx(msgspec.structs.astuple(DEVICE), rel=0.02)
    assert msgspec.structs.astuple(fit.cost.host_us) == pytest.approx(msgspec.structs.astuple(HOST), rel=0.05)
    assert fit.median_error < 0.001
    assert fit.cost.settings == SETTINGS


def test_uneven_steps_take_as_long_together_and_their_spread_is_found(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 600, on_gpu=True, spread=0.1)
    fit = fit_cost(tmp_path / "log")
    assert fit.total == pytest.approx(1.0, abs=0.001)
    assert fit.cost.spread == pytest.approx(0.1, rel=0.1)
    assert min(msgspec.structs.astuple(fit.cost.device_us)) >= 0


def test_time_without_a_request_is_nobodys(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 300, on_gpu=False, pause_us=60_000_000)
    host = fit_cost(tmp_path / "log").cost.host_us
    assert host.step == pytest.approx(HOST.step, rel=0.1)


def test_a_log_of_a_few_steps_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path / "log", 20, on_gpu=True)
    with pytest.raises(ValueError, match="a fit needs 30"):
        fit_cost(tmp_path / "log")


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    with pytest.raises(ValueError, match="is not a step log"):
        fit_cost(tmp_path / "log")


def test_the_times_that_streams_were_made_with_are_found(tmp_path: Path) -> None:
    paths = []
    for batch, length in ((1, 100), (1, 2000), (4, 500), (16, 100), (32, 1000)):
        steps = -(-((batch - 1) // 2 + 1) * length // 4096)
        tokens = min(batch * length, steps * 4096)
        pairs = tokens * (length + 1) // 2
        first = steps * DEVICE.step + tokens * DEVICE.token + pairs * DEVICE.pair
        between = DEVICE.step + batch * DEVICE.decode + batch * (length + 50) * DEVICE.context
        figures: dict[str, object] = {"batch": batch, "input": length, "output": 100, "first_token_ms": first / 1e3}
        figures |= {"token_ms_median": between / 1e3, "config": {**SETTINGS, "max_prefill_tokens": 4096}}
        paths.append(tmp_path / f"{batch}-{length}.json")
        paths[-1].write_text(msgspec.json.encode(figures).decode())
    fit = fit_latency(paths)
    assert msgspec.structs.astuple(fit.cost.device_us)[:5] == pytest.approx(msgspec.structs.astuple(DEVICE)[:5])
    assert fit.cost.settings["max_prefill_tokens"] == 4096


def test_too_few_streams_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ValueError, match="a fit needs 3 files"):
        fit_latency([tmp_path / "file"])
    with pytest.raises(ValueError, match="is not what bench latency --json writes"):
        fit_latency([tmp_path / "file"] * 3)
    old = {"batch": 1, "input": 1, "output": 1, "first_token_ms": 1, "token_ms_median": 1, "config": {"page_size": 1}}
    (tmp_path / "file").write_bytes(msgspec.json.encode(old))
    with pytest.raises(ValueError, match="does not say what num_pages was"):
        fit_latency([tmp_path / "file"] * 3)


def test_a_cost_is_the_same_once_saved_and_read(tmp_path: Path, cost: ReplicaCost) -> None:
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds no cost of a replica"),
        ('{"settings": {}, "device_us": {"step": 1}}', "holds no cost of a replica"),
        ('{"settings": {}, "device_us": {"step":1,"decode":1,"context":1,"token":1,"pair":1}}', "not complete"),
        (
            '{"settings": {"model": "x"}, "device_us": {"step":1,"decode":1,"context":1,"token":1,"pair":1}}',
            "settings of a replica are page_size.* got model",
        ),
    ],
)
def test_a_file_that_holds_no_cost_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        load_cost(tmp_path / "cost.json")


def test_settings_that_make_no_engine_are_refused(cost: ReplicaCost) -> None:
    with pytest.raises(ValueError, match="page_size"):
        cost.with_settings({"page_size": 0}).config  # noqa: B018
