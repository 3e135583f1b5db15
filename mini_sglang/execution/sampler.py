"""From logits to tokens, for all rows at once and each row as if it were alone: the definition, in PyTorch.

It runs on a CPU. On a GPU `device_sampler.py` draws the same tokens, and comes here only for rows that no kernel draws.

Order per row: logit bias and allowed tokens, the grammar's mask, penalties, ends held back by `min_tokens`,
temperature, top-k, top-p, min-p, draw. Of equal logits the smaller token id counts as the more likely, so what a
filter keeps depends on the row alone. The draw is a race (Gumbel-max): each token's noise is a hash of (seed,
position, token), so a request samples the same tokens in any batch, chunked, cached or resumed. Inverting the
cumulative distribution would cost less, but there the rounding of one logit moves the borders of all tokens behind it;
in a race it matters only where two tokens finish side by side.
Greedy rows take the argmax. Log-probabilities are of the model's distribution, before any of this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from mini_sglang.execution.request_table import RequestTable
from mini_sglang.kernels.noise import exponential_noise, row_keys
from mini_sglang.outputs import TokenLogprobs
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.batch import Row, ScheduledBatch

_FIRST_CANDIDATES = 256  # enough for nearly every top-p; wider distributions take a second look at everything


@dataclass(frozen=True)
class Sampled:
    """What a step sampled, one entry per sampling row. The tokens may still be on their way on the device."""

    token_ids: torch.Tensor  # [S] int64
    logprobs: list[TokenLogprobs | None]  # the host has waited for these, if a row asks for them
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of the rows that ask, by slot
    on_host: memoryview[int] | None = None  # [S], where the step leaves token_ids by itself
    drafts: dict[int, list[int]] = field(default_factory=dict)  # what a model drafted for the step, by slot


NOTHING_SAMPLED = Sampled(torch.empty(0, dtype=torch.int64), [])


class TorchSampler:
    """Samples in PyTorch, on any device, as the requests in `table` ask."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._masks: dict[tuple[int, int], bytes] = {}  # for what is drawn under a grammar, by slot and position

    def take(self, batch: ScheduledBatch) -> None:
        """Take in what the step's rows under a grammar may draw."""
        self._masks = {
            (row.slot, position): mask
            for row in (batch.rows if batch.masks else ())
            for position, mask in enumerate(batch.masks.get(row.slot, ()), row.start + row.count + 1 - row.samples)
        }

    def sample(self, rows: list[Row], logits: torch.Tensor) -> Sampled:
        """Draw one token per row and look up the log-probabilities that are asked for. logits [len(rows), vocab]"""
        token_ids = self.draw(rows, logits)
        return Sampled(token_ids, self.logprobs(rows, logits, token_ids))

    def draw(self, rows: list[Row], logits: torch.Tensor) -> torch.Tensor:
        """Draw one token per row and append it in the table -> [len(rows)] int64"""
        token_ids = sample(logits, self.sampling(rows))
        self._table.append(rows, token_ids)
        return token_ids

    def logprobs(self, rows: list[Row], logits: torch.Tensor, token_ids: torch.Tensor) -> list[TokenLogprobs | None]:
        """Log-probabilities of the sampled and the best tokens, for the rows that ask."""
        return token_logprobs(logits, token_ids, [self._table.request(row.slot).params for row in rows])

    def sampling(self, rows: list[Row]) -> SamplingBatch:
        """How to sample `rows` (all of them sample), each at position start + count."""
        requests, ends = [self._table.request(row.slot) for row in rows], [row.start + row.count for row in rows]
        held_back = {
            index: request.end_token_ids
            for index, request in enumerate(requests)
            if ends[index] - request.num_prompt_tokens < request.params.min_tokens
        }
        return SamplingBatch(
            params=[request.params for request in requests],
            seeds=[request.seed for request in requests],
            positions=ends,
            prompt_lengths=[request.num_prompt_tokens for request in requests],
            history=lambda index: self._table.tokens[rows[index].slot, : ends[index]],
            masks={i: self._mask(rows[i].slot, ends[i]) for i, r in enumerate(requests) if r.params.is_constrained},
            held_back=held_back,
        )

    def _mask(self, slot: int, position: int) -> bytes:
        mask = self._masks.get((slot, position))
        if mask is None:
            raise ValueError(f"slot {slot} samples token {position} under a grammar but the step has no mask for it")
        return mask


@dataclass(frozen=True)
class SamplingBatch:
    """R rows to sample, one entry each."""

    params: list[SamplingParams]
    seeds: list[int]
    positions: list[int]  # of the token to be drawn
    prompt_lengths: list[int]
    history: Callable[[int], torch.Tensor]  # row -> its tokens so far [length] int32, prompt first
    held_back: dict[int, list[int]] = field(default_factory=dict)  # row -> tokens that may not be drawn yet
    masks: dict[int, bytes] = field(default_factory=dict)  # row -> what may be drawn: one bit per token, lowest first


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token per row. logits [R, vocab], any float dtype, left unchanged -> token ids [R] int64"""
    if not any(_changes_logits(params) for params in batch.params):
        if all(params.temperature == 0 for params in batch.params):
            return logits.float().argmax(-1)  # several times faster than in bfloat16, the conversion included
        logits = logits.float()
    else:
        logits = logits.to(torch.float32, copy=True)
        for row, params in enumerate(batch.params):
            if _changes_logits(params):
                _apply_bias(logits[row], params)
                if row in batch.masks:
                    _apply_mask(logits[row], batch.masks[row])
                _apply_penalties(logits[row], params, batch.history(row), batch.prompt_lengths[row])
                _hold_back(logits[row], batch.held_back.get(row, []))
    token_ids = logits.argmax(-1)
    plain = [row for row, params in enumerate(batch.params) if params.temperature > 0 and not _filters(params)]
    filtered = [row for row, params in enumerate(batch.params) if params.temperature > 0 and _filters(params)]
    if plain:
        everything = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        token_ids[plain] = _race(_tempered(logits, plain, batch), everything, _keys(plain, batch, logits.device))
    if filtered:
        token_ids[filtered] = _draw_filtered(_tempered(logits, filtered, batch), filtered, batch)
    return token_ids


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, params: list[SamplingParams]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the sampled and the best tokens, for the rows that ask. logits [R, vocab], token_ids [R]"""
    results: list[TokenLogprobs | None] = [None] * len(params)
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if asking:
        counts = [params[row].logprobs or 0 for row in asking]
        for row, entry in zip(asking, look_up(logits[asking], token_ids[asking], counts), strict=True):
            results[row] = entry
    return results


def look_up(logits: torch.Tensor, token_ids: torch.Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `token_ids` [R] and, per row, of the `counts` best tokens. logits [R, vocab], R > 0"""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(max(*counts, 1))
    return [
        TokenLogprobs([token_id, *others[:count]], [logprob, *other_logprobs[:count]])
        for token_id, logprob, others, other_logprobs, count in zip(
            token_ids.tolist(), own, best.indices.tolist(), best.values.tolist(), counts, strict=True
        )
    ]


def needs_torch_sampler(params: SamplingParams) -> bool:
    """Whether no Triton kernel can draw the row: it has a bias, allowed tokens, a grammar or `min_tokens`."""
    biased = bool(params.logit_bias) or params.allowed_token_ids is not None
    return biased or _holds_back(params) or params.is_constrained


def _holds_back(params: SamplingParams) -> bool:
    return params.min_tokens > 0 and not (params.ignore_eos and not params.stop_token_ids)


def _changes_logits(params: SamplingParams) -> bool:
    return needs_torch_sampler(params) or params.is_penalised


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _apply_bias(logits: torch.Tensor, params: SamplingParams) -> None:
    """logits [vocab], changed in place"""
    if params.logit_bias:
        indices = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[indices] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(float("-inf"))
        logits[allowed] = kept


def _apply_mask(logits: torch.Tensor, mask: bytes) -> None:
    """logits [vocab], changed in place; mask [vocab] bits, and some to fill it up"""
    octets = torch.frombuffer(bytearray(mask), dtype=torch.uint8).to(logits.device)
    bits = octets.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    logits.masked_fill_(bits.flatten()[: logits.shape[0]] == 0, float("-inf"))


def _hold_back(logits: torch.Tensor, token_ids: list[int]) -> None:
    """logits [vocab], changed in place; left as they are if nothing else may be drawn"""
    if token_ids:
        others = logits.index_fill(0, torch.tensor(token_ids, device=logits.device), float("-inf"))
        logits.copy_(torch.where(others.amax() > float("-inf"), others, logits))


def _apply_penalties(logits: torch.Tensor, params: SamplingParams, history: torch.Tensor, prompt_length: int) -> None:
    """logits [vocab], changed in place.

    Repetition (Keskar et al., arXiv 1909.05858) looks at prompt and output and divides positive logits, multiplies
    negative ones; presence and frequency (OpenAI's definition) look at the output alone and subtract.
    """
    if params.repetition_penalty != 1:
        seen = history.long().unique()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = history[prompt_length:].long().unique(return_counts=True)
        logits[tokens] -= params.presence_penalty + params.frequency_penalty * counts


def _tempered(logits: torch.Tensor, rows: list[int], batch: SamplingBatch) -> torch.Tensor:
    """logits / temperature of the rows named [len(rows), vocab]"""
    temperature = torch.tensor([batch.params[row].temperature for row in rows], device=logits.device)
    chosen = logits if len(rows) == logits.shape[0] else logits[rows]
    # the largest logit becomes 0 first: a tiny temperature then cannot overflow
    return (chosen - chosen.amax(-1, keepdim=True)) / temperature.unsqueeze(1)


def _draw_filtered(logits: torch.Tensor, rows: list[int], batch: SamplingBatch) -> torch.Tensor:
    """Top-k, top-p and min-p over the most likely tokens in descending order; all tokens only where a row needs them.

    logits [len(rows), vocab] -> token ids [len(rows)]
    """
    vocab_size, device = logits.shape[1], logits.device
    params = [batch.params[row] for row in rows]
    limits = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_k = torch.tensor(limits, device=device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device).unsqueeze(1)
    total = logits.exp().sum(-1, keepdim=True, dtype=torch.float64)
    width = min(vocab_size, max(_FIRST_CANDIDATES, *(2 * limit for limit in limits if limit < vocab_size), 0))
    while True:
        values, token_ids = _most_likely(logits, width)
        within_k = torch.arange(width, device=device) < top_k
        weights = values.double().exp() * within_k
        running = weights.cumsum(-1)
        mass = torch.where(top_k < vocab_size, running[:, -1:], total)  # what top-p is a share of
        threshold = min_p * weights[:, :1]
        kept = ((running - weights < top_p * mass) | (top_p >= 1)) & (weights >= threshold) & within_k
        kept[:, 0] = True  # the most likely token always stays
        # the last candidates may have equals that are none: enough only if a filter cut before them
        if width == vocab_size or not bool((kept & (values == values[:, -1:])).any()):
            break
        width = vocab_size
    choice = _race(values.masked_fill_(~kept, float("-inf")), token_ids.int(), _keys(rows, batch, device))
    return token_ids.gather(1, choice.unsqueeze(1)).squeeze(1)


def _most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits and their token ids, descending, equals by token id. [R, vocab] -> [R, count]"""
    if count < logits.shape[1]:
        values, token_ids = logits.topk(count)
        token_ids, order = token_ids.sort(-1)
        values = values.gather(1, order)
    else:
        values, token_ids = logits, torch.arange(count, device=logits.device).expand_as(logits)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(1, order)


def _race(logits: torch.Tensor, token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Index of the winner per row: token i finishes first with probability softmax(logits)[i].

    logits [R, n] float32 (-inf: does not run), token_ids [R, n] or [n] int32, keys [R] int32 -> [R] int64
    """
    return (logits - exponential_noise(token_ids, keys).log_()).argmax(-1)  # the smallest time / exp(logit) wins


def _keys(rows: list[int], batch: SamplingBatch, device: torch.device) -> torch.Tensor:
    return row_keys([batch.seeds[row] for row in rows], [batch.positions[row] for row in rows], device)
