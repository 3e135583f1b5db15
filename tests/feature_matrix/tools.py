"""One tool and how it is asked for: as a chat with a function, and as the prompt and the grammar that this becomes."""

from __future__ import annotations

import json

from transformers import PreTrainedTokenizerFast

from tests import tiny

NAME = "go"
PARAMETERS = {
    "type": "object",
    "properties": {"to": {"type": "string", "pattern": "^[a-z]{6}$"}},
    "required": ["to"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Where to, little robot.."}]
CHAT = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": NAME, "parameters": PARAMETERS}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
# The model is told in the fewest tokens; what the template writes tells the server how calls are written.
CHAT_TEMPLATE = "{% if tools %}<|python_tag|>{% endif %}" + tiny.CHAT_TEMPLATE

# Between two things in JSON may stand what the server allows there.
_WHITE_SPACE = {"whitespace_pattern": r"[ ]|\n[ ]{0,16}", "lenient": True, "coerce_one_of": True}
_ARGUMENTS = json.dumps({**PARAMETERS, "x-guidance": _WHITE_SPACE})
_CALL = rf"""
start: "{{\"name\": \"{NAME}\", \"parameters\": " %json {_ARGUMENTS} "}}"
"""
GRAMMAR = json.dumps([{"lark_grammar": _CALL}])  # as `tool_call_grammar` writes grammars


def as_text(arguments: str) -> str:
    """The answer that calls the tool, in the notation of Llama 3."""
    return f'{{"name": "{NAME}", "parameters": {arguments}}}'


def prompt(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The token ids of the chat."""
    text = tokenizer.apply_chat_template(MESSAGES, tools=CHAT["tools"], add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer.encode(text, add_special_tokens=False))
