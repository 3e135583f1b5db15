"""Where no GPU is found, the Triton kernels run in Triton's interpreter and tests marked `gpu` are left out.

The switch is read when triton is imported, and transformers (which tests/conftest.py needs) imports triton: hence here,
in the first file that pytest loads.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
