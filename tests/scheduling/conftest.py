"""How many random operations the stateful tests of this folder run.

`MINI_SGLANG_OPERATIONS=20000 python -m pytest tests/scheduling` runs that many on each of the five machines: 100,000.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

STEPS = 50


@pytest.fixture
def stateful() -> settings:
    operations = int(os.environ.get("MINI_SGLANG_OPERATIONS", "4000"))
    return settings(
        max_examples=max(operations // STEPS, 1),
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
