"""The example that trains a head: a tiny model writes text, the head learns from it, and its files are as published."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from examples.train_head import data, train
from examples.train_head.head import Head, Norm, export, target_layers
from mini_sglang import LLM
from mini_sglang.weights.model_config import load_model_config
from tests import tiny

LENGTH, STEPS = 12, 4


@pytest.fixture(scope="module")
def checkpoint(checkpoints: tiny.Checkpoints) -> tiny.TinyCheckpoint:
    return checkpoints.write(num_hidden_layers=7, max_position_embeddings=1024, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def llm(checkpoint: tiny.TinyCheckpoint) -> Iterator[LLM]:
    with LLM(str(checkpoint.path), num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def written(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.npz"
    waves = data.Writer(llm, max_tokens=24, max_question_tokens=12, sampled=0.5).waves(16, 10, seconds=60)
    data.save(path, [sample for wave in waves for sample in wave])
    return path


@pytest.fixture
def head(checkpoint: tiny.TinyCheckpoint) -> Head:
    torch.manual_seed(0)
    return Head(load_model_config(checkpoint.source), 96, torch.arange(0, tiny.VOCAB_SIZE, 3))


def test_samples_are_prompts_and_the_models_answers(checkpoint: tiny.TinyCheckpoint, written: Path) -> None:
    with np.load(written) as file:
        tokens, is_answer = file["tokens"], file["is_answer"]
        starts, is_greedy = [0, *file["ends"][:-1]], file["is_greedy"]
    assert len(is_greedy) == 16
    assert 0 < is_greedy.sum() < 16
    for start, end, greedy in zip(starts, [*starts[1:], len(tokens)], is_greedy, strict=True):
        answer = int(is_answer[start:end].argmax())
        assert answer > 0
        assert is_answer[start + answer : end].all()
        if greedy:
            logits = checkpoint.model(torch.from_numpy(tokens[start:end]).long()[None]).logits[0]
            assert logits[answer - 1 : -1].argmax(-1).tolist() == tokens[start + answer : end].tolist()


def test_equal_seeds_write_equal_samples(llm: LLM) -> None:
    first, second = (
        list(data.Writer(llm, seed=3, max_tokens=8, max_question_tokens=8).waves(4, 3, seconds=60)) for _ in range(2)
    )
    assert first == second


def test_an_answer_is_cut_after_the_second_copy_of_a_passage() -> None:
    assert data.without_loop([7, 1, 2, 3, 1, 2, 3, 1, 2, 3], window=3) == [7, 1, 2, 3, 1, 2, 3]
    assert data.without_loop([1, 2, 3, 4], window=3) == [1, 2, 3, 4]


def test_each_step_is_what_the_head_computes_when_it_drafts_from_one_pair(head: Head) -> None:
    """The training's mask against a plain run: the pairs up to n once, then one pair at a time of the head's own."""
    hidden = head.config.hidden_size
    states, embedded = torch.randn(1, LENGTH, 3 * hidden), torch.randn(1, LENGTH + STEPS, hidden)
    unrolled = head.unroll(states, embedded, STEPS)
    for n in (0, 5, LENGTH - 1):
        g = head.fc(states[:, : n + 1])
        for step in range(STEPS):
            h = _layer(head, embedded[:, 1 : n + step + 2], g)[:, -1:]
            torch.testing.assert_close(unrolled[step][:, n], h[:, 0], rtol=1e-4, atol=1e-4)
            g = torch.cat((g, h), 1)


def test_training_lowers_the_loss_and_writes_the_published_format(
    checkpoint: tiny.TinyCheckpoint, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs", "4", "--batch-tokens", "512", "--print-every", "1", "--draft-vocab", "128", "--lr", "3e-3"]
    files = ["--data", str(written), "--out", str(tmp_path), "--model", str(checkpoint.path), "--device", "cpu"]
    train.main([*files, *options, "--unroll", "3"])
    printed = capsys.readouterr().out
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in printed.splitlines() if line.startswith("step")]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert "tokens per step for k = 1 to 3" in printed
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (tiny.VOCAB_SIZE, 128)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (64, 192),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.post_attention_layernorm.weight": (64,),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
        "norm.weight": (64,),
        "lm_head.weight": (128, 64),
        "d2t": (128,),
        "t2d": (tiny.VOCAB_SIZE,),
    }
    draft_ids = torch.arange(128) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == draft_ids.tolist()


def test_each_step_is_to_give_the_targets_distribution_one_token_later(
    checkpoint: tiny.TinyCheckpoint, head: Head
) -> None:
    tokens, is_answer = torch.randint(3, tiny.VOCAB_SIZE, (2, LENGTH)), torch.arange(LENGTH) >= 5
    texts = [train.Text(tokens[0], is_answer, True), train.Text(tokens[1, :-3], is_answer[:-3], True)]
    [batch] = train.batches(texts, 64, STEPS, "cpu", random.Random(0))
    target = train.Target(checkpoint.model, target_layers(7))
    inputs, _, embedded = target.states(batch)
    unrolled, losses = head.unroll(inputs, embedded, STEPS), []
    for step in range(STEPS):
        places = [(row, n) for row in (0, 1) for n in range(LENGTH - step - 2) if batch.is_answer[row, n + step + 2]]
        parts = []
        for row, n in places:
            seen = batch.tokens[row : row + 1, : n + step + 2]
            wanted = checkpoint.model(seen).logits[0, -1].softmax(-1)[head.draft_ids]
            parts.append(-(wanted * head.logits(unrolled[step][row, n]).log_softmax(-1)).sum())
        losses.append(torch.stack(parts).mean())
    expected = (losses[0] + losses[1] / 2 + losses[2] / 4 + losses[3] / 8) / (1 + 1 / 2 + 1 / 4 + 1 / 8)
    torch.testing.assert_close(train.loss_of(head, target, batch, STEPS, 0.5), expected, rtol=1e-4, atol=1e-4)


def test_a_draft_is_accepted_up_to_where_the_text_differs(checkpoint: tiny.TinyCheckpoint, head: Head) -> None:
    """A text made so that the head's first two drafts from pair 4 are right and the third is not."""
    tokens, n = torch.randint(3, tiny.VOCAB_SIZE, (LENGTH,)), 4
    target = train.Target(checkpoint.model, target_layers(7))
    for step in range(3):
        [batch] = train.batches([train.Text(tokens, torch.ones(LENGTH).bool(), True)], 64, 3, "cpu", random.Random(0))
        inputs, _, embedded = target.states(batch)
        drafted = head.draft_ids[head.logits(head.unroll(inputs, embedded, 3)[step][0, n]).argmax()]
        tokens[n + step + 2] = drafted if step < 2 else (drafted + 1) % tiny.VOCAB_SIZE
    [batch] = train.batches([train.Text(tokens, torch.ones(LENGTH).bool(), True)], 64, 3, "cpu", random.Random(0))
    assert train.accepted_lengths(head, target, batch, 3)[0, n] == 2


def test_acceptance_is_counted_as_an_engine_goes() -> None:
    """An answer of 5 tokens, the first of them the prompt's step's: two drafts are right, then none is."""
    lengths, is_answer = [0, 2, 0, 0, 0, 0], [False, False, True, True, True, True, True, False, False]
    shares, tokens_per_step = train.acceptance([(lengths, is_answer)], 2)
    assert shares == [1 / 4, 1.0]
    assert tokens_per_step == [4 / 3, 4 / 2]


def test_a_model_of_too_few_layers_is_refused() -> None:
    assert target_layers(30) == (2, 15, 27)
    with pytest.raises(ValueError, match="got 6"):
        target_layers(6)


def _layer(head: Head, embedded: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """The layer over a whole sequence of pairs, each at the position of its token, with plain causal attention."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    assert isinstance(layer.hidden_norm, Norm)
    x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(g)), -1)
    positions = torch.arange(1, x.shape[1] + 1)
    frequencies = 10000.0 ** (-torch.arange(0, attention.head_dim, 2) / attention.head_dim)
    turns = torch.polar(torch.ones(1), torch.outer(positions.float(), frequencies))  # [length, dim/2]
    q, k, v = (
        projection(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = (_turned(y, turns) for y in (q, k))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    h = g + attention.o_proj(out.transpose(1, 2).flatten(2))
    result: torch.Tensor = h + layer.mlp(layer.post_attention_layernorm(h))
    return result


def _turned(y: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    half = y.shape[-1] // 2
    numbers = torch.complex(y[..., :half], y[..., half:]) * turns
    return torch.cat((numbers.real, numbers.imag), -1)


@pytest.mark.parametrize("packed", [False, True], ids=["float16", "packed"])
def test_an_engine_drafts_with_what_is_exported(
    packed: bool, checkpoint: tiny.TinyCheckpoint, head: Head, tmp_path: Path
) -> None:
    config = load_model_config(checkpoint.source)
    export(head.tensors(), config, 96, tmp_path, packed=packed)
    prompts = tiny.make_ragged_prompts(4, tiny.VOCAB_SIZE)
    with tiny.run_engine(checkpoint.path) as engine:
        plain = tiny.generate_ids(engine, prompts)
    with tiny.run_engine(checkpoint.path, speculative=str(tmp_path), speculative_gate=False) as engine:
        assert tiny.generate_ids(engine, prompts) == plain
        drafts = engine.stats().drafts
    assert drafts is not None
    assert drafts.num_draft_tokens > 0
