"""mini_sglang: an LLM inference and serving engine to read, change and run.

    from mini_sglang import LLM, SamplingParams

Public names only, each imported when it is first used, so that a light command never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mini_sglang.collector import no_collections

if TYPE_CHECKING:
    from mini_sglang.config import EngineConfig
    from mini_sglang.engine import Engine
    from mini_sglang.llm import LLM
    from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs, Usage
    from mini_sglang.sampling_params import SamplingParams
    from mini_sglang.server.config import ServerConfig
    from mini_sglang.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "RequestOutput",
    "SamplingParams",
    "ServerConfig",
    "TokenLogprobs",
    "Tokenizer",
    "Usage",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    "Engine": "engine",
    "EngineConfig": "config",
    "FinishReason": "outputs",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling_params",
    "ServerConfig": "server.config",
    "TokenLogprobs": "outputs",
    "Tokenizer": "text.tokenizer",
    "Usage": "outputs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with no_collections():
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
