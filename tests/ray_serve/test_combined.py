"""Answers of several replicas as one."""

from __future__ import annotations

import json

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mini_sglang.ray_serve.combined import WholeAnswer, combine, merge_metrics


def answer(replica: str, body: bytes, status: int = 200) -> WholeAnswer:
    headers = ((b"content-type", b"application/json"), (b"x-replica", replica.encode()), (b"x-word", b"yes"))
    return WholeAnswer(replica, status, headers, body)


def test_every_sample_has_its_replica_and_every_family_is_said_once() -> None:
    registry = CollectorRegistry()
    counter = Counter("fleet:requests", "Requests", ["model", "reason"], registry=registry)
    counter.labels('a "quoted", name', "stop").inc(3)
    Gauge("fleet:running", "Without a label", registry=registry).set(2)
    Histogram("fleet:seconds", "With buckets", ["model"], registry=registry).labels("m").observe(0.3)
    text = generate_latest(registry).decode()
    merged = merge_metrics({"one": text, "two": text})
    before = {(sample.name, tuple(sample.labels.items()), sample.value) for sample in samples(text)}
    for replica in ("one", "two"):
        mine = [sample for sample in samples(merged) if sample.labels["replica"] == replica]
        without = {
            (sample.name, tuple((k, v) for k, v in sample.labels.items() if k != "replica"), sample.value)
            for sample in mine
        }
        assert without == before
    types = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) == sum(line.startswith("# TYPE") for line in text.splitlines())


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_counts_are_added_up() -> None:
    response = combine("/flush_cache", [answer("one", b'{"flushed_pages":2}'), answer("two", b'{"flushed_pages":3}')])
    assert response.status_code == 200
    assert json.loads(bytes(response.body)) == {"flushed_pages": 5}


def test_an_error_of_one_is_the_answer() -> None:
    response = combine("/flush_cache", [answer("one", b'{"flushed_pages":2}'), answer("two", b'{"error":{}}', 503)])
    assert response.status_code == 503
    assert bytes(response.body) == b'{"error":{}}'


def test_a_list_of_models_has_those_that_the_client_has_a_key_for() -> None:
    lists = [answer(name, b'{"object":"list","data":[{"id":"%s"}]}' % name.encode()) for name in ("one", "two")]
    refused = answer("three", b'{"error":{}}', 401)
    response = combine("/v1/models", [refused, *lists])
    assert response.status_code == 200
    assert json.loads(bytes(response.body)) == {"object": "list", "data": [{"id": "one"}, {"id": "two"}]}
    assert combine("/v1/models", [refused]).status_code == 401


def test_all_models_are_well_when_each_is() -> None:
    well, ill = answer("one", b'{"status":"ok"}'), answer("two", b'{"error":{}}', 503)
    assert bytes(combine("/health", [well, well]).body) == b'{"status":"ok"}'
    assert combine("/health", [well, ill]).status_code == 503


def test_headers_are_kept_but_for_those_of_one_replica() -> None:
    response = combine("/v1/models", [answer("one", b'{"data":[]}')])
    assert dict(response.headers) == {"content-type": "application/json", "x-word": "yes", "content-length": "12"}
