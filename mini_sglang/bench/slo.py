"""What makes a request good: limits on its own latencies, as `--slo ttft=500,itl_p99=50` says them.

The one definition for goodput, for the search for the highest rate, and for every script. Knows no load and no
figures; imports nothing heavy, since the command line reads limits with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mini_sglang.bench.load_generator import Outcome

METRICS = ("ttft", "itl_p99", "itl_max", "tpot", "e2e")  # of one request; attributes of an Outcome, in seconds there
SPELLINGS = {"itl": "itl_p99", "e2el": "e2e"}  # the second is vLLM's and SGLang's
_EXAMPLE = "ttft=500,itl_p99=50"


def read_limits(text: str) -> dict[str, float]:
    """The limits in ms, by metric. Raises ValueError that says what is wrong and how to write it."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        written, _, number = part.strip().partition("=")
        try:
            limit = float(number.removesuffix("ms"))
        except ValueError:
            raise ValueError(f"slo must be like {_EXAMPLE}, got {text!r}") from None
        name = SPELLINGS.get(written, written)
        if name not in METRICS:
            raise ValueError(f"slo knows {', '.join(METRICS[:-1])} and {METRICS[-1]}, got {written!r}")
        if name in limits:
            raise ValueError(f"slo must limit {name} once, got {text!r}")
        if not 0 < limit < math.inf:
            raise ValueError(f"slo must limit {name} to a number of ms above 0, got {number!r}")
        limits[name] = limit
    return limits


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded and kept every limit, in ms by metric in any spelling.

    A latency that it does not have, as an answer of one token has none between tokens, keeps any limit.
    """
    if outcome.error is not None:
        return False
    return all((getattr(outcome, SPELLINGS.get(name, name)) or 0.0) * 1e3 <= limit for name, limit in limits.items())
