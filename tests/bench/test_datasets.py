"""Data sets of every kind become requests: lengths, shared beginnings, seeds, limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mini_sglang.bench.datasets import open_dataset
from mini_sglang.bench.load_generator import LoadRequest
from mini_sglang.bench.serving_config import ServingConfig
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.hub import resolve_model
from tests.tiny import Checkpoints

CHAT = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue is a fine colour."},
    {"role": "user", "content": "Another."},
    {"role": "assistant", "content": "Green."},
]


def load(seed: int = 0, **fields: Any) -> list[LoadRequest]:
    return open_dataset(ServingConfig(rate=1, **fields))(seed)


def prompts(requests: list[LoadRequest]) -> list[Any]:
    return [request.make_prompt() for request in requests]


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> str:
    """A tiny one, whose tokenizer loads fast."""
    return str(checkpoints.write().path)


@pytest.fixture
def tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(resolve_model(model))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """`write(*records)` → a file of JSON lines; `write(array)` → of one JSON array."""

    def write(*records: Any) -> str:
        path = tmp_path / "data"
        path.write_text("\n".join(json.dumps(record) for record in records))
        return str(path)

    return write


def test_random_prompts_have_the_lengths_and_ids_asked_for() -> None:
    requests = load(input_length="5:9", output_length="2:3", vocab="7:9", num_requests=50)
    lengths = [len(prompt) for prompt in prompts(requests)]
    assert set(lengths) == {5, 6, 7, 8, 9}
    assert {request.output_length for request in requests} == {2, 3}
    assert {token for prompt in prompts(requests) for token in prompt} == {7, 8, 9}


def test_the_same_seed_gives_the_same_requests_and_another_none_of_them() -> None:
    one, same, other = (prompts(load(seed, num_requests=5, input_length="20")) for seed in (1, 1, 2))
    assert one == same
    assert not [prompt for prompt in other if prompt[0] == one[0][0] and prompt in one]
    assert [prompt.make_prompt() for prompt in load(1, num_requests=5, input_length="20")] == one


def test_a_group_shares_its_prefix_and_nothing_more() -> None:
    found = prompts(load(input_length="20:30", shared_prefix=16, prefix_groups=3, num_requests=40))
    prefixes = {tuple(prompt[:16]) for prompt in found}
    assert len(prefixes) == 3
    assert len({tuple(prompt[16:20]) for prompt in found}) == 40


def test_outputs_are_cut_to_the_most_that_is_wanted() -> None:
    assert {request.output_length for request in load(output_length="5:50", max_output=7)} <= {5, 6, 7}


def test_random_tokens_are_spelled_for_a_chat(tokenizer: Tokenizer, model: str) -> None:
    fields: dict[str, Any] = {"input_length": "12", "vocab": "100:300", "num_requests": 1, "tokenizer": model}
    [tokens], [text] = (prompts(load(api=api, **fields)) for api in ("generate", "chat"))
    assert text == tokenizer.decode(tokens)


@pytest.mark.parametrize("form", ["sharegpt", "chat"])
def test_a_chat_is_asked_for_its_first_answer_or_for_all(
    form: Any, write: Any, tokenizer: Tokenizer, model: str
) -> None:
    if form == "sharegpt":
        names = {"user": "human", "assistant": "gpt"}
        turns = [{"from": names[message["role"]], "value": message["content"]} for message in CHAT]
        path = write([{"id": "a", "conversations": turns}])
    else:
        path = write({"conversation": [{**message, "toxic": False} for message in CHAT]})
    [first] = load(dataset=form, dataset_path=path, tokenizer=model)
    assert first.make_prompt() == CHAT[:1]
    assert first.output_length == len(tokenizer.encode("Blue is a fine colour."))
    both = load(dataset=form, dataset_path=path, tokenizer=model, turns="all")
    assert prompts(both) == [CHAT[:1], CHAT[:3]]


def test_chats_too_long_are_left_out_and_the_seed_chooses_among_the_others(write: Any, model: str) -> None:
    def chat(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]}

    path = write(chat("word " * 50), *(chat(f"Is {number} a number?") for number in range(20)))
    fields: dict[str, Any] = {"dataset": "chat", "dataset_path": path, "max_input": 40, "tokenizer": model}
    assert len(load(**fields)) == 20
    assert len({str(prompts(load(seed, num_requests=3, **fields))) for seed in range(4)}) == 4
    with pytest.raises(ValueError, match="holds 20 requests of at most 40 prompt tokens, 30 are needed"):
        load(num_requests=30, **fields)


def test_a_trace_keeps_times_and_shared_blocks_and_knows_whose_turn_follows_whose(write: Any) -> None:
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 10.0, "input_length": 32, "output_length": 8,
           "turn": 1, "hash_ids": [3, 4]}  # fmt: skip
    path = write(row, {**row, "chat_id": 2, "parent_chat_id": 1, "timestamp": 14.0, "hash_ids": [3, 5]})
    first, second = load(dataset="trace", dataset_path=path, scale_length=0.5)
    assert (first.timestamp, second.timestamp) == (0.0, 4.0)
    assert (first.after, second.after) == (None, 0)
    assert (first.output_length, second.output_length) == (4, 4)
    one, other = prompts([first, second])
    assert len(one) == len(other) == 16
    assert one[:8] == other[:8]
    assert one[8:] != other[8:]
    [only] = load(dataset="trace", dataset_path=path, max_input=20, max_output=3, num_requests=1)
    assert (len(prompts([only])[0]), only.output_length) == (20, 3)


@pytest.mark.parametrize(
    ("dataset", "content", "message"),
    [
        ("sharegpt", "{}", "no ShareGPT file: it holds no array"),
        ("sharegpt", "[", "no ShareGPT file"),
        ("sharegpt", '[{"text": 1}]', r"entry 0 holds no conversations: KeyError"),
        ("chat", "[]\n{", "data:1 holds no conversation"),
        ("chat", "{", "data:1 is no chat"),
        ("chat", '{"messages": [{"role": "user", "content": "alone"}]}', "holds 0 requests"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    dataset: Any, content: str, message: str, tmp_path: Path, model: str
) -> None:
    (tmp_path / "data").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(dataset=dataset, dataset_path=str(tmp_path / "data"), tokenizer=model)


def test_runs_differ_in_their_tokens_alone() -> None:
    fields = {"input_length": "5:90", "output_length": "2:30", "num_requests": 20}
    first, second = load(0, **fields), load(1, **fields)
    assert [request.output_length for request in first] == [request.output_length for request in second]
    assert [len(prompt) for prompt in prompts(first)] == [len(prompt) for prompt in prompts(second)]
    assert all(one != other for one, other in zip(prompts(first), prompts(second), strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of --rate, --concurrency, --replay and --sweep is needed, got none"),
        ({"rate": 1, "concurrency": 2}, "got rate and concurrency"),
        ({"rate": 0}, "rates must be above 0 requests/s, got 0"),
        ({"sweep": "1,x"}, "sweep must be rates like 1,2,4, got '1,x'"),
        ({"sweep": "1,-1"}, "rates must be above 0"),
        ({"rate": 1, "dataset": "chat"}, "dataset chat needs --dataset-path"),
        ({"replay": True}, "replay and scale_length need --dataset trace, got random"),
        ({"rate": 1, "slo": "ttft"}, "slo must be like ttft=500,itl_p99=50, got 'ttft'"),
        ({"rate": 1, "slo": ""}, "slo must be like ttft=500,itl_p99=50, got ''"),
        ({"rate": 1, "slo": "ttft:500"}, "slo must be like ttft=500,itl_p99=50, got 'ttft:500'"),
        ({"rate": 1, "slo": "joy=1"}, "slo knows ttft, itl_p99, itl_max, tpot and e2e, got 'joy'"),
        ({"rate": 1, "slo": "ttft=500,itl=50,ttft=9"}, "slo must limit ttft once, got 'ttft=500,itl=50,ttft=9'"),
        ({"rate": 1, "slo": "itl=50,itl_p99=60"}, "slo must limit itl_p99 once"),
        ({"rate": 1, "slo": "tpot=0"}, "slo must limit tpot to a number of ms above 0, got '0'"),
        ({"rate": 1, "slo": "e2e=nan"}, "slo must limit e2e to a number of ms above 0, got 'nan'"),
        ({"rate": 1, "slo": "e2e=inf"}, "slo must limit e2e to a number of ms above 0, got 'inf'"),
        ({"sweep": "auto"}, "sweep needs rates like --sweep 1,2,4, or a search like --sweep --slo ttft=500,itl_p99=50"),
        ({"sweep": "auto", "slo": "ttft=5"}, "sweep needs rates like --sweep 1,2,4, or a search like"),
        ({"sweep": "1,2", "good": 0.95}, "good needs --sweep, .* and --slo, which says what is good, like --slo ttft"),
        ({"rate": 1, "slo": "ttft=5", "good": 0.95}, "good needs --sweep, which looks for the highest rate"),
        (
            {"sweep": "1,2", "slo": "ttft=5", "good": 95},
            "good must be a share above 0 and at most 1, like 0.95, got 95",
        ),
        ({"sweep": "1,2", "slo": "ttft=5", "good": 0}, "good must be a share above 0 and at most 1, like 0.95, got 0"),
        (
            {"sweep": "1,2,2", "slo": "ttft=5", "good": 0.9},
            "good needs rates that are finite and different, got '1,2,2'",
        ),
        (
            {"sweep": "1,inf", "slo": "ttft=5", "good": 0.9},
            "good needs rates that are finite and different, got '1,inf'",
        ),
        ({"rate": 1, "input_length": "9:5"}, "input_length must rise and start at 1 or more, got '9:5'"),
        ({"rate": 1, "output_length": "few"}, "output_length must be a number or LOW:HIGH, got 'few'"),
        ({"rate": 1, "extra_body": "[1]"}, "extra_body must be a JSON object"),
        ({"rate": 1, "header": ("nonsense",)}, "header must be like 'NAME: VALUE'"),
        ({"rate": 1, "header": ("a: b\r\nc: d",)}, "header must be like 'NAME: VALUE'"),
        ({"rate": 1, "repeats": 0}, "repeats must be at least 1, got 0"),
        ({"rate": 1, "speed": float("nan")}, "speed must be above 0, got nan"),
    ],
)
def test_settings_that_make_no_load_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServingConfig(**fields)


def test_a_prefix_as_long_as_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="shared_prefix must be below every input_length, got 5 and 5"):
        load(shared_prefix=5, input_length="5:9")
