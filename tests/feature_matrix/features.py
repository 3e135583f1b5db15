"""The features, in the order of the matrix's rows and columns. A new one is one more declaration in `FEATURES`."""

from __future__ import annotations

import re
from dataclasses import replace

from mini_sglang import SamplingParams
from tests.feature_matrix import evidence, tools
from tests.feature_matrix.feature import DRAFT_MODEL, GREEDY, PROMPT_LENGTH, Draft, Feature, Fields, Other

ONE_PAGE_SIZE = "An engine has one page size."
ONE_SCHEDULE = "An engine has one schedule."
ONE_WAY = "A request comes in one way."
NO_INSIDE = "A page of one token has no inside: it matches as a whole or not at all, so nothing of it is ever copied."

SEEDED: Fields = {"temperature": 1.0, "seed": 8}
REGEX, SHAPE = "[a-z]{6}(-[0-9]{3}){4}", "aaaaaa-000-000-000-000"
FAVOURED = dict.fromkeys(range(100, 108), 4.0)  # tokens that an answer comes back to: those that penalties choose among
HELD_BACK = 7  # tokens in a row
LOGPROBS = 2
NEIGHBOUR_TOKENS = 24  # as many as the cell's request has, unless a feature says otherwise
LAST_STOP = 16  # the last token that an answer is stopped at
SAME_BEGINNING = Other(shared=38, own=5)  # which ends inside a page of 4 and of 16
SAME_PROMPT = Other(shared=PROMPT_LENGTH, own=3)
# A cell's request is in a batch with these, of which the second draws with a seed.
BESIDE = (
    Other(own=30, params=SamplingParams(temperature=0.0, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True, logprobs=1)),
    Other(own=29, params=SamplingParams(seed=3, max_tokens=NEIGHBOUR_TOKENS, ignore_eos=True, presence_penalty=0.5)),
)


# -- what a request asks for, where that depends on what it would get else --------------------------------------------


def forbid_token(draft: Draft) -> Fields:
    """The fourth or, where a grammar leaves no other, a later one."""
    answer = draft.answer()
    for token_id in answer.token_ids[3:]:
        fields: Fields = {"logit_bias": {token_id: -100.0, 77: 1.5}}
        if token_id not in draft.answer(fields).token_ids:
            return fields
    raise AssertionError(f"nothing can be forbidden in {answer.token_ids}")


def hold_back_stops(draft: Draft) -> Fields:
    """The sixth token and those after it, each of which would end the answer: until `HELD_BACK` of them did not come.

    Where nothing else may be drawn, as in some places of a grammar, a token is not held back.
    """
    fields: dict[str, object] = {"ignore_eos": False}
    stops: list[int] = []
    for place in range(5, len(draft.answer().token_ids)):
        token_id = draft.answer(fields).token_ids[place]
        longer: Fields = {**fields, "stop_token_ids": [*stops, token_id], "min_tokens": place + 1}
        if token_id not in draft.answer(longer).token_ids[: place + 1]:
            stops.append(token_id)
            fields.update(longer)
        if len(stops) == HELD_BACK:
            break
    assert stops, "nothing can be held back"
    return fields


def stop_at_token(draft: Draft) -> Fields:
    token_ids = draft.answer().token_ids[:-1][: LAST_STOP + 1]
    last = max(index for index, token_id in enumerate(token_ids) if token_id not in token_ids[:index])
    return {"stop_token_ids": [token_ids[last]]}


def stop_at_text(draft: Draft) -> Fields:
    """At the last two characters that no earlier part of the answer has; in ASCII no token holds a part of one."""
    text = draft.answer().text or ""
    pairs = [match[1] for match in re.finditer("(?=([!-~]{2}))", text)]
    return {"stop": [max(pairs, key=text.index), "never said"]}


# -- the features -----------------------------------------------------------------------------------------------------

FEATURES = (
    Feature(
        name="chunked prompts",
        short="chunk",
        meaning="A step computes 7 tokens at most, so that a prompt takes several.",
        settings={"max_prefill_tokens": 7},
        evidence=evidence.was_chunked,
    ),
    Feature(
        name="bounded steps",
        short="ms",
        meaning="Beside requests that decode, prompts get as many tokens as are expected to take a millisecond.",
        settings={"max_step_ms": 1},
        later=[Other(own=9)],
        evidence=evidence.was_predicted,
    ),
    Feature(
        name="preemption",
        short="preempt",
        meaning="The pool is too small for all that run: the request gives its pages back and resumes later.",
        pool={1: 128, 4: 32, 16: 10}.__getitem__,
        # answers of one token, so that the scheduler expects short ones and admits more than the pool can hold
        before=[Other(own=1, params=SamplingParams(temperature=0.0, max_tokens=1))] * 48,
        evidence=evidence.was_preempted,
    ),
    Feature(
        name="hits inside a page",
        short="hit",
        meaning="A request that has ended had the same beginning; what the cache has of it ends inside a page.",
        before=[SAME_BEGINNING],
        later=[Other(shared=37, own=6)],
        evidence=evidence.hit_inside_page,
    ),
    Feature(
        name="copy on write",
        short="cow",
        meaning="A request with the same prompt comes while this one decodes, and goes on in a copy of its last page.",
        later=[SAME_PROMPT],
        evidence=evidence.was_copied_while_written,
    ),
    Feature(
        name="pages of 1",
        short="p1",
        meaning="A page of the KV cache holds one token.",
        settings={"page_size": 1},
        senseless={"pages of 16": ONE_PAGE_SIZE, "hits inside a page": NO_INSIDE, "copy on write": NO_INSIDE},
        evidence=evidence.had_pages_of_one,
    ),
    Feature(
        name="pages of 16",
        short="p16",
        meaning="A page of the KV cache holds 16 tokens, as by default; in other cells 4.",
        settings={"page_size": 16},
        evidence=evidence.had_pages_of_sixteen,
    ),
    Feature(
        name="aborts",
        short="abort",
        meaning="In every step a neighbour with the same beginning comes, and the last one is aborted; one may stay.",
        passing=Other(shared=20, own=6, params=SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)),
        later=[Other(shared=20, own=6)],
        evidence=evidence.neighbours_were_aborted,
    ),
    Feature(
        name="run-ahead",
        short="ahead",
        meaning="A step is launched before the one before it is read.",
        settings={"run_ahead": 1},
        evidence=evidence.ran_ahead,
    ),
    Feature(
        name="speculation",
        short="draft",
        meaning="Tokens are drafted, rightly and wrongly, and verified in the step of the token before them.",
        settings={"speculative": "ngram", "speculative_gate": False},
        senseless={"draft model": "An engine has one proposer."},
        evidence=evidence.drafts_were_verified,
    ),
    Feature(
        name="draft model",
        short="dm",
        meaning="Another model drafts, which is right about half of the time; where a grammar rules, only that drafts.",
        settings={"speculative": DRAFT_MODEL, "speculative_tokens": 3, "speculative_gate": False},
        senseless={
            "run-ahead": "A model drafts whenever it may, and behind known tokens only: each step is waited for."
        },
        evidence=evidence.a_model_drafted,
    ),
    Feature(
        name="lpm",
        short="lpm",
        meaning="Who finds most of its prompt in the cache runs first.",
        settings={"schedule": "lpm"},
        before=[SAME_BEGINNING, replace(BESIDE[1], params=GREEDY)],
        senseless={"priority": ONE_SCHEDULE},
        evidence=evidence.was_reordered,
    ),
    Feature(
        name="priority",
        short="prio",
        meaning="Who has the higher priority runs first: here the neighbours, which come later.",
        settings={"schedule": "priority"},
        overtakers=True,
        evidence=evidence.was_overtaken,
    ),
    Feature(
        name="cache salt",
        short="salt",
        meaning="Requests with the same prompt and another salt run before and beside, and share nothing with it.",
        salt="ours",
        before=[replace(SAME_PROMPT, salt="theirs")] * 2,
        later=[replace(SAME_PROMPT, salt="outside")],
        evidence=evidence.was_kept_apart,
    ),
    Feature(
        name="n > 1",
        short="n",
        meaning="Three choices of one prompt, each with its own seed.",
        choices=3,
        fields=lambda draft: SEEDED,
        evidence=evidence.choices_differ,
    ),
    Feature(
        name="seeds",
        short="seed",
        meaning="Tokens are drawn with a seed, from those that top-k, top-p and min-p leave.",
        fields=lambda draft: {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        evidence=evidence.changed_by("seeds"),
    ),
    Feature(
        name="grammars",
        short="regex",
        meaning="The answer matches a regular expression.",
        fields=lambda draft: {"regex": REGEX, "max_tokens": 40},
        senseless={"tools": "An answer follows one grammar, and a request with two is refused."},
        evidence=evidence.fits(SHAPE),
    ),
    Feature(
        name="tools",
        short="tool",
        meaning="The answer is a call of a function, held to its schema by a grammar.",
        is_chat=True,
        fields=lambda draft: {"tool_grammar": tools.GRAMMAR, "max_tokens": 80},
        evidence=evidence.is_call,
    ),
    Feature(
        name="penalties",
        short="pen",
        meaning="Of a few tokens that are made likely, those that were there before are made less so, in three ways.",
        fields=lambda draft: {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": FAVOURED,
        },
        is_reproducible=True,
        evidence=evidence.was_penalised,
    ),
    Feature(
        name="logit bias",
        short="bias",
        meaning="A token that would come is made all but impossible, another one more likely.",
        fields=forbid_token,
        is_reproducible=True,
        evidence=evidence.changed_by("logit bias"),
    ),
    Feature(
        name="min_tokens",
        short="min",
        meaning="Tokens that would come early, and end the answer, are held back.",
        fields=hold_back_stops,
        is_reproducible=True,
        evidence=evidence.was_held_back,
    ),
    Feature(
        name="stop tokens",
        short="stop id",
        meaning="The answer ends with a token that the request names.",
        fields=stop_at_token,
        is_reproducible=True,
        evidence=evidence.stopped_at_token,
    ),
    Feature(
        name="stop strings",
        short="stop",
        meaning="The answer ends before a text that the request names.",
        fields=stop_at_text,
        needs_text=True,
        senseless={"engine": "An engine knows no text: `LLM` and server look for stop strings, and abort."},
        evidence=evidence.stopped_at_text,
    ),
    Feature(
        name="log-probabilities",
        short="lp",
        meaning="Log-probabilities come with every token of the answer, with those of the best alternatives.",
        fields=lambda draft: {"logprobs": LOGPROBS},
        is_reproducible=True,
        evidence=evidence.had_logprobs,
    ),
    Feature(
        name="prompt log-probabilities",
        short="plp",
        meaning="Log-probabilities come with every token of the prompt, which is computed for them, cached or not.",
        fields=lambda draft: {"prompt_logprobs": LOGPROBS},
        is_reproducible=True,
        evidence=evidence.had_prompt_logprobs,
    ),
    Feature(
        name="sliding window",
        short="window",
        meaning="A token sees the last 24 positions only.",
        model={"sliding_window": 24},
        is_reproducible=True,
        evidence=evidence.changed_by("sliding window"),
    ),
    Feature(
        name="mixtures of experts",
        short="moe",
        meaning="A router chooses two of four experts for each token.",
        model={"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        is_reproducible=True,
        evidence=evidence.changed_by("mixtures of experts"),
    ),
    Feature(
        name="gpt-oss",
        short="oss",
        meaning="Attention has sinks, a window in every other layer, and experts with biases and a clamped gate.",
        model={"family": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
        is_reproducible=True,
        senseless={
            "sliding window": "It has one, in every other layer.",
            "mixtures of experts": "It is one, of its own family.",
        },
        evidence=evidence.changed_by("gpt-oss"),
    ),
    Feature(
        name="GGUF blocks",
        short="gguf",
        meaning="The weights come from blocks of 4 bits (Q4_1) in a GGUF file.",
        model={"gguf": "Q4_1"},
        is_reproducible=True,
        senseless={
            "sliding window": "No architecture that GGUF files are read of has a window: there, Mistral is a Llama.",
            "gpt-oss": "It is read from safetensors alone.",
        },
        evidence=evidence.changed_by("GGUF blocks"),
    ),
    Feature(
        name="TP 2",
        short="tp2",
        meaning="Two ranks share the model.",
        settings={"tp": 2},
        evidence=lambda seen: seen.steps.config["tp"] == 2,
    ),
    Feature(
        name="fp8 KV",
        short="fp8",
        meaning="Keys and values are stored in 8 bits; the plain run stores them so too.",
        numerics={"kv_cache_dtype": "fp8"},
        evidence=evidence.changed_by("fp8 KV"),
    ),
    Feature(
        name="packed weights",
        short="w4",
        meaning="Matrices are quantised to 4 bits and multiplied in integers; the plain run does so too.",
        numerics={"quantization": "w4a16", "weights": "packed"},
        senseless={
            "GGUF blocks": "A checkpoint that is quantised is not quantised again; its blocks are packed as well.",
            "fp8 KV": "The attention of CPUs that packed weights need stores no fp8.",
            "TP 2": "A rank quantises its part of the activations, whose blocks lie elsewhere and round otherwise.",
        },
        evidence=evidence.changed_by("packed weights"),
    ),
    Feature(
        name="LLM",
        short="LLM",
        meaning="The request comes through `LLM.generate`.",
        way="LLM",
        senseless={"server": ONE_WAY, "engine": ONE_WAY},
        evidence=lambda seen: all(name.startswith("llm-") for name in seen.request_ids),
    ),
    Feature(
        name="server",
        short="server",
        meaning="The request comes over HTTP.",
        way="server",
        senseless={"engine": ONE_WAY},
        evidence=evidence.came_by_server,
    ),
    Feature(
        name="engine",
        short="engine",
        meaning="The request comes through `Engine.add_request`, as in all cells of which nothing else is said.",
        way="engine",
        evidence=lambda seen: all(name.startswith("target") for name in seen.request_ids),
    ),
)
