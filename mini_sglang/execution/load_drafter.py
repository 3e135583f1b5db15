"""Finds and loads the model that drafts, where `speculative` names one: another model, or an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mini_sglang.config import WITHOUT_MODEL, EngineConfig, ResolvedConfig
from mini_sglang.execution.drafting import Drafter, DraftModel, Eagle3Drafter
from mini_sglang.layers.placement import Placement
from mini_sglang.model_config import Eagle3Config, ModelConfig
from mini_sglang.models.architectures import build_model
from mini_sglang.models.eagle3 import Eagle3Head
from mini_sglang.models.transformer import Transformer
from mini_sglang.parallel.tensor_parallel import SINGLE, TensorParallel
from mini_sglang.weights.hub import ModelSource, resolve_model
from mini_sglang.weights.load import load_weights
from mini_sglang.weights.model_config import load_draft_config
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
    draft = load_draft_config(source, target)
    if isinstance(draft, ModelConfig) and draft.context_length < (needed := config.context_length or 0):
        raise ValueError(
            f"speculative: model {config.speculative!r} has a context length of {draft.context_length} tokens, less "
            f"than context_length, {needed}; lower that"
        )
    return DraftSource(source, draft)


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
    head = Eagle3Head(replace(draft.config, layer=layers), placement, target.embed, own_embedding=own_embedding)
    slots = {name: checked(slot) for name, slot in head.weight_slots().items()}
    load_weights(draft.source, layers, slots, show_progress=show_progress)
    most_tokens = max(config.max_prefill_tokens, config.max_running_requests)
    hidden = target.tap(draft.config.target_layers, most_tokens)
    return Eagle3Drafter(head, hidden, config.max_running_requests)
