"""Where the requests of a load come from: random tokens, recorded chats, recorded traffic.

Everything is a function of settings and seed; another seed of a run gives other tokens, or another choice of chats.
Lengths that are drawn follow the settings' seed, so that runs at two rates differ in their tokens alone. Knows nothing
of servers but whether they take messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mini_sglang.bench.apis import Message, Prompt
from mini_sglang.bench.load_generator import LoadRequest
from mini_sglang.bench.serving_config import MOST_REQUESTS, ServingConfig
from mini_sglang.bench.traces import TraceRow, read_trace

if TYPE_CHECKING:
    from mini_sglang.text.tokenizer import Tokenizer

Requests = Callable[[int], list[LoadRequest]]  # of a run's seed
_RANDOM_COUNT = 100
_RANDOM_OUTPUT = range(128, 129)
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


def open_dataset(config: ServingConfig) -> Requests:
    """Read the file, if there is one, once. The function returned makes the requests of a seed.

    Raises ValueError, or OSError, for a file that is not what `config.dataset` says.
    """
    if config.dataset == "random":
        return _random(config, _speller(config))
    path = Path(config.dataset_path or "")
    if config.dataset == "trace":
        return _traffic(config, read_trace(path), _speller(config))
    chats = list(_sharegpt(path) if config.dataset == "sharegpt" else _chat_lines(path))
    return _chats(config, chats, _load_tokenizer(config.tokenizer))


def _speller(config: ServingConfig) -> Callable[[list[int]], Prompt]:
    """How token ids are sent: as text where the API takes messages, else as they are."""
    return _load_tokenizer(config.tokenizer).decode if config.api == "chat" else lambda tokens: tokens


def _load_tokenizer(name: str) -> Tokenizer:
    from mini_sglang.text.tokenizer import load_tokenizer  # transformers: only where text is counted or spelled
    from mini_sglang.weights.hub import resolve_model

    return load_tokenizer(resolve_model(name, weights_needed=False))


def _random(config: ServingConfig, spell: Callable[[list[int]], Prompt]) -> Requests:
    """Prompts of random tokens, of which those of a group begin with the same `shared_prefix`."""
    lengths, outputs = config.input_range(), _capped(config.output_range() or _RANDOM_OUTPUT, config.max_output)
    vocab = config.vocab_range()
    if config.shared_prefix >= lengths.start:
        raise ValueError(f"shared_prefix must be below every input_length, got {config.shared_prefix} and {lengths[0]}")

    def draw(*seed: int, count: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(vocab.start, vocab.stop, count).tolist()
        return tokens

    def prompt(group: int, number: int, length: int, seed: int) -> Prompt:
        prefix = draw(seed, 0, group, count=config.shared_prefix)
        return spell(prefix + draw(seed, 1, number, count=length - config.shared_prefix))

    def requests(seed: int) -> list[LoadRequest]:
        rng = np.random.default_rng(config.seed)
        count = config.num_requests or (_RANDOM_COUNT if config.good is None else MOST_REQUESTS)
        groups = rng.integers(config.prefix_groups, size=count)
        ins, outs = rng.integers(lengths.start, lengths.stop, count), rng.integers(outputs.start, outputs.stop, count)
        return [
            LoadRequest(partial(prompt, int(groups[index]), index, int(ins[index]), seed), int(outs[index]))
            for index in range(count)
        ]

    return requests


def _capped(values: range, most: int | None) -> range:
    return values if most is None else range(min(values.start, most), min(values.stop, most + 1))


def _traffic(config: ServingConfig, rows: list[TraceRow], spell: Callable[[list[int]], Prompt]) -> Requests:
    """The first `num_requests` of a trace, with tokens made up from the hash ids."""
    vocab = config.vocab_range()
    output = config.output_range()
    rows = [
        row.scaled(config.scale_length).limited(config.max_input, config.max_output)
        for row in rows[: config.num_requests]
    ]
    indices = {row.chat_id: index for index, row in enumerate(rows) if row.chat_id is not None}

    def requests(seed: int) -> list[LoadRequest]:
        rng = np.random.default_rng(config.seed)

        def request(index: int, row: TraceRow) -> LoadRequest:
            parent = indices.get(row.parent_chat_id) if row.parent_chat_id is not None else None
            length = row.output_length if output is None else int(rng.integers(output.start, output.stop))
            return LoadRequest(
                lambda: spell(row.prompt(vocab, seed)),
                length,
                row.timestamp,
                parent if parent is not None and parent < index else None,
            )

        return [request(index, row) for index, row in enumerate(rows)]

    return requests


def _chats(config: ServingConfig, chats: list[list[Message]], tokenizer: Tokenizer) -> Requests:
    """A request for the first answer of each chat, or for every one. The seed decides which chats, and their order."""
    output = config.output_range()
    lengths: dict[str, int] = {}

    def length(text: str) -> int:
        if text not in lengths:
            lengths[text] = max(1, len(tokenizer.encode(text, add_special_tokens=False)))
        return lengths[text]

    def of_chat(chat: list[Message], rng: np.random.Generator) -> Iterator[LoadRequest]:
        answers = [index for index, message in enumerate(chat) if index and message["role"] == "assistant"]
        for index in answers if config.turns == "all" else answers[:1]:
            past = chat[:index]
            if config.max_input is None or sum(length(message["content"]) for message in past) <= config.max_input:
                wanted = length(chat[index]["content"]) if output is None else int(rng.integers(output[0], output.stop))
                yield LoadRequest(partial(list, past), min(wanted, config.max_output or wanted))

    def requests(seed: int) -> list[LoadRequest]:
        rng = np.random.default_rng(seed)
        found: list[LoadRequest] = []
        for index in rng.permutation(len(chats)):
            found += of_chat(chats[index], rng)
            if config.num_requests is not None and len(found) >= config.num_requests:
                return found[: config.num_requests]
        if not found or config.num_requests is not None:
            raise ValueError(
                f"{config.dataset_path} holds {len(found)} requests of at most {config.max_input or 'any number of'} "
                f"prompt tokens, {config.num_requests or 1} are needed"
            )
        return found

    return requests


def _sharegpt(path: Path) -> Iterator[list[Message]]:
    """A JSON array of objects with `conversations`: [{"from": "human" or "gpt", "value": text}]."""
    with path.open(encoding="utf-8") as file:
        try:
            records = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is no ShareGPT file: {error}") from None
    if not isinstance(records, list):
        raise ValueError(f"{path} is no ShareGPT file: it holds no array")
    for number, record in enumerate(records):
        yield _messages(f"{path}, entry {number}", record, "conversations")


def _chat_lines(path: Path) -> Iterator[list[Message]]:
    """A line of JSON per chat, with `conversation` (WildChat) or `messages`: [{"role": ..., "content": text}]."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number} is no chat: {error}") from None
                name = "messages" if isinstance(record, dict) and "messages" in record else "conversation"
                yield _messages(f"{path}:{number}", record, name)


def _messages(where: str, record: Any, name: str) -> list[Message]:
    """The messages of a record, those of unknown roles left out. Raises ValueError if there are none to read."""
    try:
        messages = [(message.get("role", message.get("from")), message) for message in record[name]]
        return [
            {"role": _ROLES[role], "content": str(message.get("content", message.get("value")) or "")}
            for role, message in messages
            if role in _ROLES
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} holds no {name}: {type(error).__name__} {error}") from None
