"""A server with `--speculative` tells in its metrics what was drafted and accepted, by the field's names."""

from __future__ import annotations

import re

import httpx

from tests.server.conftest import StartServer
from tests.tiny import Checkpoints


def test_a_server_counts_what_it_drafts(start_server: StartServer, checkpoints: Checkpoints) -> None:
    model = ("--model", str(checkpoints.write().path), "--dtype", "float32")
    server = start_server(*model, "--speculative", "ngram", "--no-speculative-gate")
    body = {"prompt": [7, 8, 9, 10, 11] * 6, "max_tokens": 30, "logit_bias": {"5": 100}, "ignore_eos": True}
    choice = server.post("/v1/completions", **body).json()
    assert choice["usage"]["completion_tokens"] == 30
    text = httpx.get(server.url + "/metrics").text
    found = dict(re.findall(r"mini_sglang:spec_decode_(\w+)_total\{model_name=\"[^\"]*\"\} (\S+)", text))
    accepted, drafted = float(found["num_accepted_tokens"]), float(found["num_draft_tokens"])
    assert 0 < accepted <= drafted
    by_place = re.findall(
        r"mini_sglang:spec_decode_num_accepted_tokens_per_pos_total\{.*position=\"\d+\".*\} (\S+)", text
    )
    assert sum(map(float, by_place)) == accepted
