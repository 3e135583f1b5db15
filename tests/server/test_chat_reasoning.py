"""Reasoning through a real server with the stock client, plain and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from mini_sglang.text.tokenizer import Tokenizer
from tests.server.conftest import ScriptedEngine

# As Qwen3's: the model thinks unless the prompt holds empty reasoning.
QWEN3 = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}<|im_end|>
{% endfor %}
{%- if reasoning_effort %}Effort: {{ reasoning_effort }}
{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
OPENED = QWEN3 + "{% if add_generation_prompt %}<think>\n{% endif %}"  # as DeepSeek's
NO_REASONING = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
QUESTION: Any = [{"role": "user", "content": "What is 2+2?"}]

Start = Callable[..., Callable[..., dict[str, Any]]]


@pytest.fixture
def start(serve: Callable[..., str], with_template: Callable[[str], Tokenizer]) -> Start:
    """`start(template, …)(**fields)` → what an answer says, made sure of to be the same plain and streamed."""

    def start(template: str, **settings: Any) -> Callable[..., dict[str, Any]]:
        url = serve(tokenizer=with_template(template), **settings)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)

        def ask(**fields: Any) -> dict[str, Any]:
            body = {"model": "scripted", "messages": QUESTION, "max_tokens": 100, **fields}
            answer = client.chat.completions.create(**body)
            message = answer.choices[0].message
            said = {
                "content": message.content,
                "reasoning": getattr(message, "reasoning_content", ""),
                "reason": answer.choices[0].finish_reason,
                "tokens": answer.usage.completion_tokens_details.reasoning_tokens,
            }
            assert getattr(message, "reasoning", "") == said["reasoning"]
            chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
            assert chunks[-1].usage == answer.usage
            deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
            assert "".join(delta.content or "" for delta in deltas) == said["content"]
            for name in ("reasoning_content", "reasoning"):
                assert "".join(getattr(delta, name, None) or "" for delta in deltas) == said["reasoning"]
            return said

        return ask

    return start


def test_reasoning_and_an_answer(start: Start, write: Callable[[str], None], engine: ScriptedEngine) -> None:
    write("<think>\nTwo and two make four.\n</think>\n\nIt is 4.")
    said = start(QWEN3)()
    assert said["content"] == "It is 4."
    assert said["reasoning"] == "Two and two make four."
    assert said["reason"] == "stop"
    reasoning = engine.tokenizer.encode("<think>\nTwo and two make four.\n</think>")
    assert abs(said["tokens"] - len(reasoning)) <= 1


def test_a_prompt_that_has_opened_the_reasoning(start: Start, write: Callable[[str], None]) -> None:
    write("Two and two make four.\n</think>\n\nIt is 4.")
    said = start(OPENED)()
    assert (said["content"], said["reasoning"]) == ("It is 4.", "Two and two make four.")


def test_without_thinking_the_answer_is_content(start: Start, write: Callable[[str], None]) -> None:
    write("It is 4.")
    ask = start(QWEN3)
    for fields in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
        {},
    ):
        assert ask(**fields) == {"content": "It is 4.", "reasoning": "", "reason": "stop", "tokens": 0}


@pytest.mark.parametrize("template", [QWEN3, OPENED])
def test_reasoning_that_is_cut_off(start: Start, write: Callable[[str], None], template: str) -> None:
    write("<think>\nTwo and two make four, and so on.</think>It is 4." if template == QWEN3 else "Two and so on.")
    said = start(template)(max_tokens=8)
    assert said["content"] == ""
    assert said["reasoning"].startswith("Two and")
    assert (said["reason"], said["tokens"]) == ("length" if template == QWEN3 else "stop", said["tokens"])
    assert said["tokens"] == 8 or template == OPENED


@pytest.mark.parametrize(
    ("prefix", "content", "reasoning"),
    [("It", "It is 4.", ""), ("<think>Two", "", "It is 4."), ("<think>Two</think>", "It is 4.", "")],
)
def test_an_answer_that_goes_on_with_a_message(
    start: Start, write: Callable[[str], None], prefix: str, content: str, reasoning: str
) -> None:
    write("It is 4.")
    messages = [{"role": "user", "content": "What does <think> mean?"}, {"role": "assistant", "content": prefix}]
    said = start(QWEN3)(messages=messages, extra_body={"continue_final_message": True})
    assert (said["content"], said["reasoning"]) == (content, reasoning)


def test_reasoning_and_then_a_call(serve: Any, with_template: Any, write: Callable[[str], None]) -> None:
    write('<think>I need f.</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    client = openai.OpenAI(base_url=f"{serve(tokenizer=with_template(QWEN3))}/v1", api_key="none", max_retries=0)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    answer: Any = client.chat.completions.create(model="scripted", messages=QUESTION, tools=tools, max_tokens=100)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "I need f.")
    assert choice.message.tool_calls[0].function.name == "f"
    assert choice.finish_reason == "tool_calls"


def test_markers_stay_where_there_is_no_parser(start: Start, write: Callable[[str], None]) -> None:
    text = "<think>Two.</think>4"
    write(text)
    for ask in (start(QWEN3, reasoning_parser="none"), start(NO_REASONING)):
        assert ask()["content"] == text
    assert start(NO_REASONING, reasoning_parser="think")()["content"] == "4"


def test_effort_and_earlier_reasoning_reach_the_template(start: Start, engine: ScriptedEngine) -> None:
    earlier = {"role": "assistant", "content": "Hm.", "reasoning": "Once.", "reasoning_content": "Once."}
    start(QWEN3)(messages=[*QUESTION, earlier, *QUESTION], reasoning_effort="low")
    prompt = engine.tokenizer.decode(engine.calls[0].prompt_ids)
    assert "Effort: low" in prompt
    assert "<think>Once.</think>Hm." in prompt
