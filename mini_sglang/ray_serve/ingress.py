"""What a request meets first behind Ray's HTTP proxy: it reads the body, has a replica answer, and passes that on.

replica lost before it answered ──▶ 503, but a request that has only just been sent goes to another one
replica lost while it streams   ──▶ an error as the stream's last event
replica about to leave          ──▶ the request goes to another one
POST /drain                     ──▶ 404: Ray drains replicas, and this one address is all of them
a scrape, an emptied cache      ──▶ all replicas are asked
a model that there is not       ──▶ 404 that names those there are
client gone                     ──▶ the call is cancelled, and so is the request in its engine

It looks into no body but for the model, where there are several, and through the router, which chooses the replica. It
holds no state of a conversation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mini_sglang.ray_serve.combined import MODELS, TO_ALL, TO_EACH_MODEL, WholeAnswer, combine
from mini_sglang.ray_serve.in_process import HttpRequest, read_request
from mini_sglang.ray_serve.model_choice import model_asked_for
from mini_sglang.ray_serve.replica import ReplicaLeavingError, RequestLostError
from mini_sglang.server.answering import event, named_event
from mini_sglang.server.anthropic.format import error_json
from mini_sglang.server.errors import ApiError, error_response, no_such_model

ELSEWHERE_S = 10.0  # for which another replica is looked for, when the chosen ones are leaving
AGAIN_S = 0.05
RESENT_S = 1.0  # a request that was lost sooner after it was sent, with nothing answered, is sent once more


class Ingress:
    """Ray makes it, in a process of its own, and asks it for the ASGI app that runs there."""

    def __init__(self, models: Sequence[tuple[tuple[str, ...], DeploymentHandle]], max_body_bytes: int) -> None:
        """`models`: the names of each, and its replicas. A request that names no model is for the first."""
        known = [_Model(names, replicas, replicas.options(stream=True)) for names, replicas in models]
        self._app = PassingOn(known, max_body_bytes)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


@dataclass(frozen=True)
class _Model:
    names: tuple[str, ...]  # that clients know it by
    replicas: DeploymentHandle
    streams: DeploymentHandle  # the same, for answers in parts

    async def ask_all(self, request: HttpRequest) -> list[WholeAnswer]:
        """What its replicas answer that are alive."""
        try:
            answers = await self.replicas.broadcast("answer_whole", request).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [answer for answer in answers if isinstance(answer, WholeAnswer)]  # not of those that died meanwhile


class PassingOn:
    """An ASGI app that passes requests on to the replicas."""

    def __init__(self, models: Sequence[_Model], max_body_bytes: int) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            request = await read_request(scope, receive, self._max_body_bytes)
            if request is None:
                return
            several = len(self._models) > 1
            name = model_asked_for(request) if several else None
            if request.path == "/drain":
                message = "Ray drains replicas when it replaces them; this address has no route /drain"
                await error_response(ApiError(404, message))(scope, receive, send)
            elif (request.method, request.path) in TO_ALL:
                await (await self._ask_all(request))(scope, receive, send)
            elif several and (request.method, request.path) in TO_EACH_MODEL:
                await (await self._ask_each_model(request))(scope, receive, send)
            elif name is not None and name not in self._by_name:
                await (await self._refuse(name, request))(scope, receive, send)
            else:
                model = self._models[0] if name is None else self._by_name[name]
                await self._pass_on(model, request, scope, receive, send)

    async def _ask_all(self, request: HttpRequest) -> Response:
        """What all replicas of all models answer, as one."""
        answers = await asyncio.gather(*(model.ask_all(request) for model in self._models))
        return _combined(request, [answer for of_model in answers for answer in of_model])

    async def _ask_each_model(self, request: HttpRequest) -> Response:
        """What the models answer, as one. A model is as well as the best of its replicas."""
        answers = await asyncio.gather(*(model.ask_all(request) for model in self._models))
        dead = [model.names[0] for model, of_model in zip(self._models, answers, strict=True) if not of_model]
        if dead and request.path != MODELS:
            return error_response(ApiError(503, f"no replica of {dead[0]!r} is alive", code="replica_lost"))
        return _combined(request, [min(of_model, key=lambda answer: answer.status) for of_model in answers if of_model])

    async def _refuse(self, name: str, request: HttpRequest) -> Response:
        """Names the models there are, but only to a client that has a key."""
        listing = dataclasses.replace(request, method="GET", path=MODELS, query=b"", body=b"")
        response = await self._ask_each_model(listing)
        if response.status_code != 200:
            return response
        error = no_such_model(name, [card["id"] for card in json.loads(bytes(response.body))["data"]])
        return error_response(error, error_json(error) if "/messages" in request.path else None)

    async def _pass_on(self, model: _Model, request: HttpRequest, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + ELSEWHERE_S
        answer = _Answer(request.path, send)
        is_resent = is_ending = False  # a replica that is about to leave may be met again when it has
        try:
            while True:
                sent = clock()
                try:
                    await self._stream(model, request, receive, answer)
                    return
                except ReplicaLeavingError:
                    is_ending = True
                    if clock() > deadline:
                        raise
                except (RayActorError, RequestLostError) as error:
                    is_same = is_ending and isinstance(error, RayActorError)
                    is_ending = isinstance(error, RequestLostError)
                    # once, and only what met a replica at its end, not what may have been the reason for it
                    if answer.has_begun or (is_resent and not is_same) or clock() > sent + RESENT_S:
                        raise
                    is_resent = True
                await asyncio.sleep(AGAIN_S)
        except (RayActorError, ReplicaLeavingError, RequestLostError):
            message = "the replica that had this request was lost; send it again"
            await answer.fail(ApiError(503, message, code="replica_lost"), scope, receive)
        except RayTaskError as error:
            await answer.fail(ApiError(500, f"internal error: {type(error.cause).__name__}"), scope, receive)

    async def _stream(self, model: _Model, request: HttpRequest, receive: Receive, answer: _Answer) -> None:
        """Send what a replica answers; if the client leaves, no more."""
        batches: Any = model.streams.answer.remote(request)
        gone = asyncio.create_task(_until_disconnect(receive))
        gone.add_done_callback(lambda _: batches.cancel())
        try:
            async for batch in batches:
                for message in batch:
                    await answer.send(message)
        except Exception:
            if not gone.done():
                raise
        finally:
            gone.cancel()
            batches.cancel()


def _combined(request: HttpRequest, answers: Sequence[WholeAnswer]) -> Response:
    if not answers:
        return error_response(ApiError(503, "no replica is alive", code="replica_lost"))
    return combine(request.path, answers)


class _Answer:
    """What a client has got of an answer so far."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._start: Message | None = None
        self._is_complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Ray's proxy adds the request's id itself
            headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
            self._start = message = {**message, "headers": headers}
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    @property
    def has_begun(self) -> bool:
        return self._start is not None

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Tell the client of the error, in the form that fits what it has got. Raises the error if there is none."""
        if self._is_complete:
            return
        if self._start is None:
            await error_response(error)(scope, receive, self._send)
            return
        if not dict(self._start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
            raise error  # half of a JSON object: the connection breaks, so that nobody takes it for a whole
        await self._send({"type": "http.response.body", "body": _last_event(self._path, error), "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _last_event(path: str, error: ApiError) -> bytes:
    """The event that ends a stream, as clients of the path's API read it."""
    body = error.body()["error"]
    if path.endswith("/messages"):
        return named_event({"type": "error", "error": {"type": "api_error", "message": error.message}})
    if path.endswith("/responses"):
        return named_event({"type": "error", "code": error.code, "message": error.message, "param": None})
    return event({"error": body})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    """What ASGI servers ask when they start and stop."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
