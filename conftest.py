"""Where no GPU is found, the Triton kernels run in Triton's interpreter and tests marked `gpu` are skipped.

The switch is read when triton is imported, and transformers (which tests/conftest.py needs) imports triton: hence here,
in the first file that pytest loads.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
