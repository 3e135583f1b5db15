"""Says in a few lines what an engine runs with, once all that was left open is settled. Plain text, no layout."""

from __future__ import annotations

from mini_sglang.config import ResolvedConfig


def summary(config: ResolvedConfig) -> list[str]:
    """What was chosen: where and how steps are computed, the KV cache, the bounds of a step."""
    pages, tokens = config.num_pages, config.num_pages * config.page_size
    kv_dtype = f", {config.kv_cache_dtype}" if config.kv_cache_dtype != "auto" else ""
    return [
        f"{_place(config)}; dtype {config.dtype}{', packed weights' if config.weights == 'packed' else ''}; "
        f"attention backend {config.attention_backend}; {_graphs(config)}",
        f"KV cache of {pages:,} pages, {tokens:,} tokens{kv_dtype}; context length {config.context_length:,} tokens",
        f"most running requests {config.max_running_requests:,}; budget of a step {_budget(config)}",
    ]


def _place(config: ResolvedConfig) -> str:
    ranks = f", {config.tp} ranks" if config.tp > 1 else ""
    if config.device != "cpu":
        return f"device {config.device}{ranks}"
    threads = f"{config.num_threads} thread{'s' if config.num_threads > 1 else ''}"
    return f"device cpu{ranks}, {threads}{' each' if ranks else ''}"


def _graphs(config: ResolvedConfig) -> str:
    rows = config.cuda_graph_max_bs
    return f"CUDA graphs of up to {rows:,} rows" if rows else "no CUDA graphs"


def _budget(config: ResolvedConfig) -> str:
    beside_decodes = f", and {config.max_step_ms} ms beside decodes" if config.max_step_ms else ""
    return f"{config.max_prefill_tokens:,} tokens{beside_decodes}"
