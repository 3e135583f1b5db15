"""Checks of L6: pieces of text join to the whole decode, and stop strings are cut exactly, however the text comes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mini_sglang.learn.checking import expect, guards
from mini_sglang.outputs import FinishReason, TokenOutput
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.detokenizer import IncrementalDetokenizer, StopChecker
from mini_sglang.text.output_processor import OutputProcessor
from mini_sglang.text.tokenizer import Tokenizer

BYTES = range(256)
PIECES = ["<unk>", "▁", "▁the", "▁cat", "s", "日"]
FIRST_BYTE = len(PIECES)  # id of <0x00>
NO_TOKEN = 300  # an id beyond both vocabularies
JOINED = "joined pieces = decode of the whole list"


def byte_level() -> Tokenizer:
    """GPT-2's kind, without merges: token i is byte i, 256 is the special <|end|>."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in BYTES if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = Backend(models.BPE(vocab={alphabet[byte]: byte for byte in BYTES}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset([256]))


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: pieces of text, spaces written ▁, and a token for every byte that no piece covers."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    vocab |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in BYTES}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer.of(PreTrainedTokenizerFast(tokenizer_object=backend), frozenset())


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def pushed(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """What each token gives, and in the last place what the end gives."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


def name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as a failure tells of it."""
    if tokenizer is BYTE_LEVEL and token_id in BYTES:
        return f"{token_id:02X}"
    return tokenizer.backend.id_to_token(token_id) or "(an id without a token)"


def expect_joined(tokenizer: Tokenizer, ids: list[int], read: str) -> None:
    """Expect that the pieces of `ids` join to the whole decode. If they do not, tell it of as few ids as possible."""
    shortest, candidates = ids, [ids]
    while wrong := [some for some in candidates if "".join(pushed(tokenizer, some)) != tokenizer.decode(some)]:
        shortest = wrong[0]
        candidates = [shortest[:index] + shortest[index + 1 :] for index in range(len(shortest))]
    what = f"text of the tokens {' '.join(name(tokenizer, token_id) for token_id in shortest)}"
    expect("".join(pushed(tokenizer, shortest)), tokenizer.decode(shortest), what, invariant=JOINED, read=read)


def spelled(text: str) -> list[int]:
    """The ids of byte tokens of the sentencepiece tokenizer."""
    return [FIRST_BYTE + byte for byte in text.encode()]


# -- byte-level tokens ------------------------------------------------------------------------------------------------


@guards("decode-each-token")
def test_a_character_comes_out_with_its_last_byte() -> None:
    expect(
        pushed(BYTE_LEVEL, list("né🙂".encode())),
        ["n", "", "é", "", "", "", "🙂", ""],
        "text of each of the 7 bytes of 'né🙂', and of the end",
        invariant="only whole characters are given out",
        read="L6: Bytes that are not characters yet",
    )


@guards("bytes-vanish")
def test_a_byte_that_is_no_character_is_shown_as_such() -> None:
    expect(
        "".join(pushed(BYTE_LEVEL, [0xC3, ord("a"), 0xFF])),
        BYTE_LEVEL.decode([0xC3, ord("a"), 0xFF]),
        "text of the bytes C3 61 FF",
        invariant=JOINED,
        read="L6: Bytes that are not characters yet",
    )


@guards("end-forgotten")
def test_an_answer_that_ends_inside_a_character_says_so() -> None:
    expect(
        "".join(pushed(BYTE_LEVEL, list("ok 🙂".encode())[:-1])),
        BYTE_LEVEL.decode(list("ok 🙂".encode())[:-1]),
        "text of an answer that max_tokens cut off one byte before its end",
        invariant=JOINED,
        read="L6: Bytes that are not characters yet",
    )


@guards("special-tokens-shown")
def test_special_tokens_have_no_text_unless_asked_for() -> None:
    expect(pushed(BYTE_LEVEL, [ord("a"), 256])[1], "", "text of <|end|>", read="L6: What a token is")


# -- pieces of text ---------------------------------------------------------------------------------------------------


@guards("spaces-eaten")
def test_only_the_first_space_of_all_is_dropped() -> None:
    ids = [PIECES.index(piece) for piece in ("▁the", "▁cat", "s", "▁the")]
    expect(
        pushed(SENTENCEPIECE, ids),
        ["the", " cat", "s", " the", ""],
        "text of the pieces ▁the ▁cat s ▁the, and of the end",
        invariant=JOINED,
        read="L6: Pieces that depend on what stands before",
    )


@guards("bytes-alone")
def test_byte_tokens_are_read_together() -> None:
    ids = [PIECES.index("▁the"), *spelled("é"), PIECES.index("s")]
    expect(
        "".join(pushed(SENTENCEPIECE, ids)),
        "theés",
        "text of ▁the <0xC3> <0xA9> s",
        invariant=JOINED,
        read="L6: Pieces that depend on what stands before",
    )


@guards("half-a-run")
def test_a_run_of_bytes_is_valid_as_a_whole_or_not_at_all() -> None:
    ids = [PIECES.index("▁the"), FIRST_BYTE + 0xFF, *spelled("€"), PIECES.index("s")]
    expect(
        "".join(pushed(SENTENCEPIECE, ids)),
        SENTENCEPIECE.decode(ids),
        "text of ▁the <0xFF> <0xE2> <0x82> <0xAC> s",
        invariant=JOINED,
        read="L6: Pieces that depend on what stands before",
    )


# -- stop strings -----------------------------------------------------------------------------------------------------


def stopped(stop: list[str], pieces: Sequence[str]) -> tuple[list[str], str | None]:
    """What is visible after each piece, the last entry at the end, and which stop string matched."""
    checker = StopChecker(stop)
    visible = [checker.push(piece) for piece in pieces]
    return [*visible, checker.flush()], checker.matched


@guards("stop-in-one-piece")
def test_a_stop_string_is_found_across_pieces() -> None:
    expect(
        stopped(["STOP"], ["abcS", "TO", "P tail"])[1],
        "STOP",
        "what matched in the pieces 'abcS', 'TO', 'P tail', with the stop string STOP",
        invariant="how the text is split into pieces makes no difference",
        read="L6: Stop strings",
    )


@guards("stop-leaks")
def test_no_character_of_a_stop_string_is_shown() -> None:
    visible, _ = stopped(["STOP"], ["abcST", "OP"])
    expect(
        "S" in visible[0],
        False,
        f"whether anything of STOP is visible after 'abcST' ({visible[0]!r} is), which goes on with OP",
        invariant="what is shown cannot be taken back",
        read="L6: Stop strings",
    )


@guards("held-too-long")
def test_text_that_cannot_begin_a_stop_string_is_shown_at_once() -> None:
    visible, _ = stopped(["STOP"], ["hello", "Sally"])
    expect(
        visible,
        ["hello", "Sally", ""],
        "visible after 'hello', after 'Sally' and at the end, with the stop string STOP",
        invariant="held back is the longest end of the text that begins a stop string, and no more",
        read="L6: Stop strings",
    )


@guards("restart-from-zero")
def test_a_stop_string_is_found_behind_a_false_start() -> None:
    expect(
        stopped(["aab"], ["aaab"]),
        (["a", ""], "aab"),
        "visible text, and what matched, of 'aaab' with the stop string aab",
        invariant="after a mismatch the longest beginning that still fits goes on",
        read="L6: False starts",
    )
    expect(
        stopped(["\n\nUser:"], ["\n\n\n", "User:"]),
        (["\n", "", ""], "\n\nUser:"),
        "visible text, and what matched, of '\\n\\n\\n', 'User:' with the stop string '\\n\\nUser:'",
        invariant="after a mismatch the longest beginning that still fits goes on",
        read="L6: False starts",
    )


@guards("shortest-wins")
def test_of_two_that_end_together_the_longer_one_is_cut() -> None:
    expect(
        stopped(["\n", "\n\nUser:\n"], ["fine", "\n\nUser:\n"])[1],
        "\n",
        "what matches first of '\\n' and '\\n\\nUser:\\n': the one that is complete first",
        read="L6: Stop strings",
    )
    expect(
        stopped(["!", "end!"], ["the end!"]),
        (["the ", ""], "end!"),
        "visible text, and what matched, of 'the end!' with the stop strings '!' and 'end!'",
        invariant="of those that end at the same character the longest wins",
        read="L6: Stop strings",
    )


@guards("always-cut")
def test_a_stop_string_stays_in_the_text_where_it_was_asked_for() -> None:
    checker = StopChecker(["STOP"], include=True)
    expect(
        [checker.push("abcST"), checker.push("OP tail")],
        ["abc", "STOP"],
        "visible of 'abcST', 'OP tail' with the stop string STOP and include=True",
        read="L6: Stop strings",
    )


@guards("held-text-lost")
def test_what_was_held_back_is_given_out_when_the_answer_ends() -> None:
    processor = OutputProcessor(BYTE_LEVEL, "a", 1, SamplingParams(stop=["STOP"]))
    texts = []
    for token_id in b"go ST":
        is_last = token_id == ord("T")
        reason = FinishReason.LENGTH if is_last else None
        output = TokenOutput(request_id="a", token_ids=[token_id], finish_reason=reason)
        texts.append(processor.push(output).text_delta)
    expect(
        "".join(texts),
        "go ST",
        "the whole text of an answer that max_tokens ends inside what might have been a stop string",
        invariant="text that was not cut is shown",
        read="L6: Stop strings",
    )


# -- anything ---------------------------------------------------------------------------------------------------------


def test_pieces_of_any_ids_join_to_the_whole_decode() -> None:
    rng = random.Random(6)
    some_bytes = [*"é日🙂 a".encode(), 0xFF, 0x80]
    pieces = [*range(FIRST_BYTE), *(FIRST_BYTE + byte for byte in some_bytes)]
    for _ in range(300):
        ids = rng.choices([*some_bytes, 256, NO_TOKEN], k=rng.randrange(12))
        expect_joined(BYTE_LEVEL, ids, "L6: Bytes that are not characters yet")
        ids = rng.choices([*pieces, NO_TOKEN], k=9)
        expect_joined(SENTENCEPIECE, ids, "L6: Pieces that depend on what stands before")


def test_stop_strings_are_cut_as_by_a_search_in_the_whole_text() -> None:
    rng = random.Random(7)
    for _ in range(500):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
        text = "".join(rng.choices("ab", k=12))
        ends = [(text.find(each) + len(each), -len(each)) for each in stop if each in text]
        expected = text[: sum(min(ends))] if ends else text
        pieces, at = [], 0
        while at < len(text):
            size = rng.randint(1, 4)
            pieces.append(text[at : at + size])
            at += size
        expect(
            "".join(stopped(stop, pieces)[0]),
            expected,
            f"visible of {pieces} with the stop strings {stop}",
            read="L6: Stop strings",
        )
