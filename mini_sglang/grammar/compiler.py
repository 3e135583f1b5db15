"""What an answer must look like: a schema, a regular expression, a grammar or a list of choices, as masks over tokens.

Compiles the grammar that sampling parameters ask for (with llguidance, against a model's vocabulary) and follows it
with one matcher per request. Knows no engine: callers decide when to compile and how long to wait.
"""

from __future__ import annotations

import copy
import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from mini_sglang.errors import FieldError
from mini_sglang.grammar.closing import EndingFinder
from mini_sglang.grammar.digits import DigitLimit, NumberBound
from mini_sglang.grammar.lark import ANY_TEXT, answer_entry, lark_string, refusal
from mini_sglang.grammar.schema import SchemaError, bytes_alone, followable, parameter_problem
from mini_sglang.sampling_params import Json, SamplingParams

if TYPE_CHECKING:  # importing transformers takes a second
    from mini_sglang.text.tokenizer import Tokenizer

NO_END_TOKEN = "it has no end token"  # why a model supports no grammar
_CACHED_GRAMMARS = 64
# Between two things in JSON stands nothing, one space, or a newline and up to 16 spaces: otherwise a confused model
# could write white space until its limit.
_WHITE_SPACE = r"[ ]|\n[ ]{0,16}"
# A mask takes microseconds to milliseconds; a grammar that needs more per token than these is refused, or ends its
# answer with an error.
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    max_items_in_row=20_000,  # four for each optional property
    verbose_errors=False,
)
_TRIALS = 6
_JSON_OPTIONS = {"whitespace_pattern": _WHITE_SPACE}
_ROOM_IN_A_CALL = 32  # tokens that must be left, beyond those of a short call, for one more to be begun
_LONGEST_ENDING = 256  # tokens: an ending is looked for from here to the limit


class Vocabulary(msgspec.Struct, frozen=True):
    """What a grammar is matched against: the bytes of every token. Crosses a process boundary."""

    tokens: list[bytes]  # by token id, as many as the model has
    special_token_ids: list[int]
    eos_token_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
        """Of a tokenizer and the model that goes with it."""
        special = sorted(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        return cls(list(map(tokenizer.token_bytes, range(vocab_size))), special, sorted(eos_token_ids))


class Matcher:
    """How far one answer has followed its grammar. Belongs to one thread at a time.

    An answer of at most `max_tokens` is brought to its end before it would be cut off, if a way there is found: so
    that it is all that its grammar asks for, though some of it may be empty. With `digits`, numbers are bounded.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        field: str,
        finder: EndingFinder,
        max_tokens: int,
        digits: DigitLimit | None = None,
        closings: Sequence[list[int]] = (),
        *,
        room_for_a_call: int = 0,
        end_of_calls: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._field = field
        self._numbers = None if digits is None else NumberBound(digits)
        self._finder = finder
        self._closings = closings
        self._room_for_a_call = room_for_a_call  # in tokens, for one more; none in a grammar of something else
        self._end_of_calls = list(end_of_calls)  # after the last; none: the answer may end there
        self.tokens_left = max_tokens
        self._next_look = min(max_tokens, _LONGEST_ENDING)  # tokens left when the way to the end is looked at next
        self._ending_length = 0  # at the latest look
        # The most tokens by which it was longer than at the look before, and a few; one more argument takes many.
        self._growth = max(4, min(room_for_a_call // 4, max_tokens // 8))
        self._ending: list[int] = []  # what is left of the one that is followed

    def advance(self, token_id: int) -> None:
        """Take in the next token of the answer. Raises FieldError if the grammar cannot go on."""
        self._matcher.consume_token(token_id)
        if self._numbers is not None:
            self._numbers.advance(token_id)
        self.tokens_left -= 1
        self._check()

    def fork(self) -> Matcher:
        """Another one at the same place, which goes on by itself."""
        other = copy.copy(self)
        other._matcher, other._numbers = self._matcher.deep_copy(), copy.copy(self._numbers)
        other._ending = self._ending.copy()
        return other

    def mask(self) -> bytes:
        """One bit per token that says whether it may come next, lowest bit first, in whole words of 32 bits.

        Raises FieldError if the grammar takes more than a mask may take, or nothing fits.
        """
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        if not any(mask):
            raise FieldError(self._field, "cannot be followed: it allows no token of this model here")
        if not self._ending and (self.tokens_left <= self._next_look or self._may_be_last_call(mask)):
            self._look_for_ending()
        if self._numbers is not None:
            mask = self._numbers.apply(mask)
        return (1 << self._ending.pop(0)).to_bytes(len(mask), "little") if self._ending else mask

    def ramble(self, rng: random.Random, num_tokens: int) -> None:
        """Take this many tokens at random, then a short way to the end. Raises FieldError if the grammar cannot go on.

        The answer cannot be gone on with afterwards.
        """
        for _ in range(num_tokens):
            if self.is_finished:
                return
            allowed = int.from_bytes(self.mask(), "little")
            first = rng.randrange(allowed.bit_length())
            ahead = allowed >> first << first
            self.advance((ahead & -ahead).bit_length() - 1)
        self._finder.find(self._matcher, _LONGEST_ENDING, self._closings)
        self._check()

    def _look_for_ending(self) -> None:
        """Take the way to the end if there is little more room than it takes.

        What the model says next may make it longer, as one more object does that it opens. As much is kept free as it
        has grown so far from one look to the next, or, between two calls, as one more call may need.
        """
        room = self.tokens_left - 1  # an answer that ends with its very last token counts as cut off
        ending = self._finder.find(self._matcher.deep_copy(), room, self._closings)
        if ending is None:  # what comes next may lead to one
            self._next_look = self.tokens_left - max(room // 8, 1)
            return
        if self._ending_length:
            self._growth = max(self._growth, len(ending) - self._ending_length)
        self._ending_length = len(ending)
        may_call = self._room_for_a_call > 0 and self._is_between_calls(ending)
        spare = room - len(ending) - (self._room_for_a_call if may_call else self._growth)
        if spare <= 0 and (may_call or not self._matcher.is_accepting()):  # a complete answer may be cut off
            self._ending = ending
        self._next_look = self.tokens_left - max(spare // 4, 1)

    def _may_be_last_call(self, mask: bytes) -> bool:
        """Whether calls may end here, and too few tokens are left for one more."""
        if self.tokens_left > self._room_for_a_call + len(self._end_of_calls) + 1:
            return False
        if self._end_of_calls:
            return bool(mask[self._end_of_calls[0] >> 3] >> (self._end_of_calls[0] & 7) & 1)
        return self._matcher.is_accepting()

    def _is_between_calls(self, ending: list[int]) -> bool:
        """Whether the calls so far are complete, so that `ending` only ends them."""
        if self._end_of_calls:
            return ending[: len(self._end_of_calls)] == self._end_of_calls
        return self._matcher.is_accepting() and not self._finder.takes_text(self._matcher)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing more can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise refusal(self._field, self._matcher.get_error())


class _Compiled(NamedTuple):
    matcher: LLMatcher  # at the beginning of an answer
    closings: list[list[int]]
    end_of_calls: list[int]
    room_for_a_call: int


class GrammarCompiler:
    """Compiles grammars against one vocabulary, and remembers the latest. Safe to share between threads.

    `encode` is the model's tokenizer: where a grammar leaves one text only, its tokens are the ones that come. Without
    it the longest tokens do, which is good enough to find out whether a grammar compiles.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode: Callable[[str], list[int]] | None = None,
        *,
        num_cached: int = _CACHED_GRAMMARS,
    ) -> None:
        if not vocabulary.eos_token_ids:
            raise ValueError(NO_END_TOKEN)
        self._special = {vocabulary.tokens[token_id]: token_id for token_id in vocabulary.special_token_ids}
        wrapper = TokenizerWrapper(_TokenTable(vocabulary, encode or self._greedy, self._greedy))
        self._tokenizer = LLTokenizer(wrapper, eos_token=vocabulary.eos_token_ids)
        self._finder = EndingFinder(vocabulary.tokens, vocabulary.eos_token_ids)
        self._digits = DigitLimit(vocabulary.tokens)
        self._num_cached = num_cached
        self._compiled: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._lock = threading.Lock()

    def _greedy(self, text: str) -> list[int]:
        return self._tokenizer.greedy_tokenize(text)

    def compile(self, params: SamplingParams, max_tokens: int = 1 << 31) -> Matcher:
        """A matcher at the beginning of an answer, of at most `max_tokens`, to `params`, which are constrained.

        Raises FieldError if the grammar is malformed, too large or not supported.
        """
        field, key = error_field(params), grammar_key(params)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile(params, field)
            with self._lock:
                self._compiled[key] = compiled
                if len(self._compiled) > self._num_cached:
                    self._compiled.popitem(last=False)
        is_json = params.response_format is not None or params.tool_grammar is not None
        return Matcher(
            compiled.matcher.deep_copy(),
            field,
            self._finder,
            max_tokens,
            self._digits if is_json else None,
            compiled.closings,
            room_for_a_call=compiled.room_for_a_call,
            end_of_calls=compiled.end_of_calls,
        )

    def _closings(self, params: SamplingParams) -> tuple[list[list[int]], list[int]]:
        """The tokens that end texts without quotes in this grammar, and those that end all calls."""
        calls = {} if params.tool_grammar is None else json.loads(params.tool_grammar)[0]
        closings = list(calls.get("closings", ()))
        if params.grammar_after is not None:
            closings.append([self._special.get(params.grammar_after.encode(), params.grammar_after)])
        return [self._ids(parts) for parts in closings], self._ids(calls.get("end", ()))

    def _ids(self, parts: Sequence[str | int]) -> list[int]:
        return [i for part in parts for i in ([part] if isinstance(part, int) else self._greedy(part))]

    def check(self, params: SamplingParams) -> None:
        """Raise FieldError if the grammar does not compile, or fails in one of a few answers.

        They are the same ones each time. llguidance does the most of its work in the middle of answers, and ends the
        one in which a limit is reached or that has come to where nothing fits.
        """
        field = error_field(params)
        for turn in range(_TRIALS):
            trial = self.compile(params)
            try:
                trial.ramble(random.Random(turn), turn * 4)
            except FieldError as error:
                raise FieldError(field, error.problem) from None

    def _compile(self, params: SamplingParams, field: str) -> _Compiled:
        matcher = LLMatcher(self._tokenizer, self._source(params), log_level=0, limits=_LIMITS)
        try:
            Matcher(matcher, field, self._finder, max_tokens=1 << 31).mask()  # raises what is wrong with it
        except FieldError:
            _grammars(params, blame=True)  # in words, if a schema is at fault
            raise
        closings, end = self._closings(params)
        if params.tool_grammar is None:
            return _Compiled(matcher, closings, end, 0)
        shortest = self._finder.find(matcher.deep_copy(), _LONGEST_ENDING, closings) or []
        return _Compiled(matcher, closings, end, len(shortest) + _ROOM_IN_A_CALL)

    def _source(self, params: SamplingParams) -> str:
        """In llguidance's own format: a list of grammars, of which the first may refer to the others by name."""
        grammars = _grammars(params)
        if params.grammar_after is not None:
            marker = self._special.get(params.grammar_after.encode())
            lines = [
                "start: head BETWEEN @answer",
                f"head[lazy]: ANY {lark_string(params.grammar_after)}" if marker is None else f"head: ANY <[{marker}]>",
                f"ANY: {ANY_TEXT}",
                r"BETWEEN: /[ \n]{0,4}/",
            ]
            grammars = [{"lark_grammar": "\n".join(lines)}, {**grammars[0], "name": "answer"}, *grammars[1:]]
        return json.dumps({"grammars": grammars})


class _TokenTable:
    """The vocabulary under the names that llguidance looks for."""

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], list[int]], greedy: Callable[[str], list[int]]
    ) -> None:
        special = [vocabulary.tokens[token_id].decode(errors="replace") for token_id in vocabulary.special_token_ids]
        self._special = re.compile("|".join(map(re.escape, filter(None, special))) or r"(?!)")
        self._greedy = greedy  # for text that spells a special token, which must not become one
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):  # asked once, to find out that strings it must be
            raise TypeError("a tokenizer takes strings")
        return self._greedy(text) if self._special.search(text) else self._encode(text)


def error_field(params: SamplingParams) -> str:
    """The field of a request that an error of its grammar is about. Raises ValueError if there is no grammar."""
    field = params.grammar_field
    if field is None:
        raise ValueError("the sampling parameters hold no grammar")
    return "tools" if field == "tool_grammar" else field


def unsupported(params: SamplingParams, reason: str) -> FieldError:
    """The error of a grammar with a model that supports none; `reason` is of the model."""
    return FieldError(error_field(params), f"is not supported with this model: {reason}")


def grammar_key(params: SamplingParams) -> bytes:
    """The part of `params` that the grammar depends on, as SamplingParams in msgpack. Equal for equal grammars."""
    field = params.grammar_field or ""
    only = SamplingParams(**{field: getattr(params, field)}, grammar_after=params.grammar_after)
    return msgspec.msgpack.encode(only)


def _grammars(params: SamplingParams, *, blame: bool = False) -> list[Json]:
    """Entries of llguidance's list of grammars. Raises FieldError; with `blame` for all schemas that cannot be used."""
    entries = [answer_entry(params)] if params.tool_grammar is None else json.loads(params.tool_grammar)
    return [_prepared(entry, blame) for entry in entries]


def _prepared(entry: Json, blame: bool) -> Json:
    """An entry as llguidance takes it. Raises FieldError for a schema that cannot be followed."""
    name = {"name": entry["name"]} if "name" in entry else {}
    if "json_schema" not in entry:
        grammar = {"lark_grammar": entry["lark_grammar"]}
        if "field" in entry:  # tried alone, so that an error is not said to be of the tools
            alone = LLMatcher(bytes_alone(), json.dumps({"grammars": [grammar]}), log_level=0, limits=_LIMITS)
            if alone.is_error():
                raise refusal(entry["field"], alone.get_error())
        return {**name, **grammar}
    tool = entry.get("tool")
    try:
        schema = followable(entry["json_schema"], strict=entry["strict"], blame=blame)
    except (SchemaError, RecursionError) as error:
        problem = "the schema is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if tool is None:
            raise FieldError("response_format", f"cannot be followed: {problem}") from None
        raise FieldError("tools", f'cannot be followed: tool "{tool}": {problem}') from None
    if tool is not None and not entry.get("is_value"):
        schema = _object_alone(schema)
    return {**name, "json_schema": {**schema, "x-guidance": _JSON_OPTIONS}}


def _object_alone(schema: Json) -> Json:
    """A schema of a tool's arguments, of which only objects are left."""
    if schema.get("type") == "object":
        return schema
    definitions = schema.pop("$defs", None)
    return {"type": "object", "allOf": [schema], **({} if definitions is None else {"$defs": definitions})}


def check_parameters(schema: Json) -> None:
    """Raise ValueError for a schema of arguments that is malformed or fits no object. Compiles nothing."""
    text = json.dumps(schema)
    problem = parameter_problem(text) if len(text) < 1 << 14 else parameter_problem.__wrapped__(text)  # not kept
    if problem:
        raise ValueError(problem)
