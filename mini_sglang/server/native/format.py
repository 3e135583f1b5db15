"""Writes engine outputs as answers of the server's own /generate: text, tokens and log-probabilities side by side.

Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mini_sglang.outputs import RequestOutput, TokenLogprobs
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import AnswerFormat, event
from mini_sglang.server.openai.format import finite, usage_json


class GenerateFormat(AnswerFormat):
    """One answer of one choice. In a stream, each event has the new `text` and `token_ids`."""

    def __init__(self, job_id: str) -> None:
        self._id = job_id

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        [output] = outputs
        return self._answer(output, output.text, output.token_ids, output.logprobs)

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        yield event(self._answer(output, output.text_delta, output.new_token_ids, output.new_logprobs))

    def _answer(
        self, output: RequestOutput, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> Json:
        answer = {
            "id": self._id,
            "text": text,
            "token_ids": token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "usage": usage_json(output.usage),
        }
        return answer if logprobs is None else {**answer, "logprobs": _logprobs(logprobs)}


def _logprobs(entries: list[TokenLogprobs]) -> list[Json]:
    """One entry for each token: its log-probability and the best alternatives."""
    answer = []
    for entry in entries:
        pairs = [{"token_id": i, "logprob": finite(p)} for i, p in zip(entry.token_ids, entry.logprobs, strict=True)]
        answer.append({**pairs[0], "top_logprobs": pairs[1:]})
    return answer
