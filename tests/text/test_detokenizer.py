"""Joined pieces equal the whole decode, for every token sequence; stop strings are cut exactly however text comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mini_sglang.text.detokenizer import IncrementalDetokenizer, StopChecker
from mini_sglang.text.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is Paris.\n\n",
    "   leading and   inner spaces  ",
    "日本語と中文、한국어",
    "👨‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 ﷽",
    "def f(x):\n\treturn x  # → ∀ε>0",
]
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
SPACE_KEEPING = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


PIECES = ["<unk>", "▁", "▁▁", "▁a", "b", "▁b▁", "日", "é"]
FIRST_BYTE = len(PIECES)  # id of <0x00>


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())


def piecewise(decoder: decoders.Decoder | None) -> Tokenizer:
    """A tokenizer with pieces of text and all byte tokens, as sentencepiece makes them."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    vocab |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return wrap(backend)


def assert_pieces_equal_decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    for skip_special_tokens in (True, False):
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
        whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        assert "".join(pieces) == whole


@settings(max_examples=600, deadline=None)
@given(data=st.data())
def test_pieces_equal_the_whole_decode_of_any_ids(builtin_tokenizer: Tokenizer, data: st.DataObject) -> None:
    any_id = st.integers(0, builtin_tokenizer.vocab_size + 10)
    of_texts = st.sampled_from(sorted({i for text in TEXTS for i in builtin_tokenizer.encode(text)}))
    specials = st.sampled_from(sorted(builtin_tokenizer.special_token_ids))
    assert_pieces_equal_decode(builtin_tokenizer, data.draw(st.lists(any_id | of_texts | specials, max_size=24)))


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40))
def test_pieces_equal_the_whole_decode_of_any_text(builtin_tokenizer: Tokenizer, text: str) -> None:
    assert_pieces_equal_decode(builtin_tokenizer, builtin_tokenizer.encode(text))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_without_replacement_characters(builtin_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(builtin_tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in builtin_tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "decoder",
    [SENTENCEPIECE, SPACE_KEEPING, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"), None],
    ids=["sentencepiece", "space-keeping", "metaspace", "metaspace-never", "no-decoder"],
)
def test_pieces_equal_the_whole_decode_with_byte_fallback(decoder: decoders.Decoder | None) -> None:
    tokenizer = piecewise(decoder)
    byte_ids = [FIRST_BYTE + byte for byte in "é日👨A".encode() + b"\xff\x80"]
    some_id = st.sampled_from([*range(FIRST_BYTE), tokenizer.vocab_size - 1, tokenizer.vocab_size + 3, *byte_ids])

    @settings(max_examples=400, deadline=None)
    @given(ids=st.lists(some_id, max_size=16))
    def check(ids: list[int]) -> None:
        assert_pieces_equal_decode(tokenizer, ids)

    check()


def test_added_tokens_are_spelled_as_the_decoder_spells_them() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "Ġb": 1, "Ã": 2, "©": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["é", "two words", "<｜end▁of▁turn｜>", "Ġplain", "日本"])
    tokenizer = wrap(backend)

    @settings(max_examples=200, deadline=None)
    @given(ids=st.lists(st.integers(0, tokenizer.vocab_size), max_size=8))
    def check(ids: list[int]) -> None:
        assert_pieces_equal_decode(tokenizer, ids)

    check()


def test_a_byte_run_is_given_out_as_soon_as_it_cannot_become_text() -> None:
    tokenizer = piecewise(SENTENCEPIECE)
    first, broken = FIRST_BYTE + 0xC3, FIRST_BYTE + 0xFF
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(first) == ""
    assert detokenizer.push(broken) == "\ufffd\ufffd"
    assert [detokenizer.push(broken) for _ in range(1000)] == ["\ufffd"] * 1000
    assert detokenizer.flush() == ""


def test_a_decoder_whose_text_depends_on_what_follows_is_refused() -> None:
    with pytest.raises(ValueError, match="BPEDecoder"):
        IncrementalDetokenizer(piecewise(decoders.BPEDecoder()))


def test_the_text_ends_before_the_stop_string_wherever_it_is_split() -> None:
    text = "one two three four"
    for cut in range(len(text)):
        checker = StopChecker(["three"])
        assert checker.push(text[:cut]) + checker.push(text[cut:]) + checker.flush() == "one two "
        assert checker.matched == "three"


def test_the_stop_string_is_kept_if_asked_for_and_nothing_after_it() -> None:
    checker = StopChecker(["three"], include=True)
    assert checker.push("one two thr") + checker.push("ee four") + checker.push("five") == "one two three"


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["aab", "xyz"])
    assert checker.push("hello a") == "hello "
    assert checker.push("a") == ""
    assert checker.push("a") == "a"  # "aa" may still become "aab"
    assert checker.push("x") == "aa"
    assert checker.flush() == "x"
    assert checker.matched is None


def test_the_match_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    checker = StopChecker(["bc", "abc", "abcdef"])
    assert checker.push("xabcdef") == "x"
    assert checker.matched == "abc"


def reference_stop(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        matches = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def longest_held(text: str, stop: list[str]) -> int:
    return max((n for pattern in stop for n in range(len(pattern)) if text.endswith(pattern[:n])), default=0)


@settings(max_examples=1000, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_stopping_equals_a_search_of_the_whole_text(pieces: list[str], stop: list[str], include: bool) -> None:
    checker = StopChecker(stop, include=include)
    shown, seen = "", ""
    for piece in pieces:
        shown += checker.push(piece)
        seen += piece
        if checker.matched is None:
            assert len(seen) - len(shown) == longest_held(seen, stop)
    shown += checker.flush()
    assert (shown, checker.matched) == reference_stop("".join(pieces), stop, include)


def test_detokenising_looks_at_each_token_once(monkeypatch: pytest.MonkeyPatch, builtin_tokenizer: Tokenizer) -> None:
    looked_at: list[int] = []
    token_bytes = builtin_tokenizer.token_bytes

    def counting(token_id: int) -> bytes:
        looked_at.append(token_id)
        return token_bytes(token_id)

    monkeypatch.setattr(builtin_tokenizer, "token_bytes", counting)
    ids = builtin_tokenizer.encode("👨")[:1] * 500  # first bytes of characters that never become whole
    detokenizer = IncrementalDetokenizer(builtin_tokenizer)
    for token_id in ids:
        detokenizer.push(token_id)
    assert looked_at == ids
