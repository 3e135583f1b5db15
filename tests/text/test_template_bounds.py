"""A chat template is a program that comes with a model: it reaches no Python, and costs little, whatever it says."""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from mini_sglang.errors import FieldError
from mini_sglang.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi", "parts": [1]}]


def render(library_tokenizer: PreTrainedTokenizerFast, template: str) -> str:
    changed = copy.copy(library_tokenizer)
    changed.chat_template = template
    tokenizer = Tokenizer.of(changed, frozenset())
    return tokenizer.decode(tokenizer.apply_chat_template(MESSAGES, given={"list": [1]}))


def growing(step: str, last: str = "{{ ns.s }}") -> str:
    return f"{{% set ns = namespace(s='ab') %}}{{% for i in range(60) %}}{step}{{% endfor %}}{last}"


TOO_MUCH = {
    "{{ range(10**9) }}": "Range too big",
    "{{ 'a' * 10**10 }}": "writes more than",
    "{{ [1] * 10**10 }}": "writes more than",
    "{{ 10**100**100 }}": "a number of more than",
    "{{ 10**1000 * 10**1000 }}": "a number of more than",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "recursion",
    "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}": "recursion",
    growing("{% set ns.s = ns.s ~ ns.s %}"): "writes more than",
    growing("{% set ns.s = ns.s + ns.s %}"): "writes more than",
    growing("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"): "writes more than",
    "{{ 'a'.ljust(10**10) }}": "pads text",
    "{{ 'a'|center(10**10) }}": "pads text",
    "{{ 'a'|indent(10**9) }}": "pads text",
    "{{ 'a\tb'.expandtabs(10**9) }}": "pads text",
    "{{ '%99999999999d' % 1 }}": "huge width",
    "{{ '%*d' % (10**9, 1) }}": "pads text",
    "{{ '%99999999999d'|format(1) }}": "huge width",
    "{{ '{:99999999999}'.format(1) }}": "huge width",
    "{{ ('a'*60000).replace('a', 'b'*60000) }}": "writes more than",
    "{{ ('a'*60000)|replace('a', 'b'*60000) }}": "writes more than",
    "{{ ('a,'*60000).split(',')|join('b'*60000) }}": "writes more than",
    "{{ lipsum(10**6) }}": "'lipsum' is undefined",
}
OUT_OF_REACH = {
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
    "{{ joiner.__init__.__globals__['os'].popen('id').read() }}": "unsafe",
    "{{ '{0.__class__.__mro__}'.format('') }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{% set mine = [messages] %}{{ mine.pop().pop() }}": "unsafe",
    "{{ messages[0].parts.append(1) }}": "unsafe",
    "{{ given.list.pop() }}": "unsafe",
    "{% set mine = [1] %}{{ mine.extend(mine) }}": "unsafe",
    "{% set mine = {} %}{{ mine.update(a=1) }}": "unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
}


@pytest.mark.parametrize("template", [*TOO_MUCH, *OUT_OF_REACH])
@pytest.mark.timeout(60)
def test_a_template_that_goes_too_far_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    with pytest.raises(FieldError) as caught:
        render(tiny_tokenizer, template)
    assert str(caught.value).startswith("messages are not accepted by the model's chat template: ")
    assert {**TOO_MUCH, **OUT_OF_REACH}[template] in str(caught.value)


def test_a_template_may_queue_things_in_a_list_of_its_own(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    queue = "{% set ns = namespace(queue=[]) %}{% for i in range(3) %}{% set _ = ns.queue.append(i) %}{% endfor %}"
    assert render(tiny_tokenizer, queue + "{{ ns.queue.pop(0) }} of {{ ns.queue }}") == "0 of [1, 2]"
    assert render(tiny_tokenizer, "{% set mine = messages|list %}{% set _ = mine.append(1) %}{{ mine|length }}") == "2"
    assert MESSAGES == [{"role": "user", "content": "Hi", "parts": [1]}]


def test_loops_and_nested_values_are_counted(
    tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mini_sglang.text.template_bounds.MOST_ROUNDS", 2000)
    nested = growing("{% set ns.s = [ns.s, ns.s] %}", "")
    for template in (
        "{% for i in range(99) %}{% for j in range(99) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        nested + "{{ ns.s }}",
        nested + "{{ ns.s|tojson }}",
        nested + "{{ ns.s ~ 'a' }}",
    ):
        with pytest.raises(FieldError, match="takes more than 2000 rounds"):
            render(tiny_tokenizer, template)
    assert render(tiny_tokenizer, "{% for i in range(1999) %}{% endfor %}a") == "a"
    assert render(tiny_tokenizer, "{% for i in range(1999) %}{% endfor %}b") == "b", "it was not counted anew"


def test_time_is_bounded(tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mini_sglang.text.template_bounds.MOST_SECONDS", 0.0)
    with pytest.raises(FieldError, match=r"computes for more than 0\.0 seconds"):
        render(tiny_tokenizer, "{% for i in range(100) %}{% endfor %}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%s!' % 'Hi' }} {{ 'a{}'.format(1) }} {{ '%05d'|format(7) }}", "Hi! a1 00007"),
        ("{{ [1, 2]|join(', ') }} {{ messages|map(attribute='content')|join }}", "1, 2 Hi"),
        ("{{ {'a': ['ö']}|tojson(indent=2) }}", '{\n  "a": [\n    "ö"\n  ]\n}'),
        ("{{ 'a' ~ 1 ~ none ~ [1] }} {{ 7 % 4 }} {{ 2**10 }} {{ 1 + 1 }} {{ '-' * 3 }} {{ [1] + [2] }}",
         "a1None[1] 3 1024 2 --- [1, 2]"),
        ("{% generation %}x{% endgeneration %}{{ '  a'.strip().upper() }}", "xA"),
        ("{% for m in messages %}{% if loop.first %}{{ loop.index }}{% endif %}{% break %}{% endfor %}", "1"),
        ("{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f('b') %}c{% endcall %}", "<bc>"),
        ("{# a comment #}a{#- and -#} b", "ab"),
        ("{% raw %}{{ x #}{% endraw %}", "{{ x #}"),
    ],
)  # fmt: skip
def test_what_templates_do_is_left_to_them(tiny_tokenizer: PreTrainedTokenizerFast, template: str, text: str) -> None:
    assert render(tiny_tokenizer, template) == text
    changed = copy.copy(tiny_tokenizer)
    expected = changed.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)
    assert text == expected, "transformers itself does something else"
