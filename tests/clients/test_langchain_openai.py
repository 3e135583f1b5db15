"""LangChain's ChatOpenAI, on either route, and OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.tiny import RunningServer

langchain_openai = pytest.importorskip("langchain_openai")


class Colour(BaseModel):
    """A colour."""

    name: str = Field(max_length=12)


def get_time(zone: str) -> str:
    """The local time in a time zone."""
    return f"09:30 in {zone}"


def chat(server: RunningServer, **more: Any) -> Any:
    settings = {"model": "smollm2-135m", "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    return langchain_openai.ChatOpenAI(**{**settings, "max_tokens": 8, **more})


def test_a_chat_plain_streamed_and_asynchronous(server: RunningServer, question: str, answer: str) -> None:
    model = chat(server, stream_usage=True)
    whole = model.invoke(question)
    assert whole.content == answer
    assert whole.usage_metadata["output_tokens"] == 8
    chunks = list(model.stream(question))
    assert "".join(chunk.content for chunk in chunks) == answer
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 8

    async def run() -> tuple[str, str]:
        return (await model.ainvoke(question)).content, "".join(
            [chunk.content async for chunk in model.astream(question)]
        )

    assert asyncio.run(run()) == (answer, answer)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(server: RunningServer, method: str) -> None:
    model = chat(server, max_tokens=64).with_structured_output(Colour, method=method)
    assert isinstance(model.invoke("Name a colour."), Colour)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_tools_result_goes_back(server: RunningServer, use_responses_api: bool) -> None:
    model = chat(server, max_tokens=64, use_responses_api=use_responses_api)
    forced = model.bind_tools([get_time], tool_choice="any", parallel_tool_calls=False)
    asked = forced.invoke("What time is it in Lima?")
    [call] = asked.tool_calls
    assert (call["name"], list(call["args"])) == ("get_time", ["zone"])
    messages: list[Any] = [("user", "What time is it in Lima?"), asked]
    messages.append({"role": "tool", "tool_call_id": call["id"], "content": get_time(**call["args"])})
    assert model.bind_tools([get_time]).invoke(messages).usage_metadata["output_tokens"] > 0


def test_responses_plain_and_streamed(server: RunningServer, question: str, answer: str) -> None:
    model = chat(server, use_responses_api=True, output_version="responses/v1")
    assert model.invoke(question).text == answer
    assert "".join(chunk.text for chunk in model.stream(question)) == answer


def test_completions(server: RunningServer) -> None:
    settings = {"model": "smollm2-135m", "base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0}
    model = langchain_openai.OpenAI(**settings, max_tokens=2)
    assert model.invoke("The capital of France is") == " Paris."
    assert "".join(model.stream("The capital of France is")) == " Paris."
    several = langchain_openai.OpenAI(**{**settings, "n": 2, "best_of": 2, "max_tokens": 2})
    assert len(several.generate(["The"]).generations[0]) == 2
