"""Text to token ids and back, and chats to token ids: one tokenizer for every checkpoint format. Never torch.

Built on tokenizers, and for chat templates and folders on transformers, which is imported only then, since that takes a
second. What is added here is where a tokenizer comes from, errors that name the caller's field, and the true bytes of a
token. Marker text of special tokens in a prompt or a message ("<|im_end|>") becomes the token it names, as in
transformers, so that prompts equal the reference library's; a caller who lets strangers fill in parts of a prompt, and
minds this, must strip such text first.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as TokenizerBackend

from mini_sglang.errors import FieldError
from mini_sglang.weights.gguf_config import gguf_end_token_ids
from mini_sglang.weights.gguf_tokenizer import chat_templates, special_tokens, template_renderer, tokenizer_json
from mini_sglang.weights.hf_config import end_token_ids
from mini_sglang.weights.hub import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Chat = Sequence[Mapping[str, Any]]  # messages
LoadRenderer = Callable[[], "PreTrainedTokenizerFast"]
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_WORDS = 500  # characters of what a template says when it refuses
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes, decodes and renders chats. Made by `load_tokenizer`; safe to share between threads.

    `load_renderer` gives the library's own tokenizer, of which only chat templates and tokens with a role are used.
    """

    def __init__(self, backend: TokenizerBackend, eos_token_ids: frozenset[int], load_renderer: LoadRenderer) -> None:
        self.backend = backend
        self.backend.no_truncation()  # a tokenizer.json may carry settings from training
        self.backend.no_padding()
        self.eos_token_ids = eos_token_ids
        self._load_renderer = load_renderer
        added = self.backend.get_added_tokens_decoder()
        self._added_texts: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = self.backend.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @classmethod
    def of(cls, library: PreTrainedTokenizerFast, eos_token_ids: frozenset[int]) -> Tokenizer:
        """That of transformers' tokenizer."""
        return cls(library.backend_tokenizer, eos_token_ids, lambda: library)

    @functools.cached_property
    def renderer(self) -> PreTrainedTokenizerFast:
        """Transformers' tokenizer; it need not have the vocabulary."""
        return self._load_renderer()

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included. The model's own number may be larger (padding)."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @functools.cached_property
    def _bytes_per_token(self) -> int:
        """The most bytes of text that one token stands for."""
        longest = max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))
        # Unicode normalisation makes UTF-8 text at most four times shorter (a four-byte letter becomes ASCII).
        return longest * (1 if self.backend.normalizer is None else 4)

    def fewest_tokens(self, num_bytes: int) -> int:
        """The least number of tokens that a text of `num_bytes` bytes of UTF-8 can have, without tokenising it."""
        return -(-num_bytes // self._bytes_per_token)

    @property
    def role_tokens(self) -> dict[str, str | None]:
        """The texts of the tokens with a role, under transformers' names of them; None for a role without one."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self.renderer, name) for name in names}

    @property
    def has_chat_template(self) -> bool:
        return bool(self.renderer.chat_template)

    @functools.cached_property
    def chat_template(self) -> str:
        """The source of the model's chat template; of all of them where there are several; empty if there is none."""
        template: str | dict[str, str] | None = self.renderer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`, if there is one."""
        return next((token_id for token_id in self.special_token_ids if self._added_texts[token_id] == text), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds the begin or end tokens that the model expects.

        Raises FieldError for half of a surrogate pair, which no tokenizer can encode.
        """
        _refuse_surrogates("text", text)
        # the batch call lets other threads run meanwhile, and skips the offsets, which are not needed
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, exactly as the tokens spell it; bytes that are no whole character become U+FFFD."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(self, chat: Chat, /, **arguments: Any) -> list[int]:
        """Token ids of a chat: what `render_chat_template` writes, encoded without adding special tokens, since the
        template writes them itself. Raises FieldError as that does."""
        return self.encode(self.render_chat_template(chat, **arguments), add_special_tokens=False)

    def render_chat_template(
        self, chat: Chat, /, *, add_generation_prompt: bool = True, continue_final_message: bool = False, **others: Any
    ) -> str:
        """The text of a chat, a list of messages, as the model's own template writes it.

        `continue_final_message` leaves the last message open to be continued. `others` reach the template
        (`tools`, `documents`, `enable_thinking`, …). Of several templates that named "tool_use" renders chats with
        tools, and "default" the others. A template runs in jinja2's immutable sandbox, and its loops and texts are
        bounded (template_bounds.py).
        Raises FieldError if the model has no chat template, or the template does not take these messages: then in
        the template's own words.
        """
        if not self.has_chat_template:
            raise FieldError("messages", "cannot be rendered: this model has no chat template; send a plain prompt")
        if not chat:
            raise FieldError("messages", "must hold at least one message, got none")
        renderer = self.renderer
        reserved = inspect.signature(type(renderer).apply_chat_template).parameters.keys() - _OF_TEMPLATES
        if refused := sorted(others.keys() & reserved):
            raise FieldError("chat_template_kwargs", f"must not hold {', '.join(refused)}")
        from mini_sglang.text.template_bounds import bounded_source, count_anew  # as late as transformers

        try:
            source = renderer.get_chat_template(None, others.get("tools"))
            count_anew()
            text: str = renderer.apply_chat_template(
                list(chat),
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template=bounded_source(source),
                **others,
            )
        except Exception as error:  # a template is a program: with some messages it may fail in any way
            problem = f"are not accepted by the model's chat template: {str(error)[:_MOST_WORDS]}"
            raise FieldError("messages", problem) from error
        _refuse_surrogates("messages", text)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters; empty for an id without a token.

        A leading space that `decode` drops at the start of a text (sentencepiece) is there.
        """
        piece: str | None = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._is_byte_level:  # as the library decodes: an added token may be spelled in the alphabet or as it is
            spelled = [_BYTE_OF_CHARACTER.get(character, b"") for character in piece]
            return b"".join(spelled) if all(spelled) else piece.encode()
        if token_id in self._added_texts:
            return piece.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match.group(1), 16)])
        return piece.replace("▁", " ").encode()


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer of a checkpoint, with its chat template and all of its end tokens.

    Raises FileNotFoundError if there is none, ValueError if it is damaged or of a kind that is not supported, or if a
    file that holds more than the tokenizer (a GGUF file, config.json) is damaged as a whole, which it says then.
    """
    try:
        if source.kind == "gguf":
            metadata = source.gguf.metadata
            end_ids, load = gguf_end_token_ids(metadata), functools.partial(_from_gguf, metadata)
        else:
            end_ids, load = end_token_ids(source.path), functools.partial(_from_folder, source.path)
    except ValueError as error:
        raise ValueError(f"model {source.name!r}: {error}") from error
    try:
        return load(end_ids)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"model {source.name!r}: {error}") from error
    except Exception as error:  # the libraries raise plain Exception for malformed files
        raise _cannot_be_loaded(source, error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, for which pyo3 has no name that could be imported
            raise
        raise _cannot_be_loaded(source, error) from error


def _cannot_be_loaded(source: ModelSource, error: BaseException) -> ValueError:
    problem = f"{type(error).__name__}: {error}" if isinstance(error, (KeyError, TypeError, AttributeError)) else error
    return ValueError(f"model {source.name!r}: the tokenizer in {source.path} cannot be loaded: {problem}")


def _from_folder(folder: Path, eos_token_ids: frozenset[int]) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").is_file():
        loader: Any = PreTrainedTokenizerFast  # takes tokenizer.json as it is; AutoTokenizer may rebuild parts of it
    elif any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "vocab.txt")):
        from transformers import AutoTokenizer  # imports torch, which a tokenizer does not need otherwise

        loader = AutoTokenizer
    else:
        raise FileNotFoundError(f"{folder} holds no tokenizer.json and no tokenizer.model")
    tokenizer = loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{type(tokenizer).__name__} has no fast form, which is needed")
    return Tokenizer.of(tokenizer, eos_token_ids)


def _from_gguf(metadata: Mapping[str, Any], eos_token_ids: frozenset[int]) -> Tokenizer:
    backend = TokenizerBackend.from_str(json.dumps(tokenizer_json(metadata), ensure_ascii=False))
    load_renderer = functools.partial(template_renderer, chat_templates(metadata), special_tokens(metadata))
    return Tokenizer(backend, eos_token_ids, load_renderer)


def _refuse_surrogates(field: str, text: str) -> None:
    if match := _SURROGATE.search(text):
        position = f"U+{ord(match.group()):04X} at index {match.start()}"
        raise FieldError(field, f"holds half of a surrogate pair ({position}), which is no character")


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other bytes for U+0100 and after."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): bytes([byte]) for byte in printable}
    return characters | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
_OF_TEMPLATES = {"tools", "documents", "kwargs"}  # arguments of transformers' method that reach the template
