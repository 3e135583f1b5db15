"""One answer made of those of all replicas, for requests that are to each of them: a scrape, an emptied cache.

Knows answers as data, and neither Ray nor an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.responses import Response

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})?( .*)")  # name, labels, value of a line of metrics

TO_ALL = {("GET", "/metrics"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache"), ("POST", "/abort")}


@dataclass(frozen=True)
class WholeAnswer:
    """What a replica answered. It can be pickled."""

    replica: str
    status: int
    content_type: str
    body: bytes


def combine(path: str, answers: Sequence[WholeAnswer]) -> Response:
    """The answer for the client; an error, if a replica has answered with one. There is at least one answer."""
    failed = [answer for answer in answers if answer.status >= 400]
    shown = (failed or answers)[0]
    if failed:
        body = shown.body
    elif path == "/metrics":
        body = merge_metrics({answer.replica: answer.body.decode() for answer in answers}).encode()
    else:
        body = _add_up([json.loads(answer.body) for answer in answers])
    return Response(body, status_code=shown.status, headers={"content-type": shown.content_type})


def merge_metrics(texts: Mapping[str, str]) -> str:
    """One text in Prometheus' format, of each replica's own: each sample gets a label `replica`."""
    families: dict[str, dict[str, None]] = {}  # by name: its HELP and TYPE lines, then samples; a dict keeps each once
    for replica, text in texts.items():
        family: dict[str, None] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split()[2], {})
                family[line] = None
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                family[f'{name}{{replica="{replica}"{"," + labels if labels else ""}}}{value}'] = None
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _add_up(answers: Sequence[Mapping[str, int]]) -> bytes:
    """An object of counts: the sum of each."""
    return json.dumps({name: sum(answer[name] for answer in answers) for name in answers[0]}).encode()
