"""What makes text: templates end soon and raise FieldError at worst; pieces of any tokens join to the whole text."""

from __future__ import annotations

import copy

import pytest
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mini_sglang.errors import FieldError
from mini_sglang.text.detokenizer import IncrementalDetokenizer
from mini_sglang.text.tokenizer import Tokenizer
from tests.fuzz.budget import fuzz

VALUES = st.sampled_from(
    [
        *("messages", "'ab'", "'%s'", "'{}'", "[1]", "{}", "none", "true", "7", "-1", "99999", "10**9", "ns.s", "ns.l"),
        *("range(9)", "range(99999)", "messages[0]", "messages[0].content", "x", "loop", "namespace", "dict", "cycler"),
        *("''.__class__", "self", "caller", "f", "tools", "strftime_now('%H')", "f(ns.s)"),
    ]
)
OPERATORS = st.sampled_from(["+", "-", "*", "**", "/", "//", "%", "~", "==", "<", "in", "and", "or"])
FILTERS = st.sampled_from(
    [
        *("length", "upper", "join", "join('ab')", "tojson", "tojson(indent=9999999)", "list", "string", "reverse"),
        *("center(99999999)", "indent(9999999)", "replace('a', 'bb')", "batch(3)", "batch(9, 'x')", "sort", "unique"),
        *(
            "map('upper')",
            "select",
            "first",
            "last",
            "sum",
            "int",
            "float",
            "trim",
            "format(1)",
            "wordwrap(1)",
            "items",
        ),
        *(
            "attr('__class__')",
            "map(attribute='__class__')",
            "groupby(0)",
            "dictsort",
            "urlencode",
            "xmlattr",
            "slice(2)",
        ),
        *("filesizeformat", "pprint", "random", "title", "truncate(3)", "round", "abs", "min", "max", "tojson|length"),
    ]
)
EXPRESSIONS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.tuples(inner, OPERATORS, inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, FILTERS).map("|".join).map(lambda text: f"({text})"),
        st.tuples(
            inner, st.sampled_from(["split('a')", "strip()", "items()", "format(1)", "ljust(99)", "join([])"])
        ).map(lambda parts: f"({parts[0]}).{parts[1]}"),
        st.tuples(inner, inner).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]})[{parts[1]}]"),
    ),
    max_leaves=5,
)
STATEMENTS = st.recursive(
    EXPRESSIONS.map(lambda text: f"{{{{ {text} }}}}")
    | EXPRESSIONS.map(lambda text: f"{{% set ns.s = {text} %}}")
    | EXPRESSIONS.map(lambda text: f"{{% set ns.l = [ns.l, {text}] %}}")
    | st.sampled_from(
        ["{% break %}", "{% include 'a' %}", "{{ f(1) }}", "{#", "{% endif %}", "text", "{{ loop.index }}"]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(EXPRESSIONS, inner).map(lambda parts: f"{{% for i in {parts[0]} %}}{parts[1]}{{% endfor %}}"),
        st.tuples(EXPRESSIONS, inner).map(lambda parts: f"{{% if {parts[0]} %}}{parts[1]}{{% endif %}}"),
        inner.map(lambda text: f"{{% macro f(x) %}}{text}{{% endmacro %}}"),
        inner.map(lambda text: f"{{% set ns.s %}}{{{{ ns.s }}}}{text}{{% endset %}}"),
    ),
    max_leaves=6,
)


def test_templates(tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, bound in (("MOST_ROUNDS", 20_000), ("MOST_CHARACTERS", 1 << 20)):
        monkeypatch.setattr(f"mini_sglang.text.template_bounds.{name}", bound)
    messages = [{"role": "user", "content": "Hi %s {} <|im_end|>"}] * 2

    refused: list[str] = []

    def check(template: str) -> None:
        changed = copy.copy(tiny_tokenizer)
        changed.chat_template = "{% set ns = namespace(s='ab', l=[]) %}" + template
        try:
            Tokenizer.of(changed, frozenset()).apply_chat_template(messages)
        except FieldError as error:
            refused.append(str(error))

    fuzz(check, STATEMENTS)
    assert max(map(len, refused)) < 1000


def test_pieces_join_to_the_whole_text(builtin_tokenizer: Tokenizer) -> None:
    ids = st.integers(0, builtin_tokenizer.vocab_size + 200)

    def check(made: tuple[list[int], bool]) -> None:
        token_ids, skips = made
        detokenizer = IncrementalDetokenizer(builtin_tokenizer, skip_special_tokens=skips)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        assert "".join([*pieces, detokenizer.flush()]) == builtin_tokenizer.decode(token_ids, skip_special_tokens=skips)

    fuzz(check, st.tuples(st.lists(ids, max_size=40), st.booleans()))
