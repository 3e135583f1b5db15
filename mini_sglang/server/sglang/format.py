"""Writes engine outputs as SGLang's answers to /generate. Knows no engine and no HTTP.

In a stream `text` is all of the text so far, as SGLang's clients expect; token ids and log-probabilities are those that
are new, since repeating them would cost the square of the answer's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mini_sglang.outputs import FinishReason, RequestOutput, TokenLogprobs
from mini_sglang.sampling_params import Json
from mini_sglang.server.answering import AnswerFormat, event
from mini_sglang.server.generation import Job
from mini_sglang.server.openai.format import finite, token_text
from mini_sglang.server.sglang.bodies import SglangBody
from mini_sglang.text.tokenizer import Tokenizer


class SglangFormat(AnswerFormat):
    """The answer to one request. For a stream it keeps the text of each choice so far."""

    def __init__(self, job: Job, body: SglangBody, tokenizer: Tokenizer) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json | list[Json]:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return choices[0] if self._body.is_single else choices

    def delta(self, choice: int, output: RequestOutput) -> Iterator[bytes]:
        is_first = choice not in self._texts
        text = self._texts[choice] = self._texts.get(choice, "") + output.text_delta
        answer = self._choice(choice, output, text, output.new_token_ids)
        if self._body.return_logprob:
            answer["meta_info"] |= self._named("output", output.new_logprobs or [])
            if is_first:
                answer["meta_info"] |= self._prompt_logprobs(choice, output)
        yield event(answer if self._body.is_single else {"index": choice, **answer})

    def _whole_choice(self, index: int, output: RequestOutput) -> Json:
        answer = self._choice(index, output, output.text, output.token_ids)
        if self._body.return_logprob:
            answer["meta_info"] |= self._prompt_logprobs(index, output) | self._named("output", output.logprobs or [])
        return answer

    def _choice(self, index: int, output: RequestOutput, text: str, token_ids: list[int]) -> Json:
        return {
            "text": text,
            "output_ids": token_ids,
            "meta_info": {
                "id": self._job.request_id(index),
                "finish_reason": _finish_reason(output),
                "prompt_tokens": output.usage.prompt_tokens,
                "completion_tokens": output.usage.completion_tokens,
                "cached_tokens": output.usage.cached_tokens,
            },
        }

    def _prompt_logprobs(self, index: int, output: RequestOutput) -> Json:
        """The prompt's log-probabilities from `logprob_start_len` on. Its first token has none."""
        start = self._body.first_logprob
        if start is None or output.prompt_logprobs is None:
            return self._named("input", [])
        prompt = self._job.prompt_of(index)
        entries = [TokenLogprobs(prompt[:1], []), *output.prompt_logprobs]
        return self._named("input", entries[start:])

    def _named(self, side: str, entries: list[TokenLogprobs]) -> Json:
        rows = [self._triples(entry) for entry in entries]
        answer: Json = {f"{side}_token_logprobs": [row[0] for row in rows]}
        if self._body.top_logprobs_num:
            answer[f"{side}_top_logprobs"] = [row[1:] or None for row in rows]
        return answer

    def _triples(self, entry: TokenLogprobs) -> list[list[Any]]:
        """[log-probability, token id, text if it is asked for] of a token, then of its alternatives."""
        logprobs: list[float | None] = [finite(logprob) for logprob in entry.logprobs]
        return [
            [logprob, token_id, self._text(token_id)]
            for logprob, token_id in zip(logprobs or [None], entry.token_ids, strict=True)
        ]

    def _text(self, token_id: int) -> str | None:
        return token_text(self._tokenizer.token_bytes(token_id)) if self._body.return_text_in_logprobs else None


def _finish_reason(output: RequestOutput) -> Json | None:
    match output.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": output.usage.completion_tokens}
        case FinishReason.STOP:
            matched = output.stop_reason if output.stop_reason is not None else output.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case _:
            return {"type": "abort", "message": output.error or "the request was aborted"}
