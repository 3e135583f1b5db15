"""Where no GPU is found, the Triton kernels run in Triton's interpreter.

The switch is read when triton is imported, and transformers (which tests/conftest.py needs) imports triton: hence here,
in the first file that pytest loads.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
