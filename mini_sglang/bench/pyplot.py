"""Loads matplotlib, which is installed only where pictures are wanted (extra `bench`)."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """matplotlib's pyplot, without a screen. Raises ValueError that names the extra where it is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'mini-sglang[bench]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
