"""What a model wrote stands in its next prompt as it wrote it: that prompt goes on from the text before.

llama.cpp's cases say for which answers this holds; the templates render them here as mini_sglang has them render.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from mini_sglang.errors import FieldError
from mini_sglang.text.conversation import template_messages, template_tools
from mini_sglang.text.template_format import format_of
from mini_sglang.text.tokenizer import Tokenizer
from mini_sglang.text.tool_prompt import chat_text
from tests.published import material
from tests.published.chats import Json
from tests.published.llama_cpp_cases import Case, Message


def as_sent(message: Message) -> Json:
    """The message in the form of the chat completions API."""
    sent: Json = {
        "role": message.role,
        "content": message.content or "".join(text for _, text in message.content_parts),
    }
    if message.reasoning_content:
        sent["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        sent["tool_calls"] = [
            {
                "id": call.id or "abcdefghi",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_name:
        sent |= {"name": message.tool_name, "tool_call_id": message.tool_call_id}
    return sent


def rendered(tokenizer: Tokenizer, case: Case, messages: list[Message], add_generation_prompt: bool) -> str:
    tools = [
        {"function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}
        for tool in case.tools
    ]
    return chat_text(
        tokenizer,
        template_messages([as_sent(message) for message in messages], "messages"),
        template_tools(tools, "tools"),
        format_of(tokenizer),
        add_generation_prompt=add_generation_prompt,
        enable_thinking=case.enable_thinking,
        thinking=case.enable_thinking,
    )


# Templates that want what no chat has: tools under another name, and tools in every chat.
_OTHERWISE = {"fireworks-ai-llama-3-firefunction-v2", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"}


def test_the_next_prompt_begins_with_the_last_one_and_the_answer() -> None:
    library = PreTrainedTokenizerFast.from_pretrained(material.tokenizer_folder("llama3_1"))  # it spells text back
    failed: dict[str, list[str]] = {}
    cases = [case for case in material.chat_cases().cases if case.expect_reconstruction and not case.is_partial]
    for case in cases:
        library.chat_template = material.templates()[case.template]
        tokenizer = Tokenizer.of(library, frozenset())
        try:
            before = rendered(tokenizer, case, case.messages, add_generation_prompt=True)
            after = rendered(tokenizer, case, [*case.messages, case.expect], add_generation_prompt=False)
        except FieldError as error:
            failed.setdefault(case.template, []).append(f"line {case.line}: {error}")
        else:
            if not after.startswith(before + case.input):
                failed.setdefault(case.template, []).append(f"line {case.line}: {after!r} is not {case.input!r}")
    assert len(cases) >= 88
    assert failed.keys() == _OTHERWISE, failed
