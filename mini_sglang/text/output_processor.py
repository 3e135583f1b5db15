"""From an engine's tokens to what a caller sees: text, stop strings, log-probabilities, usage. One per request.

`LLM` and `AsyncEngine` both fold each `TokenOutput` of a request in here. The processor knows text and tokens; it does
not know the engine: when a stop string ends a request, the caller tells the engine so.
"""

from __future__ import annotations

import time

from mini_sglang.errors import FieldError
from mini_sglang.outputs import FinishReason, GeneratedTokens, RequestOutput, TokenOutput, Usage
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.detokenizer import IncrementalDetokenizer, StopChecker
from mini_sglang.text.tokenizer import Tokenizer


class OutputProcessor:
    """Builds the `RequestOutput`s of one request. A push costs O(new tokens), however long the text is."""

    def __init__(self, tokenizer: Tokenizer, request_id: str, prompt_tokens: int, params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.params = params
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: str | None = None
        self._field_error: FieldError | None = None
        self._num_cached_tokens = 0
        self._queued_s: float | None = None
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, shown_ids=params.shown_special_ids
        )
        self._stop = StopChecker(params.stop, include=params.include_stop_str_in_output)
        self._generated = GeneratedTokens(logprobs=None if params.logprobs is None else [])

    def push(self, output: TokenOutput) -> RequestOutput:
        """Fold one engine output in; returns the request's new state.

        If the result is `finished` although `output` is not, a stop string ended the request: abort it in the engine
        with reason STOP. Tokens after the one that completed the stop string do not count, and whatever is pushed
        after the end changes nothing.
        """
        if self.finish_reason is not None:
            return self._snapshot("", 0)
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.queued_s is not None:
            self._queued_s = output.queued_s
        if output.prompt_logprobs is not None:
            self._generated.prompt_logprobs = output.prompt_logprobs
        num_before = len(self._generated.token_ids)
        text = self._add_tokens(output)
        if output.finish_reason is not None and self._stop.matched is None:
            text += self._stop.push(self._detokenizer.flush())
            text += self._stop.flush()
        self._note_end(output)
        self._generated.text_pieces.append(text)
        self._generated.num_tokens_at_piece.append(len(self._generated.token_ids))
        return self._snapshot(text, len(self._generated.token_ids) - num_before)

    def _add_tokens(self, output: TokenOutput) -> str:
        """Take tokens up to the end of a stop string; returns the text that they made visible."""
        pieces, now = [], time.perf_counter()
        for index, token_id in enumerate(output.token_ids):
            self._generated.token_ids.append(token_id)
            self._generated.token_times.append(now)
            if self._generated.logprobs is not None and output.logprobs is not None:
                self._generated.logprobs.append(output.logprobs[index])
            if not self._is_silent_end(output, index):
                pieces.append(self._stop.push(self._detokenizer.push(token_id)))
            if self._stop.matched is not None:
                break
        return "".join(pieces)

    def _is_silent_end(self, output: TokenOutput, index: int) -> bool:
        """Whether this token is one of the caller's stop tokens, which is cut from the text like a stop string.

        The model's own end tokens need no such care: they are special, and `skip_special_tokens` rules them.
        """
        return (
            index == len(output.token_ids) - 1
            and output.stop_token_id in self.params.stop_token_ids
            and not self.params.include_stop_str_in_output
        )

    def _note_end(self, output: TokenOutput) -> None:
        if self._stop.matched is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._stop.matched
            return
        self.finish_reason, self._error = output.finish_reason, output.error
        if output.error_field is not None:
            self._field_error = FieldError(output.error_field, output.error or "")
            self._error = str(self._field_error)
        if output.stop_token_id in self.params.stop_token_ids:
            self._stop_reason = output.stop_token_id

    def _snapshot(self, text_delta: str, num_new_tokens: int) -> RequestOutput:
        usage = Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self._generated.token_ids),
            cached_tokens=self._num_cached_tokens,
        )
        return RequestOutput(
            request_id=self.request_id,
            usage=usage,
            text_delta=text_delta,
            num_new_tokens=num_new_tokens,
            finish_reason=self.finish_reason,
            queued_s=self._queued_s,
            stop_reason=self._stop_reason,
            error=self._error,
            field_error=self._field_error,
            generated=self._generated,
            num_text_pieces=len(self._generated.text_pieces),
        )
