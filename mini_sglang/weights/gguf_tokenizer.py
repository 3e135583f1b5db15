"""Rebuilds the tokenizer that a GGUF file carries in its metadata, in the tokenizer.json format. Without torch.

A GGUF file names its pre-tokenizer by `tokenizer.ggml.pre`. llama.cpp's table (src/llama-vocab.cpp) says what the names
mean; this module holds those that published vectors or tokenizers hold it to (tests/published), and others that are cut
the same way. An unknown name is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_AND_SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_AND_SPACES
_QWEN35 = (  # as for Qwen 2, but marks belong to the letter before them
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_START, _CAPITALS, _SMALL = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str, number: str) -> str:
    """Words end before a capital that follows small letters; `end` is what may end a word besides letters."""
    return rf"{_WORD_START}{_CAPITALS}*{_SMALL}+{end}|{_WORD_START}{_CAPITALS}+{_SMALL}*{end}|{number}{_SPACES}"


_GPT4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True)
class _PreTokenizer:
    """How text is cut before byte-pair merging: the steps in tokenizer.json's form, run one after the other."""

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False  # a whole word that is a token is taken as it is
    adds_bos: bool = False  # unless the file says otherwise


_GPT2_STYLE = _PreTokenizer((_byte_level(use_regex=True),))
_SINGLE_DIGITS = _PreTokenizer((_DIGITS, _byte_level(use_regex=True)))
_LLAMA3_STEPS = (_split(_LLAMA3), _byte_level(use_regex=False))
_LLAMA3_STYLE = _PreTokenizer(_LLAMA3_STEPS, ignore_merges=True, adds_bos=True)
_QWEN2_STEPS = (_split(_QWEN2), _byte_level(use_regex=False))
_EAST_ASIAN = _split("[一-龥ࠀ-一가-\ud7ff]+")
_DEEPSEEK_CODER = _PreTokenizer(
    (
        _split(r"[\r\n]"),
        _split(r"\s?\p{L}+"),
        _split(r"\s?\p{P}+"),
        _EAST_ASIAN,
        _DIGITS,
        _byte_level(use_regex=False),
    )
)
# DeepSeek LLM knows letters that have cases, of the scripts that its authors listed.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷ"
    "ᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿ"
    "ⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = _PreTokenizer(
    (
        _split(r"[\r\n]"),
        _split(rf"\s?[{_CASED_LETTERS}]+"),
        _split(r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"),
        _split(r"\s+$"),
        _EAST_ASIAN,
        _DIGITS,
        _byte_level(use_regex=False),
    )
)
_DEEPSEEK_V3_STEPS = (
    _split(r"\p{N}{1,3}"),
    _split("[一-龥\u3040-ゟ゠-ヿ]+"),
    _split(_DEEPSEEK_V3),
    _byte_level(use_regex=False),
)
_GPT4O_STEPS = (_split(_GPT4O), _byte_level(use_regex=False))
_FALCON = _PreTokenizer(
    (
        _split(r"[\p{P}\$\+<=>\^~\|`]+"),
        _byte_level(use_regex=True),
        _split(r"[0-9][0-9][0-9]"),
    )
)
# What llama.cpp does with files that are older than `tokenizer.ggml.pre`.
_DEFAULT = _PreTokenizer(
    (
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(_GPT2),
        _split(r"\p{N}+"),
        _split(r"[0-9][0-9][0-9]"),
        _byte_level(use_regex=False),
    )
)
_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "gpt-2": _GPT2_STYLE,
    "gigachat": _GPT2_STYLE,
    "phi-2": _GPT2_STYLE,
    "olmo": _GPT2_STYLE,
    "mpt": _GPT2_STYLE,
    "llama-bpe": _LLAMA3_STYLE,
    "llama3": _LLAMA3_STYLE,
    "llama-v3": _LLAMA3_STYLE,
    "falcon3": _LLAMA3_STYLE,
    "lfm2": _LLAMA3_STYLE,
    "glm4": _PreTokenizer(_LLAMA3_STEPS, ignore_merges=True),
    "smaug-bpe": _PreTokenizer(_LLAMA3_STEPS),  # SmolLM3
    "dbrx": _PreTokenizer(_LLAMA3_STEPS),  # OLMo 2
    "gpt-4o": _PreTokenizer(_GPT4O_STEPS, ignore_merges=True),  # gpt-oss
    "llama4": _PreTokenizer(_GPT4O_STEPS, ignore_merges=True),
    "minimax-m2": _PreTokenizer(_GPT4O_STEPS),
    "tekken": _PreTokenizer((_split(_TEKKEN), _byte_level(use_regex=False)), ignore_merges=True, adds_bos=True),
    "seed-coder": _PreTokenizer((_split(_SEED), _byte_level(use_regex=False))),
    "falcon": _FALCON,
    "qwen35": _PreTokenizer((_split(_QWEN35), _byte_level(use_regex=False))),  # llama.cpp composes no letters here
    "qwen2": _PreTokenizer(_QWEN2_STEPS, normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": _PreTokenizer(_QWEN2_STEPS),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-v3": _PreTokenizer(_DEEPSEEK_V3_STEPS),
    "default": _DEFAULT,
}

_KINDS = ("gpt2", "llama", "gemma4", "bert")  # values of tokenizer.ggml.model
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # gguf's token types; 1 is a normal token, 5 unused, 6 a byte


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json, keys in the order the tokenizers library writes them.

    Raises ValueError if the metadata hold no tokenizer, or one of a kind that is not supported.
    """
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if kind == "gpt2":
        return _byte_level_bpe(metadata, tokens)
    if kind == "llama":
        scores, kinds = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
        return _sentencepiece_bpe(metadata, tokens, _merges_by_score(tokens, scores, kinds))
    if kind == "gemma4":
        return _sentencepiece_bpe(metadata, tokens, metadata["tokenizer.ggml.merges"])
    if kind == "bert":
        return _word_pieces(metadata, tokens)
    raise ValueError(f"GGUF tokenizer.ggml.model {kind!r} is not supported; supported are {', '.join(_KINDS)}")


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The begin, end, unknown and padding tokens, named as in transformers (`bos_token`, …)."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return {name: tokens[token_id] for name, token_id in _role_ids(metadata).items()}


def _role_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name ("default", "tool_use", …), as transformers takes them, or None."""
    default: str | None = metadata.get("tokenizer.chat_template")
    named: dict[str, str] = {}
    for name in metadata.get("tokenizer.chat_templates", []):
        if template := metadata.get(f"tokenizer.chat_template.{name}"):
            named[name] = template
    return {"default": default, **named} if default and named else default


def template_renderer(templates: str | dict[str, str] | None, special: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """Transformers' tokenizer for its chat templates alone: it has no vocabulary."""
    from transformers import PreTrainedTokenizerFast  # not above: it takes a second

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=templates, **special)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        supported = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ValueError(f"GGUF tokenizer.ggml.pre {pre!r} is not supported; supported are {supported}")
    pre_tokenizer = _PRE_TOKENIZERS[pre]
    steps = list(pre_tokenizer.steps)
    return _document(
        metadata,
        tokens,
        normalizer=pre_tokenizer.normalizer,
        pre_tokenizer=steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={**_BPE, "merges": metadata["tokenizer.ggml.merges"], "ignore_merges": pre_tokenizer.ignore_merges},
        adds_bos=pre_tokenizer.adds_bos,
    )


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """A sentencepiece BPE: spaces are "▁", and bytes without a piece are "<0xAB>"."""
    prefix = [{"type": "Prepend", "prepend": "▁"}] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    return _document(
        metadata,
        tokens,
        normalizer={"type": "Sequence", "normalizers": [*prefix, replace]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={**_BPE, "merges": merges, "unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True},
        adds_bos=True,
    )


def _word_pieces(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """BERT's word pieces: the file marks the first piece of a word with "▁", tokenizer.json marks the others."""
    kinds = metadata["tokenizer.ggml.token_type"]
    pieces = [
        token if kind in (_UNKNOWN, _CONTROL) else token[1:] if token.startswith("▁") else f"##{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    around = {  # BERT's names of them
        "tokenizer.ggml.bos_token_id": metadata["tokenizer.ggml.cls_token_id"],
        "tokenizer.ggml.eos_token_id": metadata["tokenizer.ggml.seperator_token_id"],
        "tokenizer.ggml.add_eos_token": True,
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": metadata.get("tokenizer.ggml.normalizer.lowercase", True),
    }
    return _document(
        {**metadata, **around},
        pieces,
        normalizer=normalizer,
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        model={
            "type": "WordPiece",
            "unk_token": pieces[metadata["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        adds_bos=True,
    )


def _merges_by_score(tokens: list[str], scores: list[float], kinds: list[int]) -> list[str]:
    """All pairs of pieces that make up a piece, best score first.

    sentencepiece merges the neighbours whose union has the best score; pairs ranked like this do the same.
    """
    known = set(tokens)
    pairs = [
        (-scores[token_id], piece[:cut], piece[cut:])
        for token_id, piece in enumerate(tokens)
        if kinds[token_id] == 1
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [f"{left} {right}" for _, left, right in pairs]


_BPE: Mapping[str, Any] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
    "vocab": {},
    "merges": [],
}


def _document(
    metadata: Mapping[str, Any],
    tokens: list[str],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
    adds_bos: bool,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _begin_and_end(metadata, tokens, adds_bos),
        "decoder": decoder,
        "model": {**model, "vocab": {token: token_id for token_id, token in enumerate(tokens)}},
    }


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> list[dict[str, Any]]:
    """Tokens matched in the text as wholes: control tokens and those with a role, which decoding may skip, and
    user-defined ones."""
    kinds = dict(enumerate(metadata.get("tokenizer.ggml.token_type", [])))
    added = {token_id for token_id, kind in kinds.items() if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)}
    return [
        {
            "id": token_id,
            "content": tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds.get(token_id) != _USER_DEFINED,
        }
        for token_id in sorted(added | set(_role_ids(metadata).values()))
    ]


def _begin_and_end(metadata: Mapping[str, Any], tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds the begin and end tokens that the model was trained with, if any."""
    wanted = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    named = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, is_wanted in wanted.items() if is_wanted}
    ids = {key: token_id for key, token_id in named.items() if token_id is not None}
    if not ids:
        return None

    def template(sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            special = {key: {"SpecialToken": {"id": tokens[i], "type_id": type_id}} for key, i in ids.items()}
            before, after = ([special[key]] if key in special else [] for key in ("bos", "eos"))
            parts += [*before, {"Sequence": {"id": sequence, "type_id": type_id}}, *after]
        return parts

    used = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()}
    return {"type": "TemplateProcessing", "single": template("A"), "pair": template("AB"), "special_tokens": used}
