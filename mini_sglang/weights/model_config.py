"""Reads a checkpoint's `ModelConfig`, whichever format it has.

It only chooses the reader: `gguf_config.py` and `hf_config.py` know the formats. Without torch.
"""

from __future__ import annotations

import dataclasses

from mini_sglang.model_config import ModelConfig
from mini_sglang.weights.gguf_config import config_from_gguf
from mini_sglang.weights.hf_config import config_from_hf, end_token_ids, read_json, read_quantization
from mini_sglang.weights.hub import ModelSource


def load_model_config(source: ModelSource) -> ModelConfig:
    """Read the model's sizes, switches and end tokens.

    Raises FileNotFoundError without config.json, and ValueError, naming it, for what is malformed or not supported.
    """
    try:
        if source.kind == "gguf":
            return config_from_gguf(source.gguf)
        config = config_from_hf(read_json(source.path / "config.json"))
        read_quantization(source.path)  # refuses what is not supported
        return dataclasses.replace(config, eos_token_ids=end_token_ids(source.path))
    except ValueError as error:
        raise ValueError(f"model {source.name!r}: {error}") from error
