"""The table of limits in docs/security.md tells the limits that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from mini_sglang import sampling_params
from mini_sglang.grammar import checker
from mini_sglang.server import errors, fields, generation, intake
from mini_sglang.server.config import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
}


def numbers(what: str, column: int = 0) -> list[float]:
    """The numbers in a row, in bytes where it has a unit of them."""
    units = {" KiB": 1 << 10, " MiB": 1 << 20}
    found = re.findall(r"(\d[\d,]*(?:\.\d+)?)( [KM]iB)?", ROWS[what][column])
    return [float(number.replace(",", "")) * units.get(unit, 1) for number, unit in found]


def test_the_options_have_these_defaults() -> None:
    config = ServerConfig()
    for what, (_, option, _) in ROWS.items():
        name = option.strip("`-").replace("-", "_")
        if hasattr(config, name):
            assert numbers(what)[0] == getattr(config, name), what
    assert sum("--" in option for _, option, _ in ROWS.values()) >= 6


def test_the_other_limits_are_these() -> None:
    assert numbers("request line and headers") == [intake.MAX_HEAD_BYTES]
    assert numbers("seconds until the body is whole")[2] == intake.MIN_BODY_BYTES_PER_S
    assert numbers("connections") == [intake.MAX_CONNECTIONS, intake.RESERVED_DESCRIPTORS]
    linger = numbers("body, also after decompression", column=2)
    assert linger == [413, intake.LINGER_BYTES, intake.LINGER_S]
    assert numbers("choices of one request") == [fields.MAX_CHOICES, generation.MAX_CHOICES_PER_REQUEST]
    assert numbers("messages, tools") == [fields.MAX_MESSAGES, fields.MAX_TOOLS, fields.MAX_CHAT_TOOLS]
    assert numbers("stop strings, token biases, alternatives per token") == [
        sampling_params.MAX_STOP_STRINGS,
        sampling_params.MAX_LOGIT_BIASES,
        sampling_params.MAX_LOGPROBS,
    ]
    assert numbers("a schema, grammar or regular expression") == [
        sampling_params.MAX_GRAMMAR_LENGTH,
        checker.LIMIT_S,
        checker._MEMORY,
    ]
    assert numbers("`chat_template_kwargs`") == [fields.MAX_TEMPLATE_BYTES]
    assert numbers("a client's part of an error message") == [errors.MAX_MESSAGE_LENGTH]
