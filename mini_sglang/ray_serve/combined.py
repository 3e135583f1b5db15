"""One answer made of those of all replicas, for requests that are to each of them: a scrape, an emptied cache; and one
made of those of all models, where there are several: their list, and whether they are well.

Knows answers as data, and neither Ray nor an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

_SAMPLE = re.compile(r"([^\s{]+)(?:\{(.*)\})?( .*)")  # name, labels, value of a line of metrics

MODELS = "/v1/models"
TO_ALL = {("GET", "/metrics"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache"), ("POST", "/abort")}
TO_EACH_MODEL = {("GET", MODELS), ("GET", "/health"), ("GET", "/ready"), ("GET", "/health_generate")}
_OF_ONE = {b"content-length", b"x-replica", b"x-request-id"}  # headers that are of a replica's answer alone


@dataclass(frozen=True)
class WholeAnswer:
    """What a replica answered. It can be pickled."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    body: bytes


def combine(path: str, answers: Sequence[WholeAnswer]) -> Response:
    """The answer for the client; an error, if a replica has answered with one. There is at least one answer.

    A list of models has those that the client may ask for: another model may have other keys.
    """
    failed = [answer for answer in answers if answer.status >= 400]
    good = [answer for answer in answers if answer.status < 400]
    shown = good[0] if good and (path == MODELS or not failed) else failed[0]
    if shown.status >= 400:
        body = shown.body
    elif path == "/metrics":
        body = merge_metrics({answer.replica: answer.body.decode() for answer in answers}).encode()
    elif path == MODELS:
        body = _join([json.loads(answer.body) for answer in good])
    elif ("GET", path) in TO_EACH_MODEL:
        body = shown.body
    else:
        body = _add_up([json.loads(answer.body) for answer in answers])
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in shown.headers if name not in _OF_ONE}
    return Response(body, status_code=shown.status, headers=headers)


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


def _join(lists: Sequence[Mapping[str, Any]]) -> bytes:
    """A list of what is in all of them."""
    return json.dumps({**lists[0], "data": [entry for one in lists for entry in one["data"]]}).encode()


def _add_up(answers: Sequence[Mapping[str, int]]) -> bytes:
    """An object of counts: the sum of each."""
    return json.dumps({name: sum(answer[name] for answer in answers) for name in answers[0]}).encode()
