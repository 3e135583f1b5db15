"""Chats whose turns share what came before, and what a fleet of servers computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.tiny import RunningServer

CONVERSATIONS, TURNS = 20, 10
Message = dict[str, str]


@dataclass(frozen=True)
class Saved:
    """Prompt tokens of one run, over all servers: how many there were, and how many came from a cache."""

    prompt: int
    cached: int
    per_server: tuple[int, ...]  # requests that each of them ended

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


def run(url: str, servers: Sequence[RunningServer], *, at_once: int = 4, rotated: bool = False) -> Saved:
    """Hold all conversations at `url`, `at_once` requests at a time, turn by turn.

    With `rotated` who is first in a turn is last in the next one: else round robin would keep a conversation in place.

    Raises httpx.HTTPStatusError where a request fails.
    """
    before = [ended(server) for server in servers]
    conversations = [_opening(number) for number in range(CONVERSATIONS)]
    usages: list[dict[str, Any]] = []
    with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(at_once) as threads:
        for turn in range(TURNS):
            if rotated:
                conversations.append(conversations.pop(0))
            usages += threads.map(lambda messages, turn=turn: _take_turn(client, messages, turn), conversations)
    per_server = (ended(server) - count for server, count in zip(servers, before, strict=True))
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) for usage in usages)
    return Saved(sum(usage["prompt_tokens"] for usage in usages), cached, tuple(per_server))


def _opening(number: int) -> list[Message]:
    rules = " ".join(f"Rule {rule} of book {number}: be brief." for rule in range(12))
    return [{"role": "system", "content": f"You are assistant {number}. {rules}"}]


def _take_turn(client: httpx.Client, messages: list[Message], turn: int) -> dict[str, Any]:
    """Ask and append the answer; returns the usage."""
    messages.append({"role": "user", "content": f"Question {turn}: what comes next?"})
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    said = answer.json()
    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
    return dict(said["usage"])


def ended(server: RunningServer) -> int:
    """How many requests it has ended."""
    lines = server.get("/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("mini_sglang:request_success_total"))
