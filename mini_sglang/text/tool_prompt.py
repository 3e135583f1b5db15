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
from mini_sglang.text.call_syntax import HERMES, MISTRAL, CallSyntax, knows_tools
from mini_sglang.text.template_forms import in_template_form
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
    syntax: CallSyntax | None,
    /,  # no name that a template's argument could clash with
    **arguments: Any,
) -> list[int]:
    """Token ids of a conversation with the tools that it offers, as the model's chat template writes them.

    `syntax`: how the model writes calls, if that is known. `arguments` are those of `Tokenizer.apply_chat_template`.
    Raises FieldError as that does.
    """
    messages, tools = in_template_form(tokenizer, messages, tools)
    if not knows_tools(tokenizer.chat_template):
        messages = with_plain_tools(messages, tools, syntax or HERMES)
    elif tools:
        arguments["tools"] = tools
    if syntax == MISTRAL:
        messages = [_with_short_ids(message) for message in messages]
    return tokenizer.apply_chat_template(messages, **arguments)


def with_plain_tools(messages: Sequence[Json], tools: Sequence[Json], syntax: CallSyntax) -> list[Json]:
    """The conversation with tools, calls and results in the texts of its messages."""
    plain = list(_as_text(messages, syntax))
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = _write_calls([{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}], syntax)
    instructions = _INSTRUCTIONS.format(tools=lines, example=example)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _as_text(messages: Iterable[Json], syntax: CallSyntax) -> Iterator[Json]:
    for is_result, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:  # results of one answer's calls make one message: many templates want roles to alternate
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            yield {"role": "user", "content": "\n".join(results)}
        else:
            for message in group:
                if calls := message.get("tool_calls"):
                    texts = (message["content"], _write_calls([call["function"] for call in calls], syntax))
                    message = {"role": message["role"], "content": "\n".join(filter(None, texts))}
                yield message


def _write_calls(functions: Sequence[Json], syntax: CallSyntax) -> str:
    """Calls, each with `name` and `arguments`, in the notation that the model is told to write."""
    objects = ({"name": function["name"], syntax.arguments_key: function["arguments"]} for function in functions)
    calls = (f"{syntax.call_begin}{json.dumps(call, ensure_ascii=False)}{syntax.call_end}" for call in objects)
    return f"{syntax.begin}{syntax.separator.join(calls)}{syntax.end}"


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
