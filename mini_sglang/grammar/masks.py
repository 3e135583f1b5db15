"""The masks of running requests that have a grammar, computed in threads beside the engine's steps.

A request gets a matcher, which is compiled, and then advanced by the tokens that were read; each time the mask for the
token after them is due, with those along a draft if there is one, and the request is not scheduled before they are
there. Steps of other requests go on meanwhile. Knows request ids, tokens and grammars; does not know the scheduler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from mini_sglang.errors import FieldError
from mini_sglang.grammar.ahead import Ahead, Lookahead
from mini_sglang.grammar.compiler import GrammarCompiler, unsupported
from mini_sglang.sampling_params import SamplingParams

PATIENCE_S = 0.002  # a mask takes microseconds; one that takes longer costs its request a step, and the others none


@dataclass(frozen=True, slots=True)
class NextMask:
    """What came of a request's latest tokens: masks for the next ones, or the end of the answer."""

    request_id: str
    ahead: Ahead | None = None  # None: nothing can follow
    error: str | None = None  # why, if the grammar is at fault
    error_field: str | None = None  # the subject of `error`, which is then the rest of a sentence


@dataclass(slots=True)
class _Constraint:
    params: SamplingParams
    max_tokens: int
    is_compiled: bool = False
    lookahead: Lookahead | None = None
    due: Future[Ahead | None] | None = None


class GrammarMasks:
    """One matcher per request, and the threads that work on them. `load` makes the compiler, for the first grammar.

    Drafts have up to `most_drafted` tokens. `add` and `check` belong to one thread.
    """

    def __init__(self, load: Callable[[], GrammarCompiler], most_drafted: int = 0) -> None:
        self._compiling = ThreadPoolExecutor(2, "grammar")
        self._advancing = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "mask")
        self._load = load
        self._most_drafted = most_drafted
        self._compiler: Future[GrammarCompiler] | None = None  # the engine starts without
        self._constraints: dict[str, _Constraint] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._constraints

    def __len__(self) -> int:
        return len(self._constraints)

    def check(self, params: SamplingParams) -> None:
        """Wait until the grammar is compiled and tried. Raises FieldError if it cannot be followed."""
        self._load_for(self._loading_compiler(), params).check(params)

    def _loading_compiler(self) -> Future[GrammarCompiler]:
        if self._compiler is None:
            self._compiler = self._compiling.submit(self._load)
        return self._compiler

    def _load_for(self, loading: Future[GrammarCompiler], params: SamplingParams) -> GrammarCompiler:
        try:
            return loading.result()
        except (ValueError, OSError) as error:
            raise unsupported(params, str(error)) from error

    def add(self, request_id: str, params: SamplingParams, max_tokens: int) -> None:
        """Begin to compile the grammar of a request, whose answer has at most `max_tokens`, and its first mask."""
        constraint = self._constraints[request_id] = _Constraint(params, max_tokens)
        constraint.due = self._compiling.submit(self._begin, self._loading_compiler(), constraint)

    def _begin(self, loading: Future[GrammarCompiler], constraint: _Constraint) -> Ahead | None:
        matcher = self._load_for(loading, constraint.params).compile(constraint.params, constraint.max_tokens)
        constraint.lookahead = Lookahead(matcher)
        return constraint.lookahead.look()

    def advance(self, request_id: str, token_ids: list[int], draft: list[int] | None = None) -> None:
        """Begin to compute the mask for the token after `token_ids`, which were drawn under the masks before.

        And those along `draft` and what the grammar forces; None: nothing is to be drafted.
        """
        constraint = self._constraints[request_id]
        if constraint.lookahead is None or constraint.due is not None:
            raise RuntimeError(f"request {request_id} has a token before the mask that it was drawn under")
        most = 0 if draft is None else self._most_drafted
        constraint.due = self._advancing.submit(_advance, constraint.lookahead, token_ids, draft or [], most)

    def drop(self, request_id: str) -> None:
        """Forget a request, if it has a grammar."""
        constraint = self._constraints.pop(request_id, None)
        if constraint is not None and constraint.due is not None:
            constraint.due.cancel()

    def take_ready(self) -> list[NextMask]:
        """What has become known since the last call. Waits a moment for requests in the middle of an answer."""
        due = [(name, each, each.due) for name, each in self._constraints.items() if each.due is not None]
        wait([future for _, each, future in due if each.is_compiled], PATIENCE_S)
        return [self._take(name, each, future) for name, each, future in due if future.done()]

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds until there is something to take. For an engine that can do nothing else."""
        due = [constraint.due for constraint in self._constraints.values() if constraint.due is not None]
        wait(due, timeout_s, FIRST_COMPLETED)

    def _take(self, request_id: str, constraint: _Constraint, due: Future[Ahead | None]) -> NextMask:
        constraint.due, constraint.is_compiled = None, True
        try:
            return NextMask(request_id, due.result())
        except FieldError as error:
            return NextMask(request_id, None, error.problem, error.field)
        except Exception as error:  # a fault of one grammar must not end the engine
            return NextMask(request_id, None, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Let the threads end."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._advancing.shutdown(wait=False, cancel_futures=True)


def _advance(lookahead: Lookahead, token_ids: list[int], draft: list[int], most: int) -> Ahead | None:
    lookahead.advance(token_ids)
    return lookahead.look(draft, most)
