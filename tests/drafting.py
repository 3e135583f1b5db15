"""Proposers for tests, which know what requests will get."""

from __future__ import annotations

import random
from collections.abc import Mapping

from mini_sglang.request import Request


class Knowing:
    """Drafts from the answers it is told, by request id up to a colon, each token right with the chance of `accuracy`.

    It goes on past the end of a request's answer if the one that it is told does. With `whole`, drafts are as long as
    they may be, else of any length.
    """

    def __init__(self, answers: Mapping[str, list[int]], accuracy: float, *, whole: bool = False) -> None:
        self._answers, self._accuracy, self._whole = answers, accuracy, whole
        self._random = random.Random(0)

    def propose(self, request: Request, most: int) -> list[int]:
        answer, known = self._answers.get(request.request_id.partition(":")[0], []), len(request.output_ids)
        coming = answer[known : known + most]
        if not self._whole:
            coming = coming[: self._random.randint(0, most)]
        return [token if self._random.random() < self._accuracy else token ^ 1 for token in coming]

    def forget(self, request: Request) -> None:
        pass
