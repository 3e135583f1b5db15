"""Finds and loads the model that drafts, where `speculative` names one: another model, or an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mini_sglang.config import WITHOUT_MODEL, EngineConfig, ResolvedConfig
from mini_sglang.execution.drafting import Drafter, DraftModel, Eagle3Drafter
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.models.eagle3 import Eagle3Config, Eagle3Head, tap
from mini_sglang.models.transformer import Transformer
from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel
from mini_sglang.weights.hf_config import config_from_hf, read_json
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.model_config import load_model_config
from mini_sglang.weights.safetensors import open_safetensors
from mini_sglang.weights.tensor import WeightSlot


@dataclass(frozen=True)
class DraftSource:
    """The model that drafts: where it is, and its sizes."""

    source: ModelSource
    config: ModelConfig | Eagle3Config

    @property
    def layers(self) -> ModelConfig:
        """The sizes of the layers that it keeps KV of."""
        return self.config.layer if isinstance(self.config, Eagle3Config) else self.config

    @property
    def is_head(self) -> bool:
        """Whether it is a head, which is whole on each of the target's ranks; a model is spread over them."""
        return isinstance(self.config, Eagle3Config)

    def check_context(self, length: int) -> None:
        """Raise ValueError if it cannot draft for requests of that many tokens. A head turns any position."""
        if not self.is_head and self.layers.context_length < length:
            raise ValueError(
                f"speculative: model {self.source.name!r} has a context length of {self.layers.context_length} tokens, "
                f"less than context_length, {length}; lower that"
            )

    def parallel(self, parallel: TensorParallel) -> TensorParallel:
        """What it is spread over, of the target's ranks"""
        return SINGLE if self.is_head else parallel


def find_drafter(config: EngineConfig, target: ModelConfig) -> DraftSource | None:
    """Find or fetch the model that `speculative` names; None if it names none.

    Raises ValueError, naming the setting, if it does not fit the target, and FileNotFoundError as `resolve_model`.
    """
    if config.speculative in WITHOUT_MODEL:
        return None
    try:
        source = resolve_model(config.speculative, source=config.model_source)
    except FileNotFoundError as error:
        known = ", ".join(WITHOUT_MODEL)
        raise FileNotFoundError(f"speculative must be one of {known}, or a model or EAGLE-3 head: {error}") from error
    return DraftSource(source, _draft_config(source, target))


def _draft_config(source: ModelSource, target: ModelConfig) -> ModelConfig | Eagle3Config:
    """Read the sizes of what drafts for `target`. Raises ValueError, naming `speculative`, if it is for another one."""
    path = source.path / "config.json"
    config = read_json(path) if source.kind == "safetensors" else {}
    if any("Eagle3" in str(name) for name in config.get("architectures") or ()):
        try:
            return _eagle3_config(config, target)
        except ValueError as error:
            raise ValueError(f"speculative: {path}: {error}") from error
    draft = load_model_config(source)
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"speculative: model {source.name!r} must have the target's vocabulary of {target.vocab_size} tokens, "
            f"got {draft.vocab_size}"
        )
    return draft


def _eagle3_config(config: Mapping[str, Any], target: ModelConfig) -> Eagle3Config:
    """Read a head's config.json, as SpecForge writes it, or with the layers that it reads where NVIDIA has them."""
    layer = config_from_hf(config)
    if layer.num_layers != 1:
        raise ValueError(f"num_hidden_layers of an EAGLE-3 head must be 1, got {layer.num_layers}")
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layer, name), getattr(target, name)
        if ours != theirs:
            raise ValueError(f"{name} must be the target's, {theirs}, got {ours}")
    most, size = layer.vocab_size, config.get("draft_vocab_size") or layer.vocab_size
    if not isinstance(size, int) or not 1 <= size <= most:
        raise ValueError(f"draft_vocab_size must be an integer between 1 and vocab_size, {most}, got {size!r}")
    stated = config.get("eagle_config")
    layers = (stated if isinstance(stated, Mapping) else config).get(_TARGET_LAYERS)
    if layers is None:
        layers = [2, target.num_layers // 2, target.num_layers - 3]
    last = target.num_layers - 1
    if not isinstance(layers, list) or not all(isinstance(number, int) and 0 <= number <= last for number in layers):
        raise ValueError(f"{_TARGET_LAYERS} must be layers of the target, 0 to {last}, got {layers!r}")
    return Eagle3Config(layer=layer, draft_vocab_size=size, target_layers=tuple(layers))


def load_drafter(
    draft: DraftSource,
    config: ResolvedConfig,
    target: Transformer,
    placement: Placement,
    checked: Callable[[WeightSlot], WeightSlot],
) -> Drafter:
    """Load the model and tie it to `target`, whose placement it shares. Raises WeightsError as `load_weights`."""
    layers = replace(draft.layers, context_length=config.context_length)
    placement = replace(placement, parallel=draft.parallel(placement.parallel))
    show_progress = placement.parallel.rank == 0
    if isinstance(draft.config, ModelConfig):
        model = build_model(layers, placement)
        slots = {name: checked(slot) for name, slot in model.weight_slots().items()}
        load_weights(draft.source, layers, slots, show_progress=show_progress)
        return DraftModel(model)
    own_embedding = "embed_tokens.weight" in open_safetensors(draft.source.path)
    head = Eagle3Head(replace(draft.config, layer=layers), placement, target.embedding, own_embedding=own_embedding)
    slots = {name: checked(slot) for name, slot in head.weight_slots().items()}
    load_weights(draft.source, layers, slots, show_progress=show_progress)
    most_tokens = max(config.max_prefill_tokens, config.max_running_requests)
    hidden = tap(target, draft.config.target_layers, most_tokens)
    return Eagle3Drafter(head, hidden, config.max_running_requests)


_TARGET_LAYERS = "eagle_aux_hidden_state_layer_ids"
