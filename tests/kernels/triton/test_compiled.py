"""Quantised experts compile for a GPU in every dtype: the interpreter takes what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys

COMPILE_ALL = """
import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mini_sglang.kernels.triton.quantized_experts import _grouped_weight_only_kernel as kernel

FORMATS = {"fp8e4nv": 8, "i8": 8, "u8": 4}
for x, (weight, bits), minimum in itertools.product(("bf16", "fp16", "fp32"), FORMATS.items(), (False, True)):
    fixed = dict(
        OUTPUTS=32, DEPTH=64, GROUP=32, BITS=bits, ZERO=0 if minimum or bits == 8 else 8, TOP_K=2, GATED=True,
        SORTED=True, ASM=x == "bf16", ROWS=16, COLUMNS=32, BLOCK_DEPTH=32, ROW_TILES=8, PDL=True,
    )
    if not minimum:
        fixed["minimum"] = None
    types = {
        "x": f"*{x}", "weight": f"*{weight}", "scale": "*fp32", "minimum": "*fp32", "choices": "*i32", "tiles": "*i32",
        "out": f"*{x}", "num_tiles": "i32",
    }
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2, "num_stages": 3})
    print(x, weight, minimum)
"""


def test_quantised_experts_compile_for_a_gpu_in_every_dtype() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE_ALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) == 18
