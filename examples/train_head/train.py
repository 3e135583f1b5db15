"""Train a head on what `data.py` wrote: `python -m examples.train_head.train --data data.npz --out head`.

The target's states and distributions are computed on the fly, by the transformers model that `mini-sglang verify`
compares with. A step of training is the paper's "training-time test": the head is unrolled several steps, each reading
its own states of the step before, and each is to give the target's distribution, as far as that lies within the draft
vocabulary. At the end the head drafts on texts that it has not seen, and a draft counts as accepted if the text has it.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_head.head import Head, export, target_layers
from mini_sglang.config import DEFAULT_MODEL
from mini_sglang.model_config import ModelConfig
from mini_sglang.verify import load_reference
from mini_sglang.weights.hub import resolve_model
from mini_sglang.weights.model_config import load_model_config


@dataclass(frozen=True)
class Text:
    tokens: Tensor  # [length] int64
    is_answer: Tensor  # [length] bool
    is_greedy: bool


@dataclass(frozen=True)
class Batch:
    """Texts of about the same length, padded on the right with token 0, which is in no answer."""

    tokens: Tensor  # [texts, length + steps] int64
    is_answer: Tensor  # [texts, length + steps] bool
    length: int  # of the longest text


def load_texts(path: Path, max_length: int) -> list[Text]:
    """The samples of `data.save`, cut after `max_length` tokens; those whose answer lies beyond are left out."""
    with np.load(path) as data:
        tokens, is_answer = torch.from_numpy(data["tokens"]).long(), torch.from_numpy(data["is_answer"])
        ends, is_greedy = data["ends"].tolist(), data["is_greedy"].tolist()
    starts = [0, *ends[:-1]]
    texts = [
        Text(tokens[start:end][:max_length], is_answer[start:end][:max_length], greedy)
        for start, end, greedy in zip(starts, ends, is_greedy, strict=True)
    ]
    return [text for text in texts if len(text.tokens) > 2 and bool(text.is_answer[2:].any())]


def draft_vocabulary(texts: Sequence[Text], vocab_size: int, size: int | None, coverage: float) -> Tensor:
    """Ids [D] int64, ascending, of the answers' most frequent tokens: `size` of them, or as many as cover the share
    `coverage`, rounded up to a multiple of 64."""
    counts = torch.bincount(torch.cat([text.tokens[text.is_answer] for text in texts]), minlength=vocab_size)
    frequent, ids = counts.sort(descending=True, stable=True)
    if size is None:
        size = 64 * math.ceil((int((frequent.cumsum(0) < coverage * frequent.sum()).sum()) + 1) / 64)
    size = min(size, vocab_size)
    print(f"draft vocabulary: {size} tokens, {frequent[:size].sum() / frequent.sum():.2%} of the answers' tokens")
    return ids[:size].sort().values


def batches(texts: Sequence[Text], num_tokens: int, steps: int, device: str, rng: random.Random) -> Iterator[Batch]:
    """All texts once, in batches of at most `num_tokens` with padding, which come in random order."""
    order = sorted(range(len(texts)), key=lambda index: (len(texts[index].tokens), rng.random()))
    groups: list[list[Text]] = [[]]
    for index in order:
        if (len(groups[-1]) + 1) * len(texts[index].tokens) > num_tokens and groups[-1]:
            groups.append([])
        groups[-1].append(texts[index])
    rng.shuffle(groups)
    for group in groups:
        tokens, is_answer = (
            F.pad(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, steps))
            for rows in ([text.tokens for text in group], [text.is_answer for text in group])
        )
        yield Batch(tokens.to(device), is_answer.to(device), tokens.shape[1] - steps)


class Target:
    """The model that drafts are for. A mask of padding is not needed, since it stands on the right."""

    def __init__(self, model: Any, layers: tuple[int, int, int]) -> None:
        self.model, self.layers = model.requires_grad_(False), layers

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """States at the inputs of the three layers and at the end [texts, length, 3 hidden], [texts, length, hidden],
        and the embedded tokens [texts, length + steps, hidden]."""
        output = self.model.model(batch.tokens[:, : batch.length], output_hidden_states=True, use_cache=False)
        inputs = torch.cat([output.hidden_states[layer] for layer in self.layers], -1)
        return inputs, output.last_hidden_state, self.model.model.embed_tokens(batch.tokens)

    @torch.no_grad()
    def draft_probs(self, last: Tensor, draft_ids: Tensor) -> Tensor:
        """[rows, hidden] to [rows, D]: the probabilities of the draft vocabulary, whose sum is below 1."""
        logits = self.model.lm_head(last).float()
        probs: Tensor = (logits[:, draft_ids] - logits.logsumexp(-1, keepdim=True)).exp()
        return probs


def loss_of(head: Head, target: Target, batch: Batch, steps: int, decay: float) -> Tensor:
    """The mean over steps, weighted by decay^step, of the cross-entropy per token of an answer."""
    inputs, last, embedded = target.states(batch)
    probs = target.draft_probs(last.flatten(0, 1), head.draft_ids)  # [texts * length, D]
    losses = []
    for step, h in enumerate(head.unroll(inputs, embedded, steps)):
        rows = batch.is_answer[:, step + 2 :][:, : batch.length - step - 1].nonzero(as_tuple=True)
        wanted = probs[rows[0] * batch.length + rows[1] + step + 1]  # what follows the token at n + step + 1
        logits = head.logits(h[rows]).float()
        losses.append((wanted.sum(-1) * logits.logsumexp(-1) - (wanted * logits).sum(-1)).mean())
    weights = [decay**step for step in range(steps)]
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).nansum() / sum(weights)


@torch.no_grad()
def accepted_lengths(head: Head, target: Target, batch: Batch, steps: int) -> Tensor:
    """How many of `steps` drafts from each pair the text has, [texts, length]."""
    inputs, _, embedded = target.states(batch)
    lengths = torch.zeros_like(batch.tokens[:, : batch.length])
    alive = lengths == 0
    for step, h in enumerate(head.unroll(inputs, embedded, steps)):
        drafted = head.draft_ids[head.logits(h).argmax(-1)]
        text, is_answer = (F.pad(x[:, step + 2 :], (0, 2))[:, : batch.length] for x in (batch.tokens, batch.is_answer))
        alive = alive & is_answer & (drafted == text)
        lengths = lengths + alive.long()
    return lengths


def acceptance(rows: Sequence[tuple[list[int], list[bool]]], steps: int) -> tuple[list[float], list[float]]:
    """Of texts, each as its `accepted_lengths` and `is_answer`: the share of drafts accepted at each position after
    those before it, and the tokens per step of the target with drafts of 1 to `steps` tokens.

    The shares are over all pairs that are followed by tokens of the answer. Tokens per step are counted as an engine
    goes: a step gives what is accepted and one token more, and the next draft begins there.
    """
    drafts, accepted = [0] * steps, [0] * steps
    engine_steps, tokens = [0] * steps, 0
    for lengths, is_answer in rows:
        places = [n for n in range(len(lengths)) if is_answer[n + 1] and is_answer[n + 2]]  # of pairs, with drafts due
        if not places:  # an answer of one token, which the prompt's step gives
            continue
        tokens += len(places)
        for n in places:
            for step in range(min(lengths[n] + 1, steps)):
                drafts[step] += is_answer[n + step + 2]
                accepted[step] += lengths[n] > step
        for step in range(steps):
            n = places[0]
            while n <= places[-1]:
                n += min(lengths[n], step + 1) + 1
                engine_steps[step] += 1
    shares = [part / max(whole, 1) for part, whole in zip(accepted, drafts, strict=True)]
    return shares, [tokens / max(number, 1) for number in engine_steps]


def report(head: Head, target: Target, texts: Sequence[Text], device: str, args: argparse.Namespace) -> None:
    rows: list[tuple[list[int], list[bool]]] = []
    for batch in batches(texts, args.batch_tokens, args.unroll, device, random.Random(0)):
        with _autocast(device):
            lengths = accepted_lengths(head, target, batch, args.unroll)
        rows += zip(lengths.tolist(), F.pad(batch.is_answer, (0, 1)).tolist(), strict=True)
    shares, tokens_per_step = acceptance(rows, args.unroll)
    print("  accepted at each position, after those before:", " ".join(f"{share:.3f}" for share in shares))
    print(f"  tokens per step for k = 1 to {args.unroll}:", " ".join(f"{figure:.2f}" for figure in tokens_per_step))


def _autocast(device: str) -> torch.autocast:
    return torch.autocast("cuda" if device.startswith("cuda") else "cpu", torch.bfloat16, device.startswith("cuda"))


def train(head: Head, target: Target, texts: Sequence[Text], device: str, args: argparse.Namespace) -> list[float]:
    """Train in place; returns the loss of every step. The learning rate is that of a cosine over the epochs, or over
    `args.minutes` where the time is shorter."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    rng, losses, started = random.Random(args.seed), list[float](), time.monotonic()
    total = args.epochs * sum(1 for _ in batches(texts, args.batch_tokens, 0, "cpu", random.Random(0)))
    warmup, tokens, recent = min(100, max(total // 10, 1)), 0, list[Tensor]()
    for _ in range(args.epochs):
        for batch in batches(texts, args.batch_tokens, args.unroll, device, rng):
            done, seconds = len(losses) + len(recent), time.monotonic() - started
            progress = max(done / total, seconds / (60 * args.minutes))
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1, (done + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * progress))
            with _autocast(device):
                loss = loss_of(head, target, batch, args.unroll, args.decay)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            recent.append(loss.detach())
            tokens += batch.tokens.numel()
            if len(recent) == args.print_every:  # only now the device is waited for
                losses += torch.stack(recent).tolist()
                recent.clear()
                speed = tokens / (time.monotonic() - started)
                mean = sum(losses[-args.print_every :]) / args.print_every
                print(f"step {len(losses)} of {total}: loss {mean:.3f}, {speed:.0f} tokens a second", flush=True)
    return losses + [float(loss) for loss in recent]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("head-data.npz"))
    parser.add_argument("--out", type=Path, default=Path("head"), help="folder to write")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a name, folder or .gguf file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0, help="most time that training may take")
    parser.add_argument("--batch-tokens", type=int, default=16_384, help="of one step, with padding")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a text that are used")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--unroll", type=int, default=7, help="steps of the head; also the longest draft reported")
    parser.add_argument("--decay", type=float, default=0.8, help="weight of a step's loss by that of the one before")
    parser.add_argument("--intermediate-size", type=int, help="of the head's MLP; none: the target's")
    parser.add_argument("--begin", choices=("target", "random"), default="target", help="the head's first weights")
    parser.add_argument("--draft-vocab", type=int, help="its size; none: by --coverage")
    parser.add_argument("--coverage", type=float, default=0.99, help="share of the answers' tokens")
    parser.add_argument("--held-out", type=int, default=256, help="texts that are kept for the report, at most a tenth")
    parser.add_argument("--packed", action="store_true", help="matrices in 8 bits, and the output head in 4")
    parser.add_argument("--print-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    source = resolve_model(args.model)
    config: ModelConfig = load_model_config(source)
    texts = load_texts(args.data, args.max_length)
    random.Random(args.seed).shuffle(texts)
    number = min(args.held_out, len(texts) // 10)
    held_out, texts = texts[:number], texts[number:]
    draft_ids = draft_vocabulary(texts, config.vocab_size, args.draft_vocab, args.coverage).to(args.device)
    model = load_reference(source).to(args.device, torch.bfloat16 if args.device.startswith("cuda") else torch.float32)
    target = Target(model, target_layers(config.num_layers))
    head = Head(config, args.intermediate_size or config.intermediate_size, draft_ids).to(args.device)
    if args.begin == "target":
        first = next(batches(texts, args.batch_tokens, 0, args.device, random.Random(args.seed)))
        state = target.states(first)[0][..., -config.hidden_size :].float()
        head.begin_like(model, 1 / float(state.square().mean(-1).sqrt().median()))
    parameters = sum(parameter.numel() for parameter in head.parameters())
    sizes = ", ".join(f"{parameters * bits / 8e6:.1f} MB at {bits} bits" for bits in (4, 8, 16))
    print(f"{len(texts)} texts to train on, {len(held_out)} held out; {parameters} parameters: {sizes}", flush=True)
    train(head, target, texts, args.device, args)
    intermediate = head.midlayer.mlp.gate_proj.out_features
    export(head.tensors(), config, intermediate, args.out, packed=args.packed)
    for name, is_greedy in (("greedy", True), ("sampled", False)):
        chosen = [text for text in held_out if text.is_greedy == is_greedy]
        if chosen:
            print(f"{name} answers, {len(chosen)} held out:")
            report(head, target, chosen, args.device, args)


if __name__ == "__main__":
    main()
