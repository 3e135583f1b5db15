"""Tools for models whose chat template does not know them: the system message describes them in plain words.

Pure functions on messages as templates take them. They return only system, user and assistant messages of text, with
calls in the notation that the model is told to write.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

from mini_sglang.grammar.compiler import CallSyntax
from mini_sglang.sampling_params import Json

# As short as this, since small models take longer instructions for what they are to answer with.
_INSTRUCTIONS = """\
You can call these functions:
{tools}

To call a function, write:
{example}"""


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
