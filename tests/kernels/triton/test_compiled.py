"""Kernels compile for a GPU in every dtype and variant: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PREAMBLE = """
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, types, fixed, *what):
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3})
    print(*what)
"""
EXPERTS = """
from mini_sglang.kernels.triton.experts import _grouped_matmul_kernel as kernel

for x, clamp, gated in itertools.product(("bf16", "fp16", "fp32"), (None, 7.0), (True, False)):
    fixed = dict(
        COLUMNS=32, DEPTH=64, TOP_K=2, GATED=gated, ALPHA=clamp and 1.7, LIMIT=clamp, SORTED=True, BLOCK_ROWS=16,
        BLOCK_COLUMNS=16, BLOCK_DEPTH=32, ROW_TILES=8, PDL=True,
    )
    if clamp is None:
        fixed["bias"] = None
    types = {"x": f"*{x}", "weight": f"tensordesc<{x}[16, 32]>", "bias": f"*{x}", "out": f"*{x}", "num_tiles": "i32"}
    compiled(kernel, {**types, "choices": "*i32", "tiles": "*i32"}, fixed, x, clamp, gated)
"""
QUANTIZED_EXPERTS = """
from mini_sglang.kernels.triton.quantized_experts import _grouped_weight_only_kernel as kernel

FORMATS = {"fp8e4nv": 8, "i8": 8, "u8": 4}
cases = itertools.product(("bf16", "fp16", "fp32"), FORMATS.items(), (False, True))
for x, (weight, bits), minimum in cases:  # with a minimum also with biases and a clamped gate
    fixed = dict(
        OUTPUTS=32, DEPTH=64, GROUP=32, BITS=bits, ZERO=0 if minimum or bits == 8 else 8, TOP_K=2, GATED=True,
        ALPHA=1.7 if minimum else None, LIMIT=7.0 if minimum else None, SORTED=True, ASM=x == "bf16", ROWS=16,
        COLUMNS=32, BLOCK_DEPTH=32, ROW_TILES=8, PDL=True,
    )
    if not minimum:
        fixed["minimum"] = fixed["bias"] = None
    types = {"x": f"*{x}", "weight": f"*{weight}", "scale": "*fp32", "minimum": "*fp32", "bias": f"*{x}"}
    types |= {"choices": "*i32", "tiles": "*i32", "out": f"*{x}", "num_tiles": "i32"}
    compiled(kernel, types, fixed, x, weight, minimum)
"""
ATTENTION = """
from mini_sglang.kernels.triton.paged_decode import _decode_kernel
from mini_sglang.kernels.triton.paged_prefill import _prefill_kernel

for sinks, window in itertools.product((True, False), (0, 24)):
    fixed = dict(
        KV_HEADS=2, GROUP=4, GROUP_PAD=4, TOKENS=1, HEAD_DIM=64, DIM_PAD=64, PAGE_SIZE=16, MAX_SPLITS=32, BLOCK=16,
        BLOCK_QUERIES=64, WINDOW=window, STAGES=2, FIELDS=8, PDL=True,
    )
    if not sinks:
        fixed["sinks"] = None
    types = dict.fromkeys(("q", "keys", "values", "out"), "*bf16") | dict.fromkeys(("page_table", "tiles"), "*i64")
    types |= dict.fromkeys(("items", "num_items", "splits_done", "starts", "counts", "q_starts"), "*i32")
    types |= dict.fromkeys(("partial", "partial_lse", "sinks"), "*fp32") | {"scale_log2": "fp32"}
    types |= dict.fromkeys(("q_stride", "table_stride", "last_item"), "i32")
    for kernel in (_decode_kernel, _prefill_kernel):
        own = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        compiled(kernel, types, own, sinks, window)
"""


@pytest.mark.parametrize(
    ("cases", "number"),
    [(EXPERTS, 12), (QUANTIZED_EXPERTS, 18), (ATTENTION, 8)],
    ids=["experts", "quantised experts", "attention"],
)
def test_kernels_compile_for_a_gpu(cases: str, number: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PREAMBLE + cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == number
