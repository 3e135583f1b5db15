"""Kernels are compiled side by side before the first step, and that they are is seen in who compiles them."""

# Pointers and scalars of a Triton kernel have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mini_sglang.kernels.triton.precompile import Precompile
from tests.gpu.conftest import run_on_gpu
from tests.tiny import TinyCheckpoint, generate_ids

pytestmark = pytest.mark.gpu


@triton.jit
def _add_kernel(x, number, AGAIN: tl.constexpr):  # noqa: ANN001, ANN202 (as above)
    tl.store(x, tl.load(x) + number + AGAIN)


@pytest.fixture
def compiling_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that compiled a kernel, or found one on disk, one for each kernel."""
    names: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **_: names.append(threading.current_thread().name))
    return names


def test_recorded_kernels_are_compiled_but_not_launched(compiling_threads: list[str]) -> None:
    x = torch.zeros(1, device="cuda")
    precompiled = Precompile()
    with precompiled.recording():
        for again in (0, 0, 1):
            _add_kernel[(1,)](x, 0.5, AGAIN=again)
    precompiled.wait()
    assert x.item() == 0
    assert len(compiling_threads) == 2
    for again in (0, 1):
        _add_kernel[(1,)](x, 0.5, AGAIN=again)
    assert x.item() == 2
    assert len(compiling_threads) == 2, "launches look elsewhere for what was compiled"


def test_other_threads_launch_while_one_records() -> None:
    x = torch.zeros(1, device="cuda")
    precompiled = Precompile()
    with precompiled.recording():
        other = threading.Thread(target=lambda: _add_kernel[(1,)](x, 0.5, AGAIN=2))
        other.start()
        other.join()
    precompiled.wait()
    assert x.item() == 2.5


def test_an_error_of_the_compiler_is_raised() -> None:
    @triton.jit
    def broken_kernel(x):  # noqa: ANN001, ANN202
        tl.store(x, tl.load(x, nonsense=1))

    precompiled = Precompile()
    with precompiled.recording():
        broken_kernel[(1,)](torch.zeros(1, device="cuda"))
    with pytest.raises(triton.CompilationError):
        precompiled.wait()


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}])
def test_an_engine_compiles_no_kernel_one_by_one(
    tiny_model: TinyCheckpoint, compiling_threads: list[str], settings: dict[str, Any]
) -> None:
    prompts = [[5 + index] * (3 + 7 * index) for index in range(16)]
    with run_on_gpu(
        tiny_model.path, page_size=8, dtype="bfloat16", **settings
    ) as engine:  # pages that no other test has
        generate_ids(engine, prompts, num_tokens=4)
    by_one = [name for name in compiling_threads if not name.startswith("compile")]
    assert compiling_threads
    assert not by_one, f"{len(by_one)} of {len(compiling_threads)} kernels"
