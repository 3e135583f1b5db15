"""Prompts of published models equal those of their own libraries: transformers', and mistral-common's.

Every conversation of `chats.py` is rendered by both. Where a template itself says something else than Mistral's
library, the difference is named here, so that no other goes unnoticed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as TokenizerBackend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mini_sglang.errors import FieldError
from mini_sglang.text.conversation import template_messages, template_tools
from mini_sglang.text.template_format import format_of
from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.text.tool_prompt import render_chat
from mini_sglang.weights.gguf_tokenizer import special_tokens, tokenizer_json
from mini_sglang.weights.hub import ModelSource
from tests.published import material
from tests.published.chats import CHATS, SYSTEM, Chat, Json
from tests.published.gguf_metadata import of_tekken


def by_transformers(library: PreTrainedTokenizerFast, chat: Chat, tokenize: bool) -> Any:
    """The prompt by transformers, or the words of its template's refusal."""
    tools: Json = {"tools": chat.tools} if chat.tools else {}
    try:
        return library.apply_chat_template(
            chat.messages,
            tokenize=tokenize,
            return_dict=False,
            add_generation_prompt=True,
            **tools,
            **chat.arguments,
        )
    except Exception as error:  # of a template, which is a program
        return f"refused: {error}"


def by_mini_sglang(tokenizer: Tokenizer, chat: Chat) -> list[int] | str:
    """The prompt, or the refusal, from what a caller sends."""
    return _tokens_or_refusal(
        lambda: render_chat(tokenizer, *_checked(chat), format_of(tokenizer), **chat.arguments),
    )


def by_the_template_alone(tokenizer: Tokenizer, chat: Chat) -> list[int] | str:
    """The same, for a template that is given what transformers gives it, in no other form."""
    messages, tools = _checked(chat)
    given: Json = {"tools": tools} if tools else {}
    return _tokens_or_refusal(lambda: tokenizer.apply_chat_template(messages, **given, **chat.arguments))


def _checked(chat: Chat) -> tuple[list[Json], list[Json]]:
    return template_messages(chat.messages, "messages"), template_tools(chat.tools, "tools")


def _tokens_or_refusal(prompt: Callable[[], list[int]]) -> list[int] | str:
    try:
        return prompt()
    except FieldError as error:
        return str(error).replace("messages are not accepted by the model's chat template", "refused")


# What transformers says of templates that queue things in a list of their own.
_QUEUES = "refused: access to attribute 'append' of 'list' object is unsafe."


class TestTransformers:
    @pytest.mark.parametrize(
        ("name", "template"),
        [
            ("qwen3", None),
            ("qwen3", "Qwen-Qwen3-0.6B"),
            ("llama3_1", None),
            ("llama3_1", "meta-llama-Llama-3.1-8B-Instruct"),
            ("gemma3", None),
            ("deepseek_v3", None),
            ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1"),
        ],
    )
    def test_whole_tokenizers(self, tmp_path: Path, name: str, template: str | None) -> None:
        """With the template that they were published with, or another one of their family beside them."""
        folder = shutil.copytree(material.tokenizer_folder(name), tmp_path / name)
        if template is not None:
            (folder / "chat_template.jinja").write_text(material.templates()[template], encoding="utf-8")
        library = AutoTokenizer.from_pretrained(folder)
        tokenizer = load_tokenizer(ModelSource(name, folder, "safetensors"))
        expected = {chat.name: by_transformers(library, chat, tokenize=True) for chat in CHATS}
        assert {chat.name: by_the_template_alone(tokenizer, chat) for chat in CHATS} == expected
        assert sum(isinstance(ids, list) for ids in expected.values()) >= 10

    def test_every_published_template(self) -> None:
        """Within the bounds that mini_sglang sets to templates they write, and refuse, what they do without."""
        folder = material.tokenizer_folder("llama3_1")  # its tokens spell every text back
        library = PreTrainedTokenizerFast.from_pretrained(folder)
        rendered = 0
        for name, source in material.templates().items():
            library.chat_template = source
            tokenizer = Tokenizer.of(library, frozenset())
            for chat in CHATS:
                ids = by_the_template_alone(tokenizer, chat)
                found = ids if isinstance(ids, str) else tokenizer.decode(ids, skip_special_tokens=False)
                expected = by_transformers(library, chat, tokenize=False)
                if expected == _QUEUES:
                    assert name.startswith("Kimi-K2-")
                    assert "Return of functions.get_weather:0" in found
                else:
                    assert found == expected, (name, chat.name)
                rendered += isinstance(ids, list)
        assert rendered > 1000


# Mistral's special tokens by id, up to those of Magistral and Ministral 3; the files that have them are not published
# with mistral-common, but their vocabulary is.
_MISTRAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"<SPECIAL_{token_id}>" for token_id in range(20, 32)),
    *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
)
_MISTRAL_VERSIONS = {
    "mistralai-Mistral-Nemo-Instruct-2407": "v3",
    "Mistral-Small-3.2-24B-Instruct-2506": "v11",
    "unsloth-mistral-Devstral-Small-2507": "v13",
    "mistralai-Ministral-3-14B-Reasoning-2512": "v13",
}


def _tekken() -> Path:
    return material.fetched(material.MISTRAL_COMMON) / "mistral_common" / "data" / "tekken_240911.json"


@pytest.fixture(scope="module")
def tekken() -> PreTrainedTokenizerFast:
    """Mistral's tokenizer as a GGUF file holds it, without a chat template."""
    metadata = of_tekken(json.loads(_tekken().read_text(encoding="utf-8")), _MISTRAL_TOKENS)
    backend = TokenizerBackend.from_str(json.dumps(tokenizer_json(metadata)))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens(metadata))


@cache
def by_mistral(version: str, thoughts: bool) -> dict[str, list[int] | str]:
    """The prompts of `MISTRAL_CHATS` by mistral-common, or why it takes none."""
    asked = {
        "tekken": str(_tekken()),
        "version": version,
        "special_tokens": _MISTRAL_TOKENS,
        "chats": [
            {"messages": [_for_mistral(message, thoughts) for message in chat.messages], "tools": chat.tools}
            for chat in MISTRAL_CHATS
        ],
    }
    path = os.pathsep.join(str(folder) for folder in material.mistral_common_path())
    done = subprocess.run(
        (sys.executable, str(Path(__file__).with_name("mistral_encode.py"))),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {chat.name: answer for chat, answer in zip(MISTRAL_CHATS, answers, strict=True)}


def _for_mistral(message: Json, thoughts: bool) -> Json:
    """The message as mistral-common takes it: arguments as JSON text, thoughts as a part of the content or left out."""
    made = {key: value for key, value in message.items() if key != "reasoning_content"}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    if thoughts and "reasoning_content" in message:
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        made["content"] = [{"type": "thinking", "thinking": message["reasoning_content"]}, *text]
    return made


# Templates of later models put a system message of their own where a chat has none; mistral-common has none then.
MISTRAL_CHATS = [
    chat if chat.messages[0]["role"] == "system" else replace(chat, messages=[SYSTEM, *chat.messages]) for chat in CHATS
]
# What the templates themselves leave out.
_OTHERWISE = {
    "mistralai-Mistral-Nemo-Instruct-2407": {"text and a call"},  # the text; and mistral-common refuses such a message
    "Mistral-Small-3.2-24B-Instruct-2506": {"text and a call"},  # the text
}


class TestMistralCommon:
    @pytest.mark.parametrize(("template", "version"), _MISTRAL_VERSIONS.items())
    def test_chats_token_for_token(self, tekken: PreTrainedTokenizerFast, template: str, version: str) -> None:
        tekken.chat_template = material.templates()[template]
        tokenizer, expected = (
            Tokenizer.of(tekken, frozenset({2})),
            by_mistral(version, thoughts="Reasoning" in template),
        )
        found = {chat.name: by_mini_sglang(tokenizer, chat) for chat in MISTRAL_CHATS}
        otherwise = {name for name, ids in found.items() if ids != expected[name]}
        assert otherwise == _OTHERWISE.get(template, set())
