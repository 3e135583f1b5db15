"""Drafts by a model: what it drafts, that it follows the target through all that happens, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from mini_sglang import Engine, SamplingParams
from mini_sglang.request import Request
from mini_sglang.scheduling.batch import ScheduledBatch, StepResult
from mini_sglang.scheduling.speculation import Gate, ModelProposer
from mini_sglang.scheduling.step_cost import StepCost
from mini_sglang.weights.tensor import WeightsError
from tests import tiny
from tests.feature_matrix.step_log import read_steps

HEAD_LAYERS = [1, 2, 3]  # of a target with four
WAYS: dict[str, dict[str, object]] = {
    "as it is": {},
    "chunks of 7": {"max_prefill_tokens": 7},
    "pages of 1": {"page_size": 1},
    "pages of 3, few of them": {"page_size": 3, "num_pages": 44},
    "no cache": {"cache": "naive"},
    "run-ahead": {"run_ahead": 1},
    "the gate": {"speculative_gate": True},
}


@dataclass(frozen=True)
class Head:
    """An EAGLE-3 head of random weights, in a folder."""

    path: Path
    tensors: dict[str, torch.Tensor]
    config: dict[str, object]


def write_head(folder: Path, target: PreTrainedModel, draft_vocab_size: int = 100, **config: object) -> Head:
    sizes = target.config
    size, heads, kv_heads, width = sizes.hidden_size, 4, 2, 16
    random = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.3

    targets = torch.randperm(sizes.vocab_size, generator=random)[:draft_vocab_size].sort().values
    tensors = {
        "fc.weight": matrix(size, 3 * size),
        "midlayer.input_layernorm.weight": 1 + matrix(size),
        "midlayer.hidden_norm.weight": 1 + matrix(size),
        "midlayer.post_attention_layernorm.weight": 1 + matrix(size),
        "midlayer.self_attn.q_proj.weight": matrix(heads * width, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * width, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * width, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, heads * width),
        "midlayer.mlp.gate_proj.weight": matrix(32, size),
        "midlayer.mlp.up_proj.weight": matrix(32, size),
        "midlayer.mlp.down_proj.weight": matrix(size, 32),
        "norm.weight": 1 + matrix(size),
        "lm_head.weight": matrix(draft_vocab_size, size),
        "d2t": targets - torch.arange(draft_vocab_size),
        "t2d": torch.zeros(sizes.vocab_size, dtype=torch.bool).index_fill(0, targets, True),
    }
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 256,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": HEAD_LAYERS},
        **config,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return Head(folder, tensors, settings)


@pytest.fixture(scope="module")
def target(checkpoints: tiny.Checkpoints) -> tiny.TinyCheckpoint:
    return checkpoints.write(num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(target: tiny.TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return write_head(tmp_path_factory.mktemp("heads") / "eagle3", target.model)


@pytest.fixture(scope="module")
def other(checkpoints: tiny.Checkpoints) -> tiny.TinyCheckpoint:
    """A smaller model of the same vocabulary, whose drafts are wrong."""
    return checkpoints.write(family="qwen3", seed=7, num_hidden_layers=1)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy ones and sampled ones; every third begins like an earlier one."""
    prompts = tiny.make_ragged_prompts(9, tiny.VOCAB_SIZE)
    greedy = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, top_k=40, seed=4, max_tokens=15, ignore_eos=True)
    penalised = SamplingParams(temperature=0, frequency_penalty=0.7, max_tokens=13, ignore_eos=True)
    return prompts, [(greedy, sampled, penalised)[index % 3] for index in range(9)]


def answers(engine: Engine) -> list[list[int]]:
    outputs = tiny.run_all(engine, *requests(), arrivals=2)
    return [[token_id for output in of_one for token_id in output.token_ids] for of_one in outputs]


@pytest.fixture(scope="module")
def plain(target: tiny.TinyCheckpoint) -> list[list[int]]:
    with tiny.run_engine(target.path) as engine:
        return answers(engine)


def drafting(target: tiny.TinyCheckpoint, drafter: Path, **settings: object) -> dict[str, object]:
    return {"speculative": str(drafter), "speculative_tokens": 4, "speculative_gate": False, **settings}


# -- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_drafts_for_itself_is_always_right(
    way: str, target: tiny.TinyCheckpoint, plain: list[list[int]]
) -> None:
    """So its keys and values are those of the target, whatever was cached, copied, preempted or rejected."""
    with tiny.run_engine(target.path, **drafting(target, target.path, **WAYS[way])) as engine:
        if way == "pages of 3, few of them":
            engine.scheduler.expected_output = 0  # so that more are admitted than there is room for
        assert answers(engine) == plain
        assert answers(engine) == plain, "from the cache"
        stats = engine.stats()
    assert stats.drafts is not None
    assert stats.drafts.num_draft_tokens == sum(stats.drafts.num_accepted_at)
    if not WAYS[way].get("speculative_gate"):  # which may find that nothing pays on this machine
        assert stats.drafts.num_draft_tokens > 20
    if way == "pages of 3, few of them":
        assert stats.num_preemptions


class NowAndThen(ModelProposer):
    """Has the model draft every other time, so that requests run ahead between."""

    def __init__(self) -> None:
        self._times = itertools.count()

    def propose(self, request: Request, most: int) -> list[int]:
        return super().propose(request, most) if next(self._times) % 2 else []


def test_it_follows_requests_that_run_ahead(
    target: tiny.TinyCheckpoint, plain: list[list[int]], tmp_path: Path
) -> None:
    log = tmp_path / "steps.jsonl"
    settings = drafting(target, target.path, run_ahead=1, step_log=str(log))
    with tiny.run_engine(target.path, **settings) as engine:
        cost = StepCost(1.0, 1.0, 1.0, 1.0, 1.0)
        engine.scheduler._gate = Gate(NowAndThen(), 4, cost, hesitates=True, always=True)
        assert answers(engine) == plain
        stats = engine.stats().drafts
    assert stats is not None
    assert stats.num_draft_tokens == sum(stats.num_accepted_at) > 20
    steps = read_steps(log, after=0).steps
    assert any(later.at_us < step.read_us for step, later in itertools.pairwise(steps))


@pytest.mark.parametrize("way", ["as it is", "chunks of 7", "run-ahead"])
@pytest.mark.parametrize("drafter", ["a smaller model", "a head"])
def test_wrong_drafts_change_no_text(
    drafter: str,
    way: str,
    target: tiny.TinyCheckpoint,
    other: tiny.TinyCheckpoint,
    head: Head,
    plain: list[list[int]],
) -> None:
    path = head.path if drafter == "a head" else other.path
    with tiny.run_engine(target.path, **drafting(target, path, **WAYS[way])) as engine:
        assert answers(engine) == plain
        stats = engine.stats().drafts
    assert stats is not None
    assert stats.num_draft_tokens > sum(stats.num_accepted_at)


@pytest.mark.usefixtures("thread_workers")
@pytest.mark.parametrize("drafter", ["itself", "a head"])
def test_two_ranks_draft_together(
    drafter: str, target: tiny.TinyCheckpoint, head: Head, plain: list[list[int]]
) -> None:
    path = head.path if drafter == "a head" else target.path
    with tiny.run_engine(target.path, tp=2, **drafting(target, path)) as engine:
        assert answers(engine) == plain
        stats = engine.stats().drafts
    assert stats is not None
    if drafter == "itself":
        assert stats.num_draft_tokens == sum(stats.num_accepted_at)


# -- what a head drafts ----------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, width], at positions 0 to T - 1"""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)), 1e4 ** (-torch.arange(half) / half))
    cos, sin = torch.cat((angles, angles), -1).cos()[:, None], torch.cat((angles, angles), -1).sin()[:, None]
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def layer(head: Head, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """EAGLE-3's layer as the paper has it: embedded tokens [T, n], features of the tokens before [T, n] -> [T, n]"""
    weights = {name.removeprefix("midlayer.").removesuffix(".weight"): of for name, of in head.tensors.items()}
    pairs = torch.cat((norm(tokens, weights["input_layernorm"]), norm(features, weights["hidden_norm"])), -1)
    q, k, v = (linear(pairs, weights[f"self_attn.{name}_proj"]).unflatten(-1, (-1, 16)) for name in "qkv")
    q, k = rotate(q), rotate(k).repeat_interleave(2, 1)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.repeat_interleave(2, 1).transpose(0, 1), is_causal=True
    )
    h = features + linear(mixed.transpose(0, 1).flatten(1), weights["self_attn.o_proj"])
    x = norm(h, weights["post_attention_layernorm"])
    gated = silu(linear(x, weights["mlp.gate_proj"])) * linear(x, weights["mlp.up_proj"])
    return h + linear(gated, weights["mlp.down_proj"])


@torch.inference_mode()
def expected_draft(model: PreTrainedModel, head: Head, known: list[int], count: int, cached: int) -> list[int]:
    """What the head drafts behind `known`, whose first `cached` tokens came from the cache."""
    hidden = model(torch.tensor([known]), output_hidden_states=True).hidden_states
    taps = torch.cat([hidden[number][0] for number in HEAD_LAYERS], -1)
    features = linear(taps, head.tensors["fc.weight"])
    before = torch.cat((features[:1], features[:-1]))
    before[cached] = features[cached]  # the one before is not computed again
    ids, draft = list(known), []
    for _ in range(count):
        tokens = model.get_input_embeddings()(torch.tensor(ids))
        own = layer(head, tokens, before)[-1:]
        best = int(linear(norm(own, head.tensors["norm.weight"]), head.tensors["lm_head.weight"]).argmax())
        draft.append(best + int(head.tensors["d2t"][best]))
        ids.append(draft[-1])
        before = torch.cat((before, own))
    return draft


def steps(engine: Engine) -> list[tuple[ScheduledBatch, StepResult]]:
    """Run all requests to their end, with what each step was and gave."""
    done = []
    while (batch := engine.scheduler.schedule()) is not None:
        result = engine.executor.launch(batch).result()
        engine.scheduler.update(batch, result)
        done.append((batch, result))
    return done


@pytest.mark.parametrize("settings", [{}, {"max_prefill_tokens": 5}], ids=["whole prompts", "chunks"])
def test_a_head_drafts_what_the_paper_says(
    settings: dict[str, object], target: tiny.TinyCheckpoint, head: Head
) -> None:
    prompts = [tiny.make_ragged_prompts(5, tiny.VOCAB_SIZE)[2], [5, 9, 33]]
    prompts.append([*prompts[0][:32], 7, 8, 9])
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with tiny.run_engine(target.path, **drafting(target, head.path, speculative_tokens=3, **settings)) as engine:
        seen = 0
        for prompt in prompts:
            engine.add_request("a", prompt, params)
            request = engine.scheduler._requests["a"]
            done = steps(engine)
            text = prompt + request.output_ids
            for batch, result in done:
                for row in batch.rows:
                    if draft := result.drafts.get(row.slot):
                        known, cached = text[: row.start + 1], request.num_cached_tokens
                        assert draft == expected_draft(target.model, head, known, len(draft), cached)
                        seen += 1
        assert seen >= 15
        assert request.num_cached_tokens == 32


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_vocabulary_that_is_not_the_targets_is_refused(
    target: tiny.TinyCheckpoint, checkpoints: tiny.Checkpoints
) -> None:
    small = checkpoints.write(vocab_size=200)
    with (
        pytest.raises(ValueError, match=r"speculative: .* must have the target's vocabulary of 320 tokens, got 200"),
        tiny.run_engine(target.path, speculative=str(small.path)),
    ):
        pass


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 999}, "speculative: .*hidden_size must be the target's, 64, got 999"),
        ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 head must be 1, got 2"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size must be an integer between 1 and vocab_size, 320, got 1000"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
            "must be layers of the target, 0 to 3",
        ),
    ],
)
def test_a_head_of_another_target_is_refused(
    config: dict[str, object], message: str, target: tiny.TinyCheckpoint, tmp_path: Path
) -> None:
    head = write_head(tmp_path / "head", target.model)
    (head.path / "config.json").write_text(json.dumps({**head.config, **config}))
    with (
        pytest.raises(ValueError, match=message),
        tiny.run_engine(target.path, speculative=str(head.path)),
    ):
        pass


def test_a_head_without_a_tensor_is_refused(target: tiny.TinyCheckpoint, head: Head, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(head.config))
    save_file({name: of for name, of in head.tensors.items() if name != "fc.weight"}, tmp_path / "model.safetensors")
    with (
        pytest.raises(WeightsError, match=r"1 missing: fc\.weight"),
        tiny.run_engine(target.path, speculative=str(tmp_path)),
    ):
        pass


def test_a_name_that_is_nothing_is_refused(target: tiny.TinyCheckpoint) -> None:
    with (
        pytest.raises(FileNotFoundError, match="speculative must be one of none, ngram, or a model"),
        tiny.run_engine(target.path, speculative="./nowhere"),
    ):
        pass
