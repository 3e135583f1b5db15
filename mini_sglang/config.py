"""Every setting of the engine and of the server: flat, frozen, checked on construction.

Nothing reads the environment or the hardware here; `"auto"` values are resolved where the answer is known (the executor
for device, dtype and pool size), which returns a new config and leaves the caller's alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError, naming the field, when a value is out of range."""

    model: str = DEFAULT_MODEL  # built-in name, folder of safetensors, .gguf file, or hub id
    model_source: Literal["huggingface", "modelscope"] = "huggingface"
    revision: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights from the config alone
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "dense", "packed"] = "auto"  # packed: GGUF's 4-bit blocks as they are (CPU)
    seed: int = 0  # of dummy weights and of requests that bring no seed

    page_size: int = 16
    num_pages: int | None = None  # None: from kv_cache_bytes
    kv_cache_bytes: int = 1 << 30
    cache: Literal["radix", "naive"] = "radix"

    context_length: int | None = None  # None: the model's own
    max_running_requests: int = 64
    max_prefill_tokens: int = 512  # token budget of one step, decodes included
    schedule: Literal["fcfs", "lpm", "priority"] = "fcfs"
    run_ahead: int | None = None  # steps launched before the oldest is read; None: 0 on CPU, 1 on GPU

    attention_backend: str = "auto"
    num_threads: int | None = None  # of torch on CPU; None: every core this process may use

    def __post_init__(self) -> None:
        for name in ("page_size", "max_running_requests", "max_prefill_tokens", "kv_cache_bytes"):
            _at_least(name, getattr(self, name), 1)
        for name in ("num_pages", "context_length", "num_threads"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if self.run_ahead is not None:
            _at_least("run_ahead", self.run_ahead, 0)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def replace(self, **changes: object) -> EngineConfig:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server around one engine."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None  # None: the engine's model name
    api_key: str | None = None
    max_body_bytes: int = 16 << 20
    max_waiting_requests: int = 4096  # beyond it requests get 503
    shutdown_timeout_s: float = 8.0  # time running requests get to finish after SIGTERM

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("max_body_bytes", "max_waiting_requests"):
            _at_least(name, getattr(self, name), 1)


_CHOICES = {
    "model_source": ("huggingface", "modelscope"),
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "weights": ("auto", "dense", "packed"),
    "cache": ("radix", "naive"),
    "schedule": ("fcfs", "lpm", "priority"),
}


def _at_least(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
