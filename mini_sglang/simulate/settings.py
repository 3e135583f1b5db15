"""What a simulated replica's scheduler reads of an engine's settings, and how many replicas there may be.

Imports nothing, since the command line reads it too.
"""

from __future__ import annotations

# The rest of an engine's settings shows in its times alone.
SETTINGS = (
    "page_size", "num_pages", "cache", "context_length", "max_running_requests", "max_prefill_tokens", "max_step_ms",
    "schedule", "run_ahead",
)  # fmt: skip
MOST_REPLICAS = 1000
