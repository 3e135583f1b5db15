"""Pydantic AI, on either route: an agent must call a function, gets its result and ends, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Annotated, Any

import pytest
from pydantic import Field

from tests.tiny import RunningServer

pydantic_ai = pytest.importorskip("pydantic_ai")
models = pytest.importorskip("pydantic_ai.models.openai")
providers = pytest.importorskip("pydantic_ai.providers.openai")

Zones = list[str]


def first_a_call(context: Any) -> dict[str, Any]:
    """Settings of each step: in the first a function must be called, in the others it must not."""
    return {
        **{"temperature": 0, "max_tokens": 64, "parallel_tool_calls": False},
        "tool_choice": "required" if context.run_step <= 1 else "none",
    }


def agent(server: RunningServer, route: str, asked: Zones) -> Any:
    """An agent with one function, which notes the zones that it is asked for."""

    def get_time(zone: Annotated[str, Field(max_length=8)]) -> str:
        """The local time in a time zone."""
        asked.append(zone)
        return "09:30"

    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    kinds = {"chat": models.OpenAIChatModel, "responses": models.OpenAIResponsesModel}
    model = kinds[route]("smollm2-135m", provider=provider)
    return pydantic_ai.Agent(model, model_settings=first_a_call, tools=[get_time], instructions="Tell the time.")


async def whole(started: Any) -> tuple[str, list[Any]]:
    result = await started.run("What time is it in Lima?")
    return result.output, result.all_messages()


async def streamed(started: Any) -> tuple[str, list[Any]]:
    kinds: list[str] = []

    async def note(context: Any, events: AsyncIterable[Any]) -> None:
        kinds.extend([event.event_kind async for event in events])

    async with started.run_stream("What time is it in Lima?", event_stream_handler=note) as result:
        output = await result.get_output()
    assert "function_tool_call" in kinds
    return output, result.all_messages()


@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_loop_calls_gets_the_result_and_ends(server: RunningServer, route: str, run: Any) -> None:
    asked: Zones = []
    output, messages = asyncio.run(run(agent(server, route, asked)))
    assert output
    [zone] = asked
    assert len(zone) <= 8
    parts = [part for message in messages for part in message.parts]
    [call] = [part for part in parts if part.part_kind == "tool-call"]
    [result] = [part for part in parts if part.part_kind == "tool-return"]
    assert call.args_as_dict() == {"zone": zone}
    assert (result.tool_call_id, result.content) == (call.tool_call_id, "09:30")
