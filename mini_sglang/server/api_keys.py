"""The API keys that are not on the command line, where every user of the machine sees them: in a file, or in the
environment. Knows nothing of requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mini_sglang.config import ServerConfig

VARIABLE = "MINI_SGLANG_API_KEY"


def with_all_keys(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """The settings with all keys in `api_key`. In the file and in the variable, white space separates keys.

    Raises ValueError if either is there and holds none, which must not open the server; OSError or ValueError if the
    file cannot be read.
    """
    keys = list(config.api_key)
    if config.api_key_file is not None:
        keys += _keys_in(f"api_key_file {config.api_key_file}", Path(config.api_key_file).read_text(encoding="utf-8"))
    if VARIABLE in environment:
        keys += _keys_in(f"the environment's {VARIABLE}", environment[VARIABLE])
    return dataclasses.replace(config, api_key=tuple(keys))


def _keys_in(place: str, text: str) -> list[str]:
    if not (keys := text.split()):
        raise ValueError(f"{place} must hold an API key, got none; leave it out to serve without keys")
    return keys
