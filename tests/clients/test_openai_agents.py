"""OpenAI's Agents SDK, on either route: an agent must call a function, gets its result and ends, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import pytest
from pydantic import Field

from tests.tiny import RunningServer

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")

Zones = list[str]


def agent(server: RunningServer, route: str, asked: Zones, tool_choice: str) -> Any:
    """An agent with one function, which notes the zones that it is asked for."""

    def get_time(zone: Annotated[str, Field(max_length=8)]) -> str:
        """The local time in a time zone."""
        asked.append(zone)
        return "09:30"

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    settings = agents.ModelSettings(
        temperature=0, max_tokens=64, tool_choice=tool_choice, parallel_tool_calls=False, include_usage=True
    )
    return agents.Agent(
        name="Clock",
        instructions="Tell the time.",
        model=kinds[route]("smollm2-135m", openai_client=client),
        model_settings=settings,  # once a function was called, the agent may answer
        tools=[agents.function_tool(get_time)],
    )


async def whole(started: Any) -> Any:
    return await agents.Runner.run(started, "What time is it in Lima?", max_turns=3)


async def streamed(started: Any) -> Any:
    run = agents.Runner.run_streamed(started, "What time is it in Lima?", max_turns=3)
    kinds = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    return run


@pytest.mark.parametrize("tool_choice", ["required", "get_time"])
@pytest.mark.parametrize("run", [whole, streamed])
@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_loop_calls_gets_the_result_and_ends(server: RunningServer, route: str, run: Any, tool_choice: str) -> None:
    agents.set_tracing_disabled(True)
    asked: Zones = []
    result = asyncio.run(run(agent(server, route, asked, tool_choice)))
    assert asked
    assert all(len(zone) <= 8 for zone in asked)
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["09:30"] * len(asked)
    assert result.new_items[-1].type == "message_output_item"
    assert result.final_output
