"""The prompt of a conversation with tools. Both `LLM` and the server render with it, so that their prompts are equal.

For models whose chat template does not know tools, the system message describes them in plain words, and calls and
results become text, in the notation that the model is told to write. Functions on messages as templates take them;
they know no caller.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mini_sglang.sampling_params import Json
from mini_sglang.text.harmony_chats import harmony_messages, is_harmony
from mini_sglang.text.mistral_chats import in_mistral_form
from mini_sglang.text.notation import Notation
from mini_sglang.text.notations import HERMES
from mini_sglang.text.template_format import TemplateFormat
from mini_sglang.text.tokenizer import Tokenizer

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")

# As short as this, since small models take longer instructions for what they are to answer with.
_INSTRUCTIONS = """\
You can call these functions:
{tools}

To call a function, write:
{example}"""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Json],
    tools: Sequence[Json],
    form: TemplateFormat,
    /,  # no name that a template's argument could clash with
    **arguments: Any,
) -> list[int]:
    """Token ids of a conversation with the tools that it offers. Raises FieldError as `chat_text` does."""
    return tokenizer.encode(chat_text(tokenizer, messages, tools, form, **arguments), add_special_tokens=False)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[Json],
    tools: Sequence[Json],
    form: TemplateFormat,
    /,
    **arguments: Any,
) -> str:
    """A conversation with the tools that it offers, as the model's chat template writes them.

    What the template does not write itself (tools, calls, results) stands in the texts of the messages. `arguments` are
    those of `Tokenizer.render_chat_template`. Raises FieldError as that does.
    """
    messages, tools = in_mistral_form(tokenizer.chat_template, messages, tools)
    if is_harmony(tokenizer.chat_template):
        messages = harmony_messages(messages)
    messages = with_plain_tools(messages, tools, form)
    if tools and form.writes_tools:
        arguments["tools"] = tools
    if form.notation is not None and form.notation.nine_letters:
        messages = [_with_short_ids(message) for message in messages]
    if form.text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    messages = [_with_thoughts_by_all_names(message) for message in messages]
    return tokenizer.render_chat_template(messages, **arguments)


def with_plain_tools(messages: Sequence[Json], tools: Sequence[Json], form: TemplateFormat) -> list[Json]:
    """The conversation with what its template does not write of tools, calls and results in the texts of messages."""
    notation = form.notation or HERMES
    plain = list(_as_text(messages, notation, form))
    if not tools or form.writes_tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = notation.write([{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}])
    instructions = _INSTRUCTIONS.format(tools=lines, example=example)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(messages: Iterable[Json], notation: Notation, form: TemplateFormat) -> Iterator[Json]:
    for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result and not form.writes_results:  # those of one answer make one message: many templates alternate
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            yield {"role": "user", "content": "\n".join(results)}
            continue
        for message in group:
            if (calls := message.get("tool_calls")) and not form.writes_calls:
                written = notation.write([{**call["function"], "id": call["id"]} for call in calls])
                text = "\n".join(filter(None, (message["content"], written)))
                rest = {name: value for name, value in message.items() if name != "tool_calls"}
                message = {**rest, "content": text}
            yield message


def _with_thoughts_by_all_names(message: Json) -> Json:
    """The message with its thoughts under each of the names by which templates read them."""
    if not (thoughts := message.get("reasoning_content")):
        return message
    return {"thinking": thoughts, "reasoning": thoughts, **message}


def _with_text_arguments(message: Json) -> Json:
    """The message with the arguments of its calls as JSON text."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = ({**call["function"], "arguments": _json_text(call["function"]["arguments"])} for call in calls)
    return {
        **message,
        "tool_calls": [{**call, "function": function} for call, function in zip(calls, functions, strict=True)],
    }


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(message: Json) -> Json:
    """The message with ids of calls that Mistral's templates accept: nine letters and digits. Equal ids stay equal."""

    def shorten(call_id: str) -> str:
        return call_id if _MISTRAL_ID.fullmatch(call_id) else f"{zlib.crc32(call_id.encode()):09x}"

    short = dict(message)
    if "tool_call_id" in message:
        short["tool_call_id"] = shorten(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        short["tool_calls"] = [{**call, "id": shorten(call["id"])} for call in calls]
    return short
