"""The plain run: a request alone in an engine that chunks, caches, shares and overlaps nothing. All cells equal it.

What it gives is not only trusted: `reference_answer` computes the same from transformers' logits and a few lines of
numpy, for whatever is greedy and follows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mini_sglang import Engine, EngineConfig, SamplingParams, TokenLogprobs
from tests import tiny
from tests.feature_matrix.requests import Answer, Ask, answer_of

PLAIN: Mapping[str, object] = {
    "cache": "naive",
    "max_running_requests": 1,
    "page_size": 16,
    "num_pages": 16,
    "run_ahead": 0,
    "schedule": "fcfs",
    "dtype": "float32",
    "num_threads": 1,
}
FAMILY = "mistral"  # of which a sliding window and experts (as `mixtral`) are variants
DRAFTER: Mapping[str, object] = {"rms_norm_eps": 0.005}  # enough to make a model another one, with the same weights

Settings = tuple[tuple[str, object], ...]  # names and values, sorted: equal for equal mappings


def as_settings(mapping: Mapping[str, object]) -> Settings:
    return tuple(sorted(mapping.items()))


def drafter_of(model: Settings) -> Settings:
    """What is special about a model that drafts for `model`, and is right about half of the time."""
    return as_settings({**dict(model), **DRAFTER})


class PlainRuns:
    """Tiny models on disk by what is special about them, a plain engine for each, and their answers, each made once."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._folder = folder
        self._checkpoints: dict[Settings, tiny.TinyCheckpoint] = {}
        self._engines: dict[tuple[Settings, Settings], Engine] = {}
        self._answers: dict[tuple[Settings, Settings, bytes], Answer] = {}
        self._open = ExitStack()

    def checkpoint(self, model: Settings) -> tiny.TinyCheckpoint:
        """`model` has the family, the kind of GGUF blocks, and fields of the config, where they are special."""
        if model not in self._checkpoints:
            config: dict[str, Any] = {"family": FAMILY, "sliding_window": None, **dict(model)}
            family, kind = config.pop("family"), config.pop("gguf", None)
            folder = self._folder / str(len(self._checkpoints))
            folder.mkdir()
            checkpoints = tiny.Checkpoints(folder, self.tokenizer)
            if kind is None:
                written = checkpoints.write(family, **config)
            else:
                written = checkpoints.write_gguf(family, kind=kind, **config)
            self._checkpoints[model] = written
        return self._checkpoints[model]

    def answer(self, model: Settings, numerics: Settings, ask: Ask) -> Answer:
        """Of the plain engine, which looks neither at salt and priority nor at stop strings; these are cut here."""
        key = model, numerics, msgspec.msgpack.encode((ask.prompt, ask.params))
        if key not in self._answers:
            self._answers[key] = self._with_text(ask.params, self._run(self._engine(model, numerics), ask))
        return self._answers[key]

    def close(self) -> None:
        self._open.close()

    def _engine(self, model: Settings, numerics: Settings) -> Engine:
        key = model, numerics
        if key not in self._engines:
            config = EngineConfig(model=str(self.checkpoint(model).path)).replace(**{**PLAIN, **dict(numerics)})
            self._engines[key] = Engine(config)
            self._open.callback(self._engines[key].close)
        return self._engines[key]

    def _run(self, engine: Engine, ask: Ask) -> Answer:
        [outputs] = tiny.run_all(engine, [list(ask.prompt)], [ask.params])
        return answer_of(outputs)

    def _with_text(self, params: SamplingParams, answer: Answer) -> Answer:
        """What a caller of `LLM` reads: up to the first stop string, without the stop token at the end."""
        for count in range(1, len(answer.token_ids) + 1):
            text = self.tokenizer.decode(answer.token_ids[:count], skip_special_tokens=True)
            if found := [text.index(stop) for stop in params.stop if stop in text]:
                logprobs = None if answer.logprobs is None else answer.logprobs[:count]
                return replace(
                    answer,
                    token_ids=answer.token_ids[:count],
                    finish_reason="stop",
                    logprobs=logprobs,
                    text=text[: min(found)],
                )
        ends = answer.token_ids[-1:] if answer.finish_reason == "stop" else []
        shown = answer.token_ids[:-1] if set(ends) & set(params.stop_token_ids) else answer.token_ids
        return replace(answer, text=self.tokenizer.decode(shown, skip_special_tokens=True))


def reference_answer(model: PreTrainedModel, ask: Ask, end_ids: frozenset[int]) -> Answer:
    """The greedy answer by transformers and numpy, without its text. No grammar and no stop string is looked at."""
    params, prompt = ask.params, list(ask.prompt)
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    reason = "length"
    while len(token_ids) < (params.max_tokens or 0):
        logits = _logits(model, prompt + token_ids)[-1]
        held_back = ends if len(token_ids) < params.min_tokens else frozenset[int]()
        token_ids.append(int(_changed(logits, params, prompt, token_ids, held_back).argmax()))
        logprobs.append(_entry(logits, token_ids[-1], params.logprobs or 0))
        if token_ids[-1] in ends:
            reason = "stop"
            break
    rows = zip(_logits(model, prompt), prompt[1:], strict=False)
    of_prompt = [_entry(logits, token, params.prompt_logprobs or 0) for logits, token in rows]
    return Answer(
        token_ids,
        reason,
        logprobs=None if params.logprobs is None else logprobs,
        prompt_logprobs=None if params.prompt_logprobs is None else of_prompt,
    )


def _logits(model: PreTrainedModel, token_ids: list[int]) -> npt.NDArray[np.float32]:
    """[len(token_ids), vocabulary]"""
    torch.set_num_threads(1)  # for models this small, waking a second thread takes longer than the work
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def _changed(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    prompt: list[int],
    answer: list[int],
    held_back: frozenset[int],
) -> npt.NDArray[np.float32]:
    """The logits that the next token is the largest of. [vocabulary] -> [vocabulary]"""
    changed = logits.copy()
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    for token in {*prompt, *answer}:
        factor = params.repetition_penalty
        changed[token] *= 1 / factor if changed[token] > 0 else factor
    for token in set(answer):
        changed[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    changed[list(held_back)] = -np.inf
    return changed


def _entry(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    shifted = logits.astype(np.float64) - logits.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    best = (-logprobs).argsort(kind="stable")[:count]
    return TokenLogprobs([token, *map(int, best)], [float(logprobs[token]), *(float(logprobs[i]) for i in best)])
