"""The metadata of a GGUF file for a published tokenizer, as llama.cpp's converter writes them.

So the published tokenizer of another format holds the GGUF reader to its tokens. Knows no test.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from mini_sglang.text.tokenizer import _BYTE_OF_CHARACTER

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # gguf's token types
_CHARACTER_OF_BYTE = {byte[0]: character for character, byte in _BYTE_OF_CHARACTER.items()}


def of_tokenizer_json(document: Mapping[str, Any], model: str, pre: str) -> dict[str, Any]:
    """Of a byte-pair encoder in tokenizer.json's format. `model`, `pre`: values of tokenizer.ggml.model and .pre."""
    added = {token["id"]: token for token in document["added_tokens"]}
    tokens = {token_id: token for token, token_id in document["model"]["vocab"].items()}
    tokens |= {token_id: token["content"] for token_id, token in added.items()}
    listed = [tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(max(tokens) + 1)]
    kinds = [_NORMAL] * len(listed)
    for token_id, token in added.items():
        kinds[token_id] = _CONTROL if token["special"] else _USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in document["model"]["merges"]]
    unknown = document["model"].get("unk_token")
    return {
        **_metadata(listed, kinds, merges, model, pre),
        **({"tokenizer.ggml.unknown_token_id": listed.index(unknown)} if unknown else {}),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }


def of_tekken(document: Mapping[str, Any], special: Sequence[str]) -> dict[str, Any]:
    """Of a Mistral tekken.json. `special`: the first of its special tokens: unknown, begin, end, …"""
    num_special = document["config"]["default_num_special_tokens"]
    entries = document["vocab"][: document["config"]["default_vocab_size"] - num_special]
    pieces = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    listed = [*special, *(f"<SPECIAL_{i}>" for i in range(len(special), num_special)), *map(_spell, pieces)]
    rank = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:  # in the order of their ranks: all pairs that make a piece up
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in pairs if left in rank and right in rank]
        known.sort(key=lambda pair: (rank[pair[0]], rank[pair[1]]))
        merges += [f"{_spell(left)} {_spell(right)}" for left, right in known]
    return {
        **_metadata(listed, [_CONTROL] * num_special + [_NORMAL] * len(pieces), merges, "gpt2", "tekken"),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _metadata(tokens: list[str], kinds: list[int], merges: list[str], model: str, pre: str) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }


def _spell(piece: bytes) -> str:
    """The bytes in GPT-2's alphabet."""
    return "".join(_CHARACTER_OF_BYTE[byte] for byte in piece)
