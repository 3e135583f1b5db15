"""The counters of drafts in a server's Prometheus metrics, where it has them: this project's and vLLM's."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from mini_sglang.scheduling.stats import DraftStats

_DRAFTS, _TOKENS, _ACCEPTED_AT = (
    f"spec_decode_{name}_total" for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos")
)


def read_drafts(metrics: str) -> DraftStats | None:
    """The counters of a page of metrics, all label sets together; None if it has none.

    Of the first server's name alone, where the same counters stand under two. Raises ValueError for no such page.
    """
    samples = [
        sample
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if "spec_decode_" in sample.name
    ]
    prefix = next((sample.name.removesuffix(_DRAFTS) for sample in samples if sample.name.endswith(_DRAFTS)), None)
    if prefix is None:
        return None
    counts: Counter[str] = Counter()
    accepted_at: Counter[int] = Counter()
    for sample in samples:
        counts[sample.name] += int(sample.value)
        if sample.name == prefix + _ACCEPTED_AT:
            accepted_at[int(sample.labels["position"])] += int(sample.value)
    return DraftStats(
        num_drafts=counts[prefix + _DRAFTS],
        num_draft_tokens=counts[prefix + _TOKENS],
        num_accepted_at=[accepted_at[place] for place in range(max(accepted_at, default=-1) + 1)],
    )
