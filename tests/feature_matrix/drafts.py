"""A proposer for cells: it knows the plain answers, and errs now and then."""

from __future__ import annotations

from collections.abc import Iterable

from mini_sglang.request import Request
from tests.feature_matrix.requests import Answer, Ask

MOST = 5  # drafted tokens
WRONG = 7  # each draft of a token at a multiple of it


class KnowsAnswers:
    """Drafts what a request will get, as far as the answers that it is told have the request's tokens."""

    def __init__(self) -> None:
        self._answers: dict[tuple[int, ...], list[list[int]]] = {}

    def learn(self, asks: Iterable[tuple[Ask, Answer]]) -> None:
        for ask, answer in asks:
            self._answers.setdefault(tuple(ask.prompt), []).append(list(answer.token_ids))

    def propose(self, request: Request, most: int) -> list[int]:
        """Now and then nothing, so that requests run ahead too."""
        known, count = request.output_ids, len(request.output_ids)
        for answer in self._answers.get(tuple(request.prompt_ids), ()):
            if answer[:count] == known:
                right = enumerate(answer[count : count + count % MOST], count)
                return [token_id if (place + 1) % WRONG else (token_id + 1) % 100 for place, token_id in right]
        return []

    def forget(self, request: Request) -> None:
        pass
