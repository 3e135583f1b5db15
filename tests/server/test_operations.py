"""What operators set: keys, origins, names, limits, ids and logs, the API's description, TLS."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from mini_sglang.cli import main
from mini_sglang.server import app
from mini_sglang.server.config import ServerConfig
from mini_sglang.server.openapi import EXAMPLES
from mini_sglang.server.request_log import LOG_FORMAT, RequestIdFilter
from mini_sglang.server.run import with_all_keys
from mini_sglang.weights.hub import ModelSource
from tests.server.conftest import ScriptedEngine, StartServer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a secret question"}]}
ORIGIN = "https://chat.example"


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Lines as the server writes them."""
    lines: list[str] = []
    formatter = logging.Formatter(LOG_FORMAT)

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    handler = Lines()
    handler.addFilter(RequestIdFilter())
    logger = logging.getLogger("mini_sglang")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_each_key_opens_the_api_in_either_header(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("first", "clé")))
    for key in ("first", "clé"):
        for right in ({b"authorization": f"Bearer {key}".encode()}, {b"x-api-key": key.encode()}):
            assert client.get("/v1/models", headers=right).status_code == 200, right
    for wrong in ({}, {"x-api-key": "firs"}, {"authorization": "Bearer first2"}, {"authorization": "Bearer "}):
        response = client.post(CHAT, json=BODY, headers=wrong)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    for route in ("/health", "/metrics", "/", "/docs", "/playground/main.js"):
        assert client.get(route).status_code == 200, route


def test_a_key_counts_beside_a_placeholder_in_the_other_header(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("first",)))
    for bearer, key in (("none", "first"), ("first", "none")):
        headers = {"authorization": f"Bearer {bearer}", "x-api-key": key}
        assert client.get("/v1/models", headers=headers).status_code == 200
    headers = {"authorization": "Bearer none", "x-api-key": "none"}
    assert client.get("/v1/models", headers=headers).status_code == 401


def test_every_key_is_compared_in_constant_time(
    make_app: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append((given, key))
        return hmac.compare_digest(given, key)

    monkeypatch.setattr(app, "hmac", SimpleNamespace(compare_digest=compare))
    client = TestClient(make_app(api_key=("first", "second")))
    for key in ("first", "second", "fir", "other"):
        compared.clear()
        client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
        assert {known for given, known in compared if given == key.encode()} == {b"first", b"second"}


def test_keys_are_never_told(make_app: Callable[..., FastAPI], log: list[str]) -> None:
    """Neither those of the server nor those that a client tries, whatever is logged."""
    logging.getLogger("mini_sglang").setLevel(logging.DEBUG)
    client = TestClient(make_app(api_key=("key-of-the-server",), log_contents=True), raise_server_exceptions=False)
    told = []
    for key in ("key-of-the-server", "key-that-was-tried"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
            for route in ("/v1/models", "/server_info", "/openapi.json", "/metrics", "/nowhere"):
                told.append(client.get(route, headers=headers).text)
            for body in (BODY, {**BODY, "stream": True}, {**BODY, "nonsense": 1}):
                told.append(client.post(CHAT, json=body, headers=headers).text)
    assert len(log) > 20
    assert not [text for text in (*told, *log) if "key-of-the-server" in text or "key-that-was-tried" in text]


def test_a_page_may_reach_a_private_network_where_its_origin_is_allowed(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(cors_origin=("https://chat.example",)))
    for origin, allowed in (("https://chat.example", True), ("https://other.example", False)):
        preflight = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type",
            "access-control-request-private-network": "true",
        }
        headers = client.options(CHAT, headers=preflight).headers
        assert ("access-control-allow-origin" in headers) == allowed
        assert not allowed or headers["access-control-allow-private-network"] == "true"


def test_pages_of_other_origins_may_call_where_allowed(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(api_key=("key",), cors_origin=(ORIGIN,)))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = client.options(CHAT, headers={"origin": ORIGIN, **ask})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    assert client.options(CHAT, headers={"origin": "https://evil.example", **ask}).status_code == 400
    for headers, status in (({"authorization": "Bearer key"}, 200), ({}, 401)):
        response = client.post(CHAT, json=BODY, headers={"origin": ORIGIN, **headers})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_without_allowed_origins_no_page_may_call(client: TestClient) -> None:
    response = client.post(CHAT, json=BODY, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers
    assert client.options(CHAT, headers={"origin": ORIGIN, "access-control-request-method": "POST"}).status_code == 405


def test_every_answer_carries_a_request_id(client: TestClient, engine: ScriptedEngine) -> None:
    requests: list[tuple[str, str, Any]] = [
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
        ("POST", CHAT, BODY),
        ("POST", CHAT, {**BODY, "stream": True}),
        ("POST", CHAT, {}),
    ]
    for method, route, body in requests:
        given = client.request(method, route, json=body, headers={"x-request-id": "trace-1"})
        assert given.headers["x-request-id"] == "trace-1"
        made = client.request(method, route, json=body).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)
    for bad in ("x" * 129, "two words", "naïve"):
        assert client.get("/health", headers={b"x-request-id": bad.encode()}).headers["x-request-id"] not in ("", bad)
    engine.error = KeyError("unforeseen")
    failed = client.post(CHAT, json=BODY, headers={"x-request-id": "trace-2"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (500, "trace-2")


def test_the_log_has_a_line_per_request_without_contents(
    client: TestClient, log: list[str], engine: ScriptedEngine
) -> None:
    client.post(CHAT, json=BODY, headers={"x-request-id": "trace-1", "authorization": "Bearer hidden"})
    client.get("/a%0Ab?token=hidden")
    client.get("/health")  # a probe
    first, second = log
    assert re.search(r"INFO .* \[trace-1\]: testclient:\d+ POST /v1/chat/completions 200 \d+\.\d{3} s$", first)
    assert "GET /a%0Ab 404" in second
    assert not any(word in line for line in log for word in ("secret", "hidden", "friend"))
    engine.fail_after = 1
    engine.error = KeyError("unforeseen")
    client.post(CHAT, json=BODY)
    assert " 500 " in log[-1]


def test_what_goes_wrong_is_logged_with_the_requests_id(
    client: TestClient, log: list[str], engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.error = KeyError("unforeseen")
    engine_generate = engine.generate

    async def generate(*args: Any, **kwargs: Any) -> Any:
        engine.error = None
        async for output in engine_generate(*args, **kwargs):
            yield output
            raise KeyError("later")

    monkeypatch.setattr(engine, "generate", generate)
    client.post(CHAT, json={**BODY, "stream": True}, headers={"x-request-id": "trace-9"})
    assert any("ERROR" in line and "[trace-9]" in line and "KeyError" in line for line in log)


def test_contents_are_logged_where_asked_and_the_log_can_be_off(
    make_app: Callable[..., FastAPI], log: list[str]
) -> None:
    TestClient(make_app(access_log=False)).post(CHAT, json=BODY)
    assert log == []
    TestClient(make_app(log_contents=True)).post(CHAT, json={**BODY, "stream": True})
    assert any("received" in line and "secret question" in line for line in log)
    assert any("sent" in line and "friend" in line for line in log)


def test_a_model_has_as_many_names_as_it_is_given(make_app: Callable[..., FastAPI]) -> None:
    client = TestClient(make_app(served_model_name=("small", "org/large")))
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["small", "org/large"]
    assert client.get("/v1/models/org/large").json()["id"] == "org/large"
    for name, answered in (("small", "small"), ("org/large", "org/large"), (None, "small")):
        assert client.post(CHAT, json={**BODY, "model": name}).json()["model"] == answered
    error = client.post(CHAT, json={**BODY, "model": "scripted"}).json()["error"]
    assert error["code"] == "model_not_found"
    assert "'small', 'org/large'" in error["message"]


def test_a_full_queue_is_a_429_until_there_is_room(make_app: Callable[..., FastAPI], engine: ScriptedEngine) -> None:
    engine.pause_after = 1
    limit = engine.info.max_running_requests + 3

    async def scenario() -> None:
        transport = httpx.ASGITransport(make_app(max_waiting_requests=3))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = [asyncio.create_task(client.post(CHAT, json=BODY)) for _ in range(50)]
            while sum(task.done() for task in sent) < 50 - limit or len(engine.running) < limit:
                await asyncio.sleep(0.001)
            refused = [task.result() for task in sent if task.done()]
            assert len(refused) == 50 - limit
            waits = sorted(int(response.headers["retry-after"]) for response in refused)
            assert waits == [math.ceil((index + 1) / 4) for index in range(50 - limit)]  # of 4 that run, a second each
            for response in refused:
                assert response.status_code == 429
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                assert str(limit) in error["message"]
            for request_id in engine.request_ids:
                engine.abort(request_id)
            await asyncio.gather(*sent)
            engine.pause_after = None
            assert (await client.post(CHAT, json=BODY)).status_code == 200

    asyncio.run(scenario())


def test_the_description_is_whole(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in schemas
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert set(operation["responses"]) == {"200", "4XX", "5XX"}, path
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                assert content["examples"], path
                for schema in content["schema"].get("anyOf", [content["schema"]]):
                    assert schema["$ref"].rpartition("/")[2] in {model.__name__ for model in EXAMPLES}


def test_every_example_works(client: TestClient) -> None:
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        body = methods.get("post", {}).get("requestBody", {"content": {"application/json": {}}})
        for title, example in body["content"]["application/json"].get("examples", {}).items():
            response = client.post(path, json=example["value"])
            assert response.status_code == 200, (path, title, response.text)


def test_the_description_names_the_key_where_there_is_one(make_app: Callable[..., FastAPI]) -> None:
    plain, guarded = (make_app(**fields).openapi() for fields in ({}, {"api_key": ("key",)}))
    assert "securitySchemes" not in plain["components"]
    assert plain["paths"]["/v1/models"]["get"].get("security") is None
    assert guarded["paths"]["/v1/models"]["get"]["security"]
    assert {scheme["type"] for scheme in guarded["components"]["securitySchemes"].values()} == {"http", "apiKey"}


def test_the_pages_load_nothing_from_elsewhere(client: TestClient) -> None:
    seen = set()
    todo = ["/", "/docs"]
    while todo:
        url = todo.pop()
        response = client.get(url)
        assert response.status_code == 200, url
        seen.add(url)
        assert "default-src 'self'" in response.headers["content-security-policy"]
        text = response.text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert "://" not in text, url
        for link in re.findall(r'(?:src|href|from|import)(?:=| )"([^"]+)"', text):
            target = str(httpx.URL(f"http://test{url}").join(link).path)
            if target not in (*seen, *todo):
                todo.append(target) if target != "/openapi.json" else None
    assert {"/playground/main.js", "/playground/style.css", "/playground/tokens.js", "/playground/docs.js"} <= seen


def test_nothing_but_the_pages_is_served_as_a_file(client: TestClient) -> None:
    for path in ("/playground/../app.py", "/playground/%2e%2e/app.py", "/playground/", "/playground/none.js"):
        response = client.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_key", "secret"),
        ("api_key", ("",)),
        ("served_model_name", ("a", " ")),
        ("cors_origin", ("example.com",)),
        ("cors_origin", ("https://example.com/path",)),
        ("ssl_keyfile", "key.pem"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        ServerConfig(**{field: value})
    assert "secret" not in str(caught.value)


def test_keys_also_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\nthird\n")
    config = ServerConfig(api_key=("first",), api_key_file=str(file))
    assert with_all_keys(config, {}).api_key == ("first", "second", "third")
    assert with_all_keys(config, {"MINI_SGLANG_API_KEY": "fourth"}).api_key[-1] == "fourth"
    assert with_all_keys(ServerConfig(), {}).api_key == ()


def test_a_place_for_keys_that_holds_none_does_not_open_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    assert main(["serve", "/nowhere", "--port", "0", "--api-key-file", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    file.write_text("\n")
    assert main(["serve", "/nowhere", "--port", "0", "--api-key-file", str(file)]) == 2
    assert "api_key_file" in capsys.readouterr().err
    monkeypatch.setenv("MINI_SGLANG_API_KEY", "")
    assert main(["serve", "/nowhere", "--port", "0"]) == 2
    assert "MINI_SGLANG_API_KEY" in capsys.readouterr().err


def test_a_certificate_that_will_not_do_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for path, word in ((bad, "ssl_certfile"), (tmp_path / "none.pem", "none.pem")):
        assert main(["serve", "/nowhere", "--port", "0", "--ssl-certfile", str(path)]) == 2
        assert word in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_server_with_a_certificate_keys_and_names(
    start_server: StartServer, builtin_model: ModelSource, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
    options = ["--api-key", "a", "--api-key", "b", "--served-model-name", "x", "--served-model-name", "y"]
    server = start_server(
        "--model", str(builtin_model.path), "--dtype", "float32", "--num-pages", "64",
        "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), *options,
    )  # fmt: skip
    assert server.url.startswith("https://")
    trust = ssl.create_default_context(cafile=str(certificate))
    headers = {"authorization": "Bearer b", "x-request-id": "over-tls"}
    with httpx.Client(base_url=server.url, verify=trust, headers=headers, timeout=60) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["x", "y"]
        answer = client.post(CHAT, json={**BODY, "model": "y", "max_tokens": 4, "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"model":"y"' in answer.text
    lines = server.log.read_text()
    assert "[over-tls]: 127.0.0.1:" in lines
    assert "secret question" not in lines
