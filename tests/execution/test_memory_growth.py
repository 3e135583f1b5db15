"""What a process holds does not grow with the prompts that it has seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.tiny import Checkpoints

PROMPTS_OF_RANDOM_LENGTHS = """
import json, random, re, sys
from pathlib import Path
from mini_sglang import LLM, SamplingParams

def resident_kb():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

lengths = random.Random(0)
held = []
with LLM(sys.argv[1], device="cpu", dtype=sys.argv[2], num_threads=1, kv_cache_bytes=4 << 20) as llm:
    for number in range(350):
        if number in (100, 349):
            held.append(resident_kb())
        prompt = [lengths.randrange(3, 100) for _ in range(lengths.randrange(1, 1000))]
        llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0), progress=False)
print(json.dumps(held))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_of_ever_new_lengths_leave_nothing_behind(checkpoints: Checkpoints, dtype: str) -> None:
    path = checkpoints.write(max_position_embeddings=1024).path
    environment = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")}
    ran = subprocess.run(
        [sys.executable, "-c", PROMPTS_OF_RANDOM_LENGTHS, str(path), dtype],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    warm, at_the_end = json.loads(ran.stdout)
    assert at_the_end < 1.05 * warm
