"""Tensor parallelism on two GPUs: equal answers with graphs and without, equal bits, and a rank that is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mini_sglang.sampling_params import SamplingParams
from tests.gpu.conftest import run_on_gpu
from tests.tiny import Checkpoints, TinyCheckpoint, generate_ids, greedy_ids, make_ragged_prompts, run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

START = """
import sys, time, mini_sglang
config = mini_sglang.EngineConfig(model=sys.argv[1], tp=2, max_running_requests=16, num_pages=1000)
engine = mini_sglang.Engine(config)
print("ready", flush=True)
"""
IDLE = """
while True:
    engine.check_workers()
    time.sleep(0.1)
"""
BUSY = """
while True:
    engine.add_request("a", [5, 6], mini_sglang.SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.has_work:
        engine.step()
"""
CAUGHT = """
try:
    while True:
        engine.check_workers()
        time.sleep(0.1)
except RuntimeError as error:
    engine.close()
    print(error, "and closed", file=sys.stderr)
"""
UNCLOSED = """
engine.add_request("a", [5, 6], mini_sglang.SamplingParams(max_tokens=9, ignore_eos=True))
while engine.has_work:
    engine.step()
"""


def test_two_ranks_answer_like_transformers(tiny_model: TinyCheckpoint, mode: dict[str, Any]) -> None:
    prompts = make_ragged_prompts(16, 320)
    expected = [greedy_ids(tiny_model.model, prompt) for prompt in prompts]
    with run_on_gpu(tiny_model.path, tp=2, **mode) as engine:
        assert generate_ids(engine, prompts, arrivals=1) == expected
        assert generate_ids(engine, prompts) == expected, "everything cached"


@pytest.mark.parametrize("family", ["gpt_oss", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3_moe"])
def test_every_family(family: str, checkpoints: Checkpoints) -> None:
    experts: dict[str, Any] = (
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64} if "moe" in family else {}
    )
    heads: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    checkpoint = checkpoints.write(family, **heads, **experts)
    prompts = make_ragged_prompts(8, 320)
    with run_on_gpu(checkpoint.path, tp=2) as engine:
        assert generate_ids(engine, prompts) == [greedy_ids(checkpoint.model, prompt) for prompt in prompts]


def test_the_same_bits_in_any_batch(tiny_model: TinyCheckpoint) -> None:
    prompts = make_ragged_prompts(16, 320)
    params = [SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)] * len(prompts)
    with run_on_gpu(tiny_model.path, tp=2, dtype="bfloat16", deterministic=True, cache="naive") as engine:
        together = run_all(engine, prompts, params)
        alone = [run_all(engine, [prompt], params[:1])[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [(part.token_ids, part.logprobs) for part in one] == [(part.token_ids, part.logprobs) for part in other]


def test_the_same_bits_whichever_way_a_sum_goes(checkpoints: Checkpoints) -> None:
    """The prompt alone is summed through symmetric memory, 800 tokens of 8 KiB are too many for that."""
    path = checkpoints.write(hidden_size=4096, head_dim=64).path
    prompts = [[5 + index, *range(20, 219)] for index in range(4)]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)] * len(prompts)
    settings = {"dtype": "bfloat16", "deterministic": True, "cache": "naive", "max_prefill_tokens": 1024}
    with run_on_gpu(path, tp=2, **settings) as engine:
        together = run_all(engine, prompts, params)
        alone = [run_all(engine, [prompt], params[:1])[0] for prompt in prompts]
    for one, other in zip(together, alone, strict=True):
        assert [(part.token_ids, part.logprobs) for part in one] == [(part.token_ids, part.logprobs) for part in other]


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("script", [IDLE, BUSY, CAUGHT], ids=["idle", "busy", "caught"])
def test_a_lost_rank_ends_all(tiny_model: TinyCheckpoint, signal_number: signal.Signals, script: str) -> None:
    process, worker = start(tiny_model.path, script)
    os.kill(worker, signal_number)
    _, log = process.communicate(timeout=15)
    assert process.returncode == 1, log.decode()
    assert b"rank 1 was " in log
    assert (b"and closed" in log) == (script == CAUGHT)
    assert not Path(f"/proc/{worker}").exists()


def test_what_nobody_closes_ends(tiny_model: TinyCheckpoint) -> None:
    process, worker = start(tiny_model.path, UNCLOSED)
    _, log = process.communicate(timeout=15)
    assert process.returncode == 0, log.decode()
    assert not Path(f"/proc/{worker}").exists()


def start(model: Path, script: str) -> tuple[subprocess.Popen[bytes], int]:
    """A program with two ranks, which are there, and its worker's process."""
    command = [sys.executable, "-c", START + script, str(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    [worker] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    return process, worker
