"""Conversations that prompts are compared over, in the form of the chat completions API. Data alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says what the weather is like.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where; a city's name: Zürich, 東京"},
                "days": {"type": "integer", "minimum": 1},
                "unit": {"type": "string", "enum": ["°C", "°F"]},
            },
            "required": ["city"],
        },
    },
}
SEARCH: Json = {
    "type": "function",
    "function": {
        "name": "search",
        "description": 'Searches for "words".\n\\Slow.',
        "parameters": {"type": "object", "properties": {"filter": {"type": "object"}, "tags": {"type": "array"}}},
    },
}


@dataclass(frozen=True)
class Chat:
    name: str
    messages: list[Json]
    tools: list[Json] = field(default_factory=list)
    arguments: Json = field(default_factory=dict)  # of the template


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: Json, **fields: Any) -> Json:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **fields}


def call(name: str, arguments: Json, call_id: str = "abcdef123") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str, call_id: str = "abcdef123", name: str = "get_weather") -> Json:
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}


SYSTEM: Json = {"role": "system", "content": "You answer briefly.\nAlways."}
_ASKED = call("get_weather", {"city": "Zürich", "days": 2})
_FOUND = call("search", {"filter": {"a": [1, None, True, "x\ny"]}, "tags": ["ü", "日本"]}, "ghijkl456")

# Cases of letters, digits, marks, scripts, runs of spaces and punctuation: what vocabularies cut in different ways.
TEXTS = (
    "HelloWorld iPhone XMLHttpRequest McDonald's they'LL WE'RE don't O'Neil's",
    "1 12 123 1234 1234567 3.14159 1,000,000 0x1F 50% ½ Ⅷ ２０２６ ٣٤٥",
    "naïve café re\u0301sume\u0301 Ångström ﬁnal ǅ ŉ ß İstanbul",
    "नमस्ते दुनिया ภาษาไทย עִבְרִית العَرَبِيَّة Tiếng Việt",
    "你好，世界！こんにちは カタカナ 한국어 漢字かな交じり文",
    "  two   three    four\t\ttabs \n\n\n lines \r\n windows \u00a0no-break \u3000ideographic",
    "def f(x):\n    return x**2  # comment\n\n\nif __name__ == '__main__':\n\tprint(f(2))\n",
    '!!! ... ??? -- === ### $100 €5 <tag attr="v"/> {[()]} a/b\\c //comment\n/path',
    "🙂 👩‍👩‍👧‍👦 🇫🇷 𝕳𝖊𝖑𝖑𝖔 \u200b\ufeff \x00 \x1b[0m",
    " ",
    "",
)

CHATS = (
    Chat("one question", [user("Hi")]),
    *(Chat(f"text {number}", [user(text)]) for number, text in enumerate(TEXTS) if text.strip()),
    Chat("system message", [SYSTEM, user("Hi there")]),
    Chat("turns", [SYSTEM, user("One?"), assistant("1"), user("Two?"), assistant("2\n"), user("Three?")]),
    Chat("odd text", [user('  <b>"quoted"</b> \\n {{ x }} & café 🙂\n\n日本語\tنص  ')]),
    Chat("tools", [user("Weather?")], [WEATHER, SEARCH]),
    Chat("tools and system message", [SYSTEM, user("Weather?")], [WEATHER]),
    Chat("tools, a later question", [user("Hi"), assistant("Hello"), user("Weather?")], [WEATHER]),
    Chat("a call", [user("Weather?"), assistant("", _ASKED), result('{"celsius": 21.5}')], [WEATHER]),
    Chat(
        "a call, an answer, a question",
        [SYSTEM, user("Weather?"), assistant("", _ASKED), result('{"sun": true}'), assistant("Sunny."), user("Thanks")],
        [WEATHER],
    ),
    Chat(
        "two calls at once",
        [
            user("Both?"),
            assistant("", _ASKED, _FOUND),
            result('{"celsius": 3}'),
            result('["x", "ü"]', "ghijkl456", "search"),
        ],
        [WEATHER, SEARCH],
    ),
    Chat("text and a call", [user("Weather?"), assistant("Let me look.", _ASKED), result("{}")], [WEATHER]),
    Chat("a result in plain words", [user("Weather?"), assistant("", _ASKED), result("Sunny, 21 °C")], [WEATHER]),
    Chat("a compact result", [user("Weather?"), assistant("", _ASKED), result('{"a":1,"b":["ü",null]}')], [WEATHER]),
    Chat("a result in quotes", [user("Weather?"), assistant("", _ASKED), result('He said "21".\nTwice.')], [WEATHER]),
    Chat("an empty result", [user("Weather?"), assistant("", _ASKED), result("")], [WEATHER]),
    Chat("calls without tools", [user("Weather?"), assistant("", _ASKED), result('{"a": 1}')]),
    Chat(
        "thoughts",
        [user("One?"), assistant("1", reasoning_content="It is one."), user("Two?")],
    ),
    Chat(
        "thoughts before a call",
        [user("Weather?"), assistant("", _ASKED, reasoning_content="I must ask.\n"), result('{"a": 1}')],
        [WEATHER],
    ),
    Chat("thinking off", [user("Hi")], arguments={"enable_thinking": False, "thinking": False}),
    Chat("thinking on", [user("Hi")], arguments={"enable_thinking": True, "thinking": True}),
)
