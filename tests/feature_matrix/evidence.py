"""How one sees after a cell that a feature was at work: from its answers, its engine's step log, and other plain runs.

Whether the answers are right is not asked here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.feature_matrix import tools
from tests.feature_matrix.feature import PROMPT_LENGTH, Seen


def changed_by(name: str) -> Callable[[Seen], bool]:
    """Without the feature the answer is another."""
    return lambda seen: seen.answers[0].token_ids != seen.plain_without(name).token_ids


def was_chunked(seen: Seen) -> bool:
    return any(not chunk.samples for chunk in seen.steps.chunks_of(seen.request_ids))


def was_predicted(seen: Seen) -> bool:
    """Every step was; those that compute a prompt beside decodes are bounded by it."""
    return all(step.predicted_us is not None for step in seen.steps.steps)


def hit_inside_page(seen: Seen) -> bool:
    """The cell's request did, unless it had to compute all of its prompt for its log-probabilities; a later one did."""
    if seen.params.prompt_logprobs is None:
        is_hit = all(map(seen.is_inside_page, seen.answers))
    else:
        is_hit = not any(answer.num_cached for answer in seen.answers)
    return is_hit and seen.is_inside_page(seen.others["later hit 0"])


def was_copied_while_written(seen: Seen) -> bool:
    """A later request began with a copy of a page in which the cell's request went on writing."""
    mine, its = seen.steps.numbers_of(seen.request_ids), seen.steps.numbers_of(["later cow 0"])
    return seen.is_inside_page(seen.others["later cow 0"]) and mine[0] < its[0] < mine[-1]


def had_pages_of_one(seen: Seen) -> bool:
    return seen.page_size == 1 and seen.steps.peak_used_pages >= PROMPT_LENGTH + len(seen.answers[0].token_ids) - 1


def had_pages_of_sixteen(seen: Seen) -> bool:
    return seen.page_size == 16 and seen.steps.peak_used_pages < PROMPT_LENGTH / 2


def was_preempted(seen: Seen) -> bool:
    return not set(seen.request_ids).isdisjoint(seen.steps.preempted)


def drafts_were_verified(seen: Seen) -> bool:
    """Some of the request's were accepted, and some rejected. Those that a grammar forbids are cut before."""
    chunks = [chunk for chunk in seen.steps.chunks_of(seen.request_ids) if chunk.drafted]
    was_rejected = any(chunk.accepted < chunk.drafted for chunk in chunks) or seen.params.is_constrained
    return any(chunk.accepted for chunk in chunks) and was_rejected


def a_model_drafted(seen: Seen) -> bool:
    """Drafts were verified, and whatever it drafted for a greedy request is what it says when it computes all anew.

    So its own keys and values are right, though no answer depends on them.
    """
    for name, is_right in seen.guessed().items():
        for chunk in seen.steps.chunks_of([name]):
            end = chunk.start + chunk.count
            verified = [*is_right[end - chunk.drafted : end], False]  # the answer may end before the draft
            if min(chunk.accepted, len(verified) - 1) != verified.index(False):
                return False
    return drafts_were_verified(seen)


def neighbours_were_aborted(seen: Seen) -> bool:
    """In nearly every step with the cell's requests, and some of them while they ran."""
    ran = any(name.startswith("passing") for name in seen.steps.admitted)
    return ran and seen.num_aborted >= len(seen.steps.numbers_of(seen.request_ids)) - 1


def ran_ahead(seen: Seen) -> bool:
    """A step was launched before the one before it was read, while the cell's request was in both or waited for one."""
    steps = seen.steps.steps
    return any(
        later.at_us < step.read_us and not step.request_ids.isdisjoint(seen.request_ids)
        for step, later in itertools.pairwise(steps)
    )


def was_reordered(seen: Seen) -> bool:
    """The first that arrived was not the first to run."""
    names = {"beside 0", "beside 1", *seen.request_ids}
    return next(name for name in seen.steps.admitted if name in names) != "beside 0"


def was_overtaken(seen: Seen) -> bool:
    """The first that arrived, the cell's request, ran after those with a higher priority."""
    order = list(dict.fromkeys(seen.steps.admitted))
    return all(order.index(name) < order.index(seen.request_ids[0]) for name in ("beside 0", "beside 1"))


def was_kept_apart(seen: Seen) -> bool:
    """Of equal prompts with other salts, those before were cached and not hit, and the one after hit nothing."""
    hit_by_own_kind = seen.others["before salt 1"].num_cached >= PROMPT_LENGTH
    hit_by_others = seen.answers[0].num_cached >= PROMPT_LENGTH - 1 or seen.others["later salt 0"].num_cached > 0
    return hit_by_own_kind and not hit_by_others


def choices_differ(seen: Seen) -> bool:
    return len(seen.answers) == 3 and len({tuple(answer.token_ids) for answer in seen.answers}) > 1


def fits(shape: str) -> Callable[[Seen], bool]:
    """As far as the answer goes, it has small letters where `shape` has an "a", digits where that has a "0"."""
    kinds = {"a": str.islower, "0": str.isdigit, "-": "-".__eq__}

    def evidence(seen: Seen) -> bool:
        text = seen.plain.text or ""
        is_like_it = all(kinds[kind](letter) for kind, letter in zip(shape, text, strict=False))
        return 6 < len(text) <= len(shape) and is_like_it and changed_by("grammars")(seen)

    return evidence


def is_call(seen: Seen) -> bool:
    """As far as the answer goes. White space is left to the model."""
    text, call = "".join((seen.plain.text or "").split()), "".join(tools.as_text('{"to": "').split())
    beginning = call.removesuffix("}")
    return len(text) > 12 and (text.startswith(beginning) or beginning.startswith(text))


def was_penalised(seen: Seen) -> bool:
    without = seen.plain_with(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return seen.answers[0].token_ids != without.token_ids


def was_held_back(seen: Seen) -> bool:
    """Without min_tokens the answer would have ended earlier than with it."""
    without, tokens = seen.plain_with(min_tokens=0).token_ids, seen.answers[0].token_ids
    return len(without) < min(len(tokens), seen.params.min_tokens)


def stopped_at_token(seen: Seen) -> bool:
    """Or would have been, had it not been stopped at a text before."""
    answer = seen.plain_without("stop strings") if seen.params.stop else seen.answers[0]
    return answer.finish_reason == "stop" and answer.token_ids[-1] == seen.params.stop_token_ids[-1]


def stopped_at_text(seen: Seen) -> bool:
    """And no more tokens were computed, but for one that was launched ahead. A server takes a moment to say so."""
    answer, text = seen.answers[0], seen.plain_without("stop strings").text or ""
    is_cut = answer.text == text[: text.index(seen.params.stop[0])] != text
    num_due = sum(len(answer.token_ids) - 1 for answer in seen.answers) + int(str(seen.steps.config["run_ahead"]))
    is_over = came_by_server(seen) or seen.steps.num_decodes(seen.request_ids) <= num_due
    return answer.finish_reason == "stop" and is_cut and is_over


def came_by_server(seen: Seen) -> bool:
    """The ids are such as AsyncEngine makes."""
    return all("#" in name for name in seen.request_ids)


def had_logprobs(seen: Seen) -> bool:
    return all(
        len(answer.logprobs or ()) == len(answer.token_ids) > 0
        and all(len(entry.token_ids) == 1 + (seen.params.logprobs or 0) for entry in answer.logprobs or ())
        for answer in seen.answers
    )


def had_prompt_logprobs(seen: Seen) -> bool:
    return all(len(answer.prompt_logprobs or ()) == PROMPT_LENGTH - 1 for answer in seen.answers)
