"""LiteLLM: its OpenAI, vLLM and Anthropic providers."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.tiny import RunningServer

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import fetches a list of prices
litellm = pytest.importorskip("litellm")

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "maxLength": 8}},
            "required": ["zone"],
        },
    },
}
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


def settings(server: RunningServer, provider: str, **more: Any) -> dict[str, Any]:
    url = server.url if provider == "anthropic" else f"{server.url}/v1"
    return {"model": f"{provider}/smollm2-135m", "api_base": url, "api_key": "none", "temperature": 0, **more}


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_chat_plain_and_streamed(server: RunningServer, provider: str, question: str, answer: str) -> None:
    messages = [{"role": "user", "content": question}]
    asked = settings(server, provider, messages=messages, max_tokens=8)
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == answer
    assert whole.usage.completion_tokens == 8
    assert text_of(list(litellm.completion(**asked, stream=True))) == answer


def test_the_asynchronous_calls(server: RunningServer, question: str, answer: str) -> None:
    messages = [{"role": "user", "content": question}]
    asked = settings(server, "openai", messages=messages, max_tokens=8)

    async def run() -> tuple[str, str]:
        whole = await litellm.acompletion(**asked)
        stream = await litellm.acompletion(**asked, stream=True)
        return whole.choices[0].message.content, text_of([chunk async for chunk in stream])

    assert asyncio.run(run()) == (answer, answer)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_tool_must_be_called(server: RunningServer, provider: str) -> None:
    messages = [{"role": "user", "content": "What time is it in Lima?"}]
    asked = settings(server, provider, messages=messages, max_tokens=64, parallel_tool_calls=False)
    [call, *_] = litellm.completion(**asked, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    assert call.function.name == "get_time"
    assert list(json.loads(call.function.arguments)) == ["zone"]


def test_log_probabilities_and_completions(server: RunningServer, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    asked = settings(server, "openai", messages=messages, max_tokens=2, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs) for entry in litellm.completion(**asked).choices[0].logprobs.content] == [2, 2]
    completion = settings(server, "text-completion-openai", prompt="The capital of France is", max_tokens=2)
    assert litellm.text_completion(**completion).choices[0].text == " Paris."


def test_responses(server: RunningServer, question: str) -> None:
    asked = settings(server, "openai", input=question, max_output_tokens=16)
    whole = litellm.responses(**asked)
    events = list(litellm.responses(**asked, stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output[0].content[0].text
