"""Vocabularies of published models, rebuilt from GGUF, give the tokens that their own libraries give.

llama.cpp's vectors are texts and the tokens of the library that each model came with. Families without vectors are
compared with the tokenizer.json, or tekken.json, that was published.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer as TokenizerBackend

from mini_sglang.text.tokenizer import Tokenizer, load_tokenizer
from mini_sglang.weights.gguf_tokenizer import tokenizer_json
from mini_sglang.weights.hub import ModelSource
from tests.published import material
from tests.published.chats import TEXTS
from tests.published.gguf_metadata import of_tekken, of_tokenizer_json

WITH_VECTORS = (
    "bert-bge",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gemma-4",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
_BETWEEN = "\n__ggml_vocab_test__\n"


def encode(backend: TokenizerBackend, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def vectors(name: str) -> list[tuple[str, list[int]]]:
    path = material.vocabularies()[name]
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").removesuffix(_BETWEEN).split(_BETWEEN)
    lines = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=True)]


class Vocabulary(NamedTuple):
    name: str
    tokenizer: Tokenizer
    vectors: list[tuple[str, list[int]]]


@pytest.fixture(scope="module", params=WITH_VECTORS)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    name: str = request.param
    tokenizer = load_tokenizer(ModelSource(name, material.vocabularies()[name], "gguf"))
    return Vocabulary(name, tokenizer, vectors(name))


class TestVectors:
    def test_every_text_has_its_tokens(self, vocabulary: Vocabulary) -> None:
        assert len(vocabulary.vectors) >= 45
        found = {text: vocabulary.tokenizer.encode(text, add_special_tokens=False) for text, _ in vocabulary.vectors}
        assert found == dict(vocabulary.vectors)

    def test_decoding_gives_the_text_back(self, vocabulary: Vocabulary) -> None:
        if vocabulary.name == "bert-bge":  # folds cases and spaces, and has no token for much
            assert vocabulary.tokenizer.decode(vocabulary.tokenizer.encode("Hello"), False) == "[CLS] hello [SEP]"
            return
        for text, ids in vocabulary.vectors:
            expected = unicodedata.normalize("NFC", text) if vocabulary.name == "qwen2" else text  # it composes letters
            assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ") == expected.lstrip(" ")

    def test_no_vocabulary_with_vectors_is_left_out(self) -> None:
        paths = material.vocabularies()
        assert {name for name, path in paths.items() if path.with_name(f"{path.name}.inp").is_file()} == {*WITH_VECTORS}

    def test_a_vocabulary_of_another_kind_is_refused_by_name(self) -> None:
        source = ModelSource("nomic", material.vocabularies()["nomic-bert-moe"], "gguf")
        with pytest.raises(
            ValueError, match=r"tokenizer\.ggml\.model 't5' is not supported; supported are gpt2, llama, "
        ):
            load_tokenizer(source)


class TestPublishedTokenizers:
    """A GGUF file made of a published tokenizer gives the same tokens as it."""

    @pytest.mark.parametrize(
        ("name", "model", "pre"),
        [
            ("qwen3", "gpt2", "qwen2"),
            ("llama3_1", "gpt2", "llama-bpe"),
            ("deepseek_v3", "gpt2", "deepseek-v3"),
            ("gptoss", "gpt2", "gpt-4o"),
            ("gemma3", "gemma4", "gemma4"),  # of Gemma 4's kind once its merges are written down
        ],
    )
    def test_tokenizer_json(self, name: str, model: str, pre: str) -> None:
        document = json.loads((material.tokenizer_folder(name) / "tokenizer.json").read_text(encoding="utf-8"))
        self.compare(document, TokenizerBackend.from_str(json.dumps(document)), of_tokenizer_json(document, model, pre))

    def compare(self, document: Any, published: TokenizerBackend, metadata: dict[str, Any]) -> None:
        rebuilt = TokenizerBackend.from_str(json.dumps(tokenizer_json(metadata)))
        texts = [*TEXTS, *(text for text, _ in vectors("qwen35"))]
        assert {text: encode(rebuilt, text) for text in texts} == {text: encode(published, text) for text in texts}

    @pytest.mark.parametrize("file", ["tekken_240718.json", "tekken_240911.json"])
    def test_the_cut_of_tekken_is_the_published_one(self, file: str) -> None:
        path = material.fetched(material.MISTRAL_COMMON) / "mistral_common" / "data" / file
        document = json.loads(path.read_text(encoding="utf-8"))
        split = tokenizer_json(of_tekken(document, ["<unk>", "<s>", "</s>"]))["pre_tokenizer"]["pretokenizers"][0]
        assert split["pattern"]["Regex"] == document["config"]["pattern"]
