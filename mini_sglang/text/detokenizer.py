"""Text from tokens, piece by piece: whole characters only, and never a character of a stop string too many.

`IncrementalDetokenizer` turns token ids into text such that the joined pieces equal the decode of the whole list, for
every list. `StopChecker` cuts text at stop strings. Neither knows requests, sampling or the engine, and nothing here
needs torch. (`tokenizers.decoders.DecodeStream` does not keep that equality: it has no flush, and decodes a run of
bytes that never becomes a character over and over.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence

from mini_sglang.sampling_params import Json
from mini_sglang.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Joined results of `push`, and of one final `flush`, equal `tokenizer.decode(ids, skip_special_tokens)`, but for
    the special tokens `shown_ids`, which are not skipped.

    Text that a later token could still change is held back: the bytes of an unfinished character, which `flush` gives
    out as U+FFFD just as the whole decode does, and a run of sentencepiece byte tokens until it ends or can no longer
    be valid UTF-8. Each token costs O(1), amortised.

    Raises ValueError if the tokenizer's decoder is of a kind whose text cannot be known token by token.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, shown_ids: Sequence[int] = ()
    ) -> None:
        self._skipped_ids = tokenizer.special_token_ids.difference(shown_ids) if skip_special_tokens else frozenset()
        self._decoder = _make_decoder(tokenizer)

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "", when characters or runs are unfinished."""
        return "" if token_id in self._skipped_ids else self._decoder.push(token_id)

    def flush(self) -> str:
        """What was held back, as it is decoded when nothing follows. Call it once, at the end."""
        return self._decoder.flush()


class StopChecker:
    """Cuts a text, given in pieces, before the first stop string, or behind it if `include`. How the text is split into
    pieces makes no difference.

    The match that is complete first wins, and of those that end at the same character the longest. Held back is only
    the longest end of the text that begins a stop string.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown and was not yet. After a match: ""."""
        if not self._stop:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), -len(stop), stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, _, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.matched)]
        num_visible = len(text) - max(partial_match(text, stop) for stop in self._stop)
        self._held = text[num_visible:]
        return text[:num_visible]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def partial_match(text: str, pattern: str) -> int:
    """How many characters at the end of `text` may be the beginning of `pattern`, but not all of it."""
    start = text.find(pattern[0], max(0, len(text) - len(pattern) + 1))
    while start >= 0 and not pattern.startswith(text[start:]):
        start = text.find(pattern[0], start + 1)
    return len(text) - start if start >= 0 else 0


class _ByteLevelDecoder:
    """GPT-2 style: a token is bytes, the text is all bytes read as UTF-8, with U+FFFD for bytes that are not."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceDecoder:
    """Sentencepiece style: a token is a piece of text, except that a run of byte tokens is read as UTF-8 together.

    The library's own decoder makes the text. What it does to a piece depends on whether text stands before it, which an
    anchor in front stands for; and a run of bytes is either valid as a whole, or one U+FFFD for each of its bytes.
    """

    _ANCHOR = "a"

    def __init__(
        self, id_to_token: Callable[[int], str | None], join: Callable[[list[str]], str], byte_fallback: bool
    ) -> None:
        self._id_to_token = id_to_token
        self._join = join
        self._byte_fallback = byte_fallback
        self._leading: list[str] | None = []  # all tokens so far, while they have no text; then None
        self._run: list[str] = []  # byte tokens that are not in the text yet
        self._run_is_broken = False  # it was not UTF-8: its bytes are in the text, each as U+FFFD
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token_id: int) -> str:
        token = self._id_to_token(token_id)
        if token is None:  # an id beyond the vocabulary (padded models) has no text
            return ""
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return self._push_byte(token, int(match[1], 16))
        return self.flush() + self._decode([token])

    def flush(self) -> str:
        text = self._decode(self._run) if self._run else ""
        self._run = []
        self._run_is_broken = False
        self._utf8.reset()
        return text

    def _push_byte(self, token: str, byte: int) -> str:
        """`push` for a token that spells `byte`."""
        if self._run_is_broken:
            return REPLACEMENT
        self._run.append(token)
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            text = self.flush()
            self._run_is_broken = True
            return text
        return ""

    def _decode(self, tokens: list[str]) -> str:
        """The text of `tokens` behind all that was decoded before; of a run of bytes they are all or none."""
        if self._leading is None:
            return self._join([self._ANCHOR, *tokens])[len(self._ANCHOR) :]
        self._leading += tokens
        text = self._join(self._leading)
        if text:
            self._leading = None
        return text


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECEWISE = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def _make_decoder(tokenizer: Tokenizer) -> _ByteLevelDecoder | _PieceDecoder:
    """One of the two ways from tokens to text, without skipping any."""
    backend = tokenizer.backend
    if backend.decoder is None:
        return _PieceDecoder(backend.id_to_token, " ".join, byte_fallback=False)
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevelDecoder(tokenizer.token_bytes)
    after_fuse = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
    if set(kinds) <= set(_PIECEWISE) and all(step["type"] == "Strip" and step["stop"] == 0 for step in after_fuse):
        return _PieceDecoder(backend.id_to_token, backend.decoder.decode, byte_fallback="ByteFallback" in kinds)
    raise ValueError(f"tokenizer decoder must be ByteLevel or a sequence of {', '.join(_PIECEWISE)}, got {kinds}")


def _decoder_steps(state: Json) -> list[Json]:
    if state["type"] != "Sequence":
        return [state]
    return [step for decoder in state["decoders"] for step in _decoder_steps(decoder)]
