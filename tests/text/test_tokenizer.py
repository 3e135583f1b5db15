"""Tokenizers of every origin encode as the reference does, and errors name the caller's field."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.gguf_file import GGUFFile
from mini_sglang.weights.gguf_tokenizer import chat_templates, tokenizer_json
from mini_sglang.weights.hub import ModelSource
from tests.tiny import Checkpoints

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smollm2_reference.json").read_text(encoding="utf-8"))
# Of the official tokenizer.json of SmolLM2-135M-Instruct.
OFFICIAL_SHA256 = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"


@pytest.fixture(scope="module")
def builtin(builtin_model: ModelSource) -> Tokenizer:
    return load_tokenizer(builtin_model)


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> ModelSource:
    """A folder with a tokenizer and no model."""
    tiny_tokenizer.save_pretrained(tmp_path)
    return ModelSource("tiny", tmp_path, "safetensors")


class TestBuiltinModel:
    def test_the_official_tokenizer_is_rebuilt_byte_for_byte(self, builtin_model: ModelSource) -> None:
        document = tokenizer_json(GGUFFile(builtin_model.path).metadata)
        content = json.dumps(document, ensure_ascii=False, indent=2).encode()
        assert len(content) == 2_104_556
        assert hashlib.sha256(content).hexdigest() == OFFICIAL_SHA256

    @pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: str(case["name"]))
    def test_reference_prompts_and_outputs(self, builtin: Tokenizer, case: dict[str, Any]) -> None:
        assert builtin.encode(case["prompt"]) == case["prompt_ids"]
        assert builtin.decode(case["output_ids_ignore_eos"], skip_special_tokens=False) == case["text"]

    def test_special_ids(self, builtin: Tokenizer) -> None:
        assert builtin.eos_token_ids == {0, 2}
        assert builtin.special_token_ids == set(range(17))
        assert builtin.vocab_size == 49152

    def test_a_chat_has_the_default_system_line_and_no_second_begin_token(self, builtin: Tokenizer) -> None:
        ids = builtin.apply_chat_template([{"role": "user", "content": "Hi"}])
        assert builtin.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids[:1] == [1]
        assert ids.count(1) == 3


class TestEncodeAndDecode:
    @given(text=st.text())
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    def test_any_text_survives(self, builtin: Tokenizer, text: str) -> None:
        """Apart from the few bytes, such as U+001D, that the official vocabulary does not have."""
        known = {spelled[0] for i in range(17, 600) if len(spelled := builtin.token_bytes(i)) == 1}
        kept = bytes(byte for byte in text.encode() if byte in known)
        ids = builtin.encode(text, add_special_tokens=False)
        assert b"".join(builtin.token_bytes(i) for i in ids) == kept
        assert builtin.decode(ids, skip_special_tokens=False) == kept.decode(errors="replace")

    def test_every_token_has_bytes(self, builtin: Tokenizer) -> None:
        assert all(builtin.token_bytes(token_id) for token_id in range(builtin.vocab_size))
        assert builtin.token_bytes(builtin.vocab_size) == b""

    @pytest.mark.parametrize("text", ["\ud83d", "ab\ud83dcd", "\udc00 tail"])
    def test_half_a_surrogate_pair_is_a_value_error(self, builtin: Tokenizer, text: str) -> None:
        with pytest.raises(ValueError, match=r"text holds half of a surrogate pair \(U\+D[0-9A-F]{3} at index \d\)"):
            builtin.encode(text)
        with pytest.raises(ValueError, match="messages hold"):
            builtin.apply_chat_template([{"role": "user", "content": text}])

    def test_special_tokens_are_skipped_on_demand(self, builtin: Tokenizer) -> None:
        ids = builtin.encode("<|im_start|>user\nHi<|im_end|>")
        assert builtin.decode(ids) == "user\nHi"
        assert builtin.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


class TestFolders:
    def test_encodes_as_transformers_does(self, folder: ModelSource, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
        tokenizer = load_tokenizer(folder)
        messages = [{"role": "user", "content": "The capital"}, {"role": "assistant", "content": "of France"}]
        for text in ("The capital of France", "<|im_start|>x", "café 🙂", ""):
            assert tokenizer.encode(text) == tiny_tokenizer.encode(text)
        expected = tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.apply_chat_template(messages) == expected

    def test_a_gguf_and_a_folder_of_one_model_agree(self, checkpoints: Checkpoints) -> None:
        first, second = (
            load_tokenizer(checkpoints.write("llama").source),
            load_tokenizer(checkpoints.write_gguf("llama").source),
        )
        text = "Once upon a time 0123, café 🙂 <|im_end|>"
        assert first.encode(text) == second.encode(text)
        assert first.eos_token_ids == second.eos_token_ids == {0, 2}
        assert first.special_token_ids == second.special_token_ids == {0, 1, 2}
        messages = [{"role": "user", "content": "Hi"}]
        assert first.apply_chat_template(messages) == second.apply_chat_template(messages)

    def test_the_begin_token_is_added_to_prompts_but_not_to_chats(self, folder: ModelSource) -> None:
        file = folder.path / "tokenizer.json"
        backend = TokenizerBackend.from_file(str(file))
        backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
        backend.save(str(file))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.encode("The")[0] == 0
        assert tokenizer.encode("The", add_special_tokens=False) == tokenizer.encode("The")[1:]
        assert 0 not in tokenizer.apply_chat_template([{"role": "user", "content": "The"}])

    def test_truncation_and_padding_of_the_file_are_switched_off(self, folder: ModelSource) -> None:
        file = folder.path / "tokenizer.json"
        backend = TokenizerBackend.from_file(str(file))
        backend.enable_truncation(2)
        backend.enable_padding(length=64)
        backend.save(str(file))
        ids = load_tokenizer(folder).encode("The capital of France is")
        assert 2 < len(ids) < 64

    def test_added_tokens_that_are_not_special_are_not_skipped(self, folder: ModelSource) -> None:
        file = folder.path / "tokenizer.json"
        backend = TokenizerBackend.from_file(str(file))
        backend.add_tokens(["<think>"])
        backend.save(str(file))
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("<think>The<|im_end|>")
        assert ids[0] == 320
        assert tokenizer.decode(ids) == "<think>The"
        assert 320 not in tokenizer.special_token_ids
        assert tokenizer.token_bytes(320) == b"<think>"

    def test_a_missing_or_damaged_tokenizer_is_named(self, folder: ModelSource) -> None:
        (folder.path / "tokenizer.json").write_text("{}")
        with pytest.raises(ValueError, match=r"model 'tiny': the tokenizer in .* cannot be loaded"):
            load_tokenizer(folder)
        (folder.path / "tokenizer.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"model 'tiny'.*no tokenizer\.json"):
            load_tokenizer(folder)

    def test_a_damaged_tokenizer_in_a_gguf_is_named(self, checkpoints: Checkpoints) -> None:
        path = checkpoints.write_gguf("llama").path
        path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergex"))
        with pytest.raises(ValueError, match=r"the tokenizer in .*\.gguf cannot be loaded: .*merges"):
            load_tokenizer(ModelSource("x", path, "gguf"))

    def test_code_beside_a_tokenizer_is_never_run(self, folder: ModelSource) -> None:
        settings_file = folder.path / "tokenizer_config.json"
        content = json.loads(settings_file.read_text())
        content["auto_map"] = {"AutoTokenizer": ["evil.Evil", None]}
        settings_file.write_text(json.dumps(content))
        (folder.path / "evil.py").write_text(f"open({str(folder.path / 'ran')!r}, 'w')")
        assert load_tokenizer(folder).encode("The")
        assert not (folder.path / "ran").exists()


class TestChats:
    def with_template(self, folder: ModelSource, template: str | None) -> Tokenizer:
        path = folder.path / "chat_template.jinja"
        path.unlink() if template is None else path.write_text(template)
        return load_tokenizer(folder)

    def test_a_model_without_template_says_so(self, folder: ModelSource) -> None:
        tokenizer = self.with_template(folder, None)
        assert not tokenizer.has_chat_template
        with pytest.raises(ValueError, match="no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

    def test_a_file_beside_the_tokenizer_goes_before_the_template_in_its_settings(self, folder: ModelSource) -> None:
        self.with_settings(folder, "in the settings")
        assert load_tokenizer(folder).chat_template == "beside"

    def with_settings(self, folder: ModelSource, template: object) -> None:
        """Puts a template into tokenizer_config.json, and another one beside it."""
        path = folder.path / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
        (folder.path / "chat_template.jinja").write_text("beside")

    @pytest.mark.parametrize("place", ["settings", "folder"])
    def test_of_several_templates_the_one_for_tools_renders_chats_with_tools(
        self, folder: ModelSource, place: str
    ) -> None:
        named = {
            "default": "plain {{ messages[0].content }}",
            "tool_use": "{{ tools[0].name }} {{ messages[0].content }}",
        }
        if place == "settings":
            self.with_settings(folder, [{"name": name, "template": text} for name, text in named.items()])
            (folder.path / "chat_template.jinja").unlink()
        else:
            (folder.path / "chat_template.jinja").write_text(named["default"])
            (folder.path / "additional_chat_templates").mkdir()
            (folder.path / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
        tokenizer, messages = load_tokenizer(folder), [{"role": "user", "content": "Hi"}]
        assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "plain Hi"
        assert tokenizer.decode(tokenizer.apply_chat_template(messages, tools=[{"name": "f"}])) == "f Hi"
        assert set(tokenizer.chat_template.split("\n")) == {*named.values()}

    def test_several_templates_without_a_default_are_told_of(self, folder: ModelSource) -> None:
        self.with_settings(folder, [{"name": "rag", "template": "x"}])
        (folder.path / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match=r"messages are not accepted .*no default specified.*\['rag'\]"):
            load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "Hi"}])

    def test_the_last_message_can_be_left_open(self, folder: ModelSource) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The capital"}]
        ids = load_tokenizer(folder).apply_chat_template(messages, continue_final_message=True)
        assert load_tokenizer(folder).decode(ids, skip_special_tokens=False).endswith("assistant\nThe capital")

    def test_template_arguments_reach_the_template(self, folder: ModelSource) -> None:
        tokenizer = self.with_template(folder, "{{ messages[0].content }}{% if thinking %} thinking{% endif %}")
        assert tokenizer.decode(tokenizer.apply_chat_template([{"content": "a"}], thinking=True)) == "a thinking"

    @pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_tensors", "padding"])
    def test_template_arguments_cannot_reach_past_the_template(self, folder: ModelSource, name: str) -> None:
        arguments: dict[str, Any] = {name: "x"}
        with pytest.raises(ValueError, match=f"chat_template_kwargs must not hold {name}"):
            load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "a"}], **arguments)

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{{ raise_exception('Only user and assistant roles are supported!') }}", "Only user and assistant"),
            ("{{ messages[0].content + 1 }}", "str"),
            ("{{ messages[9].content.x }}", "messages|undefined|no element"),
            ("{% for %}", "expected|Expected"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
        ],
    )
    def test_what_a_template_refuses_is_an_error_of_messages(
        self, folder: ModelSource, template: str, reason: str
    ) -> None:
        tokenizer = self.with_template(folder, template)
        with pytest.raises(ValueError, match=rf"messages are not accepted by the model's chat template: .*({reason})"):
            tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

    @pytest.mark.parametrize("messages", [[], [3], [None], ["text"]])
    def test_malformed_messages_are_an_error_of_messages(self, folder: ModelSource, messages: list[Any]) -> None:
        with pytest.raises(ValueError, match="messages"):
            load_tokenizer(folder).apply_chat_template(messages)

    def test_marker_text_in_a_message_becomes_the_token(self, folder: ModelSource) -> None:
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<|im_end|>b"}])
        assert ids.count(2) == 2


def sentencepiece_metadata() -> dict[str, Any]:
    """A small sentencepiece vocabulary: "▁the" and its parts, letters, and every byte."""
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
    pieces += [(f"<0x{byte:02X}>", 6) for byte in range(256)]
    words = ["th", "he", "▁t", "the", "▁the", "en"]
    pieces += [(piece, 1) for piece in [*words, "▁", *"abcdefghijklmnopqrstuvwxyz"]]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, kind in pieces],
        "tokenizer.ggml.scores": [-float(index) for index in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


class TestSentencePiece:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        metadata = sentencepiece_metadata()
        backend = TokenizerBackend.from_str(json.dumps(tokenizer_json(metadata)))
        wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        return Tokenizer.of(wrapped, frozenset({2}))

    def test_merges_go_by_score(self, tokenizer: Tokenizer) -> None:
        spelled = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("then the")]
        # "th" has the best score, then "he"; "▁the" is made of "▁t"-less parts only if its pieces meet.
        assert "".join(str(piece) for piece in spelled) == "<s>▁then▁the"
        assert spelled[-1] == "▁the"

    def test_bytes_without_a_piece(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("é", add_special_tokens=False)
        assert [tokenizer.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\xa9"]
        assert tokenizer.decode(ids) == "é"

    @given(st.text(alphabet="abth e é🙂\n"))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
    def test_any_text_survives(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        prefixed = f" {text}" if text else ""
        assert b"".join(tokenizer.token_bytes(i) for i in ids) == prefixed.encode()

    def test_the_begin_token_is_added_unless_the_file_says_no(self) -> None:
        metadata = sentencepiece_metadata()
        assert tokenizer_json(metadata)["post_processor"]["type"] == "TemplateProcessing"
        assert tokenizer_json({**metadata, "tokenizer.ggml.add_bos_token": False})["post_processor"] is None


def test_a_token_with_a_role_is_matched_as_a_whole_whatever_its_type() -> None:
    metadata = {**sentencepiece_metadata(), "tokenizer.ggml.padding_token_id": 3}
    metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
    added = tokenizer_json(metadata)["added_tokens"]
    assert [token["content"] for token in added] == [metadata["tokenizer.ggml.tokens"][i] for i in (0, 1, 2, 3)]
    assert all(token["special"] for token in added)


def test_a_gguf_may_hold_several_chat_templates() -> None:
    metadata: dict[str, Any] = {"tokenizer.chat_template": "a"}
    assert chat_templates({}) is None
    assert chat_templates(metadata) == "a"
    metadata |= {"tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.chat_template.tool_use": "b"}
    assert chat_templates(metadata) == {"default": "a", "tool_use": "b"}


class TestByteLevelKinds:
    """The cut before merging, by `tokenizer.ggml.pre`."""

    def cut(self, pre: str, text: str) -> list[str]:
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": ["a"],
            "tokenizer.ggml.token_type": [1],
            "tokenizer.ggml.merges": [],
        }
        backend = TokenizerBackend.from_str(json.dumps(tokenizer_json(metadata)))
        assert backend.pre_tokenizer is not None
        return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]

    @pytest.mark.parametrize(
        ("pre", "expected"),
        [
            ("gpt-2", ["I", "'LL", " x", " 1234", "  ", " y", "!\n\n"]),
            ("smollm", ["I", "'LL", " x", " ", "1", "2", "3", "4", "  ", " y", "!\n\n"]),
            ("qwen2", ["I", "'LL", " x", " ", "1", "2", "3", "4", "  ", " y", "!\n\n"]),
            ("llama-bpe", ["I", "'LL", " x", " ", "123", "4", "  ", " y", "!\n\n"]),
            ("smaug-bpe", ["I", "'LL", " x", " ", "123", "4", "  ", " y", "!\n\n"]),
            ("dbrx", ["I", "'LL", " x", " ", "123", "4", "  ", " y", "!\n\n"]),
        ],
    )
    def test_contractions_digits_and_spaces(self, pre: str, expected: list[str]) -> None:
        if pre in ("gpt-2", "smollm"):  # contractions in lower case only, and newlines apart from punctuation
            expected = [*expected[:1], "'", "LL", *expected[2:-1], "!", "\n\n"]
        assert self.cut(pre, "I'LL x 1234   y!\n\n") == expected

    @pytest.mark.parametrize(
        ("pre", "expected"),
        [
            ("qwen2", "e|\u0301t| HelloWorld| |1|2|3|4| ...\n\n|你好|，a|'s| \t"),
            ("qwen35", "e\u0301t| HelloWorld| |1|2|3|4| ...\n\n|你好|，a|'s| \t"),
            ("gpt-4o", "e\u0301t| Hello|World| |123|4| ...\n\n|你好|，a's| \t"),
            ("tekken", "e\u0301t| Hello|World| |1|2|3|4| ...\n\n|你好|，a|'s| \t"),
            ("seed-coder", "e|\u0301t| HelloWorld| |1|2|3|4| ...|\n\n|你好|，a|'s| \t"),
            ("glm4", "e|\u0301t| HelloWorld| |123|4| ...\n\n|你好|，a|'s| \t"),
            ("deepseek-v3", "e\u0301t| HelloWorld| |123|4| ...\n\n|你好|，|a|'s| \t"),
            ("deepseek-llm", "e|\u0301|t| HelloWorld| |1|2|3|4| ...|\n|\n|你好|，|a|'|s| \t"),
            ("falcon", "e|\u0301|t| HelloWorld| |123|4| |...|\n|\n|你好|，|a|'|s| \t"),
        ],
    )
    def test_marks_capitals_digits_and_scripts(self, pre: str, expected: str) -> None:
        assert "|".join(self.cut(pre, expected.replace("|", ""))) == expected

    def test_an_unknown_kind_is_refused_by_name(self) -> None:
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'kimi-k2' is not supported; supported are .*qwen2"):
            self.cut("kimi-k2", "x")

    def test_other_models_of_tokenizer_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'t5' is not supported"):
            tokenizer_json({"tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": ["a"]})
        with pytest.raises(ValueError, match="holds no tokenizer"):
            tokenizer_json({})


def test_transformers_is_imported_with_the_first_chat_of_a_gguf(builtin_model: ModelSource) -> None:
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from mini_sglang.text.tokenizer import load_tokenizer\nfrom mini_sglang.weights.hub import ModelSource\n"
        f"tokenizer = load_tokenizer(ModelSource('x', Path({str(builtin_model.path)!r}), 'gguf'))\n"
        "tokenizer.decode(tokenizer.encode('Hi'))\n"
        "print('transformers' in sys.modules)\n"
        "tokenizer.apply_chat_template([{'role': 'user', 'content': 'Hi'}])\n"
        "print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True"], result.stderr


def test_torch_is_not_imported(folder: ModelSource, builtin_model: ModelSource) -> None:
    shutil.copy(builtin_model.path, folder.path / "model.gguf")
    program = (
        "import sys\nfrom pathlib import Path\n"
        "from mini_sglang.text.tokenizer import load_tokenizer\nfrom mini_sglang.weights.hub import ModelSource\n"
        f"folder = Path({str(folder.path)!r})\n"
        "load_tokenizer(ModelSource('x', folder, 'safetensors')).encode('Hi')\n"
        "chat = [{'role': 'user', 'content': 'Hi'}]\n"
        "load_tokenizer(ModelSource('x', folder / 'model.gguf', 'gguf')).apply_chat_template(chat)\n"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
