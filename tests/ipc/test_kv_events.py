"""KV events on real sockets: in vLLM's format, in order, and complete also for those who come late."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import zmq

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.ipc.kv_events import KVEventPublisher
from mini_sglang.llm import LLM
from mini_sglang.observability.cache_events import CacheEvents
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.kv_cache import KVCacheManager
from tests import vllm_events
from tests.scheduling.test_kv_cache import start
from tests.tiny import Checkpoints, run_server, until
from tests.vllm_events import Prefix, Subscriber, cached_prefixes

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


class Worker:
    """A cache, and the publisher that an engine's process has for it."""

    def __init__(self, context: Context, folder: Path, **fields: object) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.config = EngineConfig(
            kv_events_endpoint=self.endpoint,
            kv_events_replay_endpoint=self.replay,
            **fields,  # type: ignore[arg-type]
        )
        events = CacheEvents()
        self.publisher = KVEventPublisher(context, self.config, events)
        self.kv = KVCacheManager(16, 2, listener=events)
        self.publisher.publish()

    def run(self, *tokens: int) -> None:
        """Compute a prompt, and publish what that changes, as a batch."""
        self.kv.release(start(self.kv, list(tokens)))
        self.publisher.publish()

    def answer(self) -> None:
        assert self.publisher.replay is not None
        assert self.publisher.replay.poll(10_000)
        self.publisher.answer()


@pytest.fixture
def worker(context: Context, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(context, tmp_path, kv_events_topic="kv@10.0.0.1@m", kv_events_buffer_steps=3)
    yield worker
    worker.publisher.close()


def ask(context: Context, worker: Worker, *frames: bytes, kind: int = zmq.DEALER) -> list[list[bytes]]:
    """The messages that answer a replay request with these frames."""
    with context.socket(kind) as socket:
        socket.linger = 0
        socket.connect(worker.replay)
        socket.send_multipart(frames)
        worker.answer()
        answers = []
        while socket.poll(200):
            answers.append(socket.recv_multipart())
        return answers


def number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=value < 0)


def test_a_message_is_topic_number_and_batch(context: Context, worker: Worker) -> None:
    with context.socket(zmq.SUB) as socket:
        socket.connect(worker.endpoint)
        socket.subscribe("kv@")
        while not socket.poll(100):  # until the subscription has arrived
            worker.kv.flush()
            worker.run(1, 2, 3)
        topic, sequence, payload = socket.recv_multipart()
    assert topic == b"kv@10.0.0.1@m"
    assert ask(context, worker, b"", sequence)[0] == [b"", topic, sequence, payload]
    assert payload[:1] == b"\x93"  # an array of three: time, events, rank


def test_steps_without_events_have_no_number(worker: Worker, context: Context) -> None:
    worker.run(1, 2, 3)
    for _ in range(5):
        worker.publisher.publish()
    worker.run(1, 2, 3)  # cached
    assert [message[2] for message in ask(context, worker, b"", number(0))] == [number(0), number(1), number(-1)]


def test_a_replay_begins_where_it_is_wanted_and_says_its_end(context: Context, worker: Worker) -> None:
    worker.run(1, 2, 3)
    worker.run(4, 5, 6)
    first, second, third, end = ask(context, worker, b"", number(0))
    assert [message[:3] for message in (first, second, third)] == [
        [b"", b"kv@10.0.0.1@m", number(index)] for index in range(3)
    ]
    assert end == [b"", b"", number(-1), b""]
    assert ask(context, worker, b"", number(2)) == [third, end]
    assert ask(context, worker, b"", number(3)) == [end]
    assert ask(context, worker, b"", number(-1)) == [end]
    assert ask(context, worker, number(2), kind=zmq.REQ) == [third[1:]]  # REQ adds the empty frame and takes one answer


def test_what_is_no_longer_kept_is_replaced_by_the_present_state(context: Context, worker: Worker) -> None:
    for prompt in range(6):
        worker.run(prompt, prompt + 1, prompt + 2, prompt + 3)
    worker.kv.evict(3)
    worker.publisher.publish()  # number 7; kept are 5 to 7
    assert [message[2] for message in ask(context, worker, b"", number(5))] == [*map(number, (5, 6, 7)), number(-1)]
    assert [message[2] for message in ask(context, worker, b"", number(4))] == [number(7), number(-1)]
    late = Subscriber(context, worker.endpoint, worker.replay, "kv@10.0.0.1@m")
    late.ask()
    worker.answer()
    assert late.receive() == 1
    assert late.follower.prefixes == cached_prefixes(worker.kv)
    assert late.last == 7


@pytest.mark.parametrize(
    "frames", [(b"",), (number(0),), (b"", b""), (b"", b"0"), (b"x", number(0)), (b"", number(0), b""), (b"", b"0" * 9)]
)
def test_what_is_no_replay_request_gets_no_answer(context: Context, worker: Worker, frames: tuple[bytes, ...]) -> None:
    assert ask(context, worker, *frames) == []
    assert len(ask(context, worker, b"", number(0))) == 2


def test_a_subscriber_that_reads_nothing_holds_nobody_up(context: Context, worker: Worker) -> None:
    with context.socket(zmq.SUB) as deaf, context.socket(zmq.DEALER) as silent:
        deaf.rcvhwm = silent.rcvhwm = 1
        deaf.connect(worker.endpoint)
        deaf.subscribe("")
        silent.connect(worker.replay)
        for _ in range(50):
            silent.send_multipart((b"", number(0)))
        for prompt in range(200):
            worker.run(prompt, prompt, prompt)
        for _ in range(50):
            worker.answer()
    assert len(ask(context, worker, b"", number(0))) == 2  # the state and the end


def test_an_address_that_cannot_be_bound_is_named(context: Context, tmp_path: Path) -> None:
    for field in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        fields = {"kv_events_endpoint": f"ipc://{tmp_path}/a", field: f"ipc://{tmp_path}/missing/b"}
        config = EngineConfig(**fields)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"^{field} 'ipc://.*/missing/b' cannot be bound: "):
            KVEventPublisher(context, config, CacheEvents())


def test_addresses_of_version_6_can_be_bound(context: Context) -> None:
    config = EngineConfig(kv_events_endpoint="tcp://[::1]:*")
    KVEventPublisher(context, config, CacheEvents()).close()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"kv_events_endpoint": "5557"}, r"kv_events_endpoint must be tcp://\*:PORT, tcp://IP:PORT or ipc://PATH"),
        ({"kv_events_endpoint": "tcp://*"}, "kv_events_endpoint must be"),
        ({"kv_events_endpoint": "inproc://x"}, "kv_events_endpoint must be"),
        ({"kv_events_endpoint": "tcp://*:1", "kv_events_replay_endpoint": "x"}, "kv_events_replay_endpoint must be"),
        ({"kv_events_replay_endpoint": "tcp://*:5558"}, "kv_events_replay_endpoint needs kv_events_endpoint"),
        ({"kv_events_topic": "a"}, "kv_events_topic needs kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:5557", "cache": "naive"}, "kv_events_endpoint needs cache radix"),
        ({"kv_events_buffer_steps": 0}, "kv_events_buffer_steps must be an integer of at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        EngineConfig(**fields)  # type: ignore[arg-type]


def test_only_a_server_publishes(checkpoints: Checkpoints) -> None:
    path = str(checkpoints.write().path)
    with pytest.raises(ValueError, match="kv_events_endpoint needs a server"):
        Engine(EngineConfig(model=path, kv_events_endpoint="tcp://127.0.0.1:*"))
    with pytest.raises(ValueError, match="kv_events_endpoint needs a server"):
        LLM(path, kv_events_endpoint="tcp://127.0.0.1:*")


NOTING_ITS_CACHE = """#!{python}
# An engine's process that writes down what is cached, while it is idle, after a look at its accounts.
import json, os, runpy, sys
from mini_sglang.ipc import engine_process

cached_prefixes = runpy.run_path({reader!r})["cached_prefixes"]

class Loop(engine_process.EngineLoop):
    def _check_accounts(self):
        super()._check_accounts()
        prefixes = [[salt, list(tokens)] for salt, tokens in cached_prefixes(self._engine.scheduler.kv)]
        with open({file!r} + ".part", "w") as file:
            json.dump(prefixes, file)
        os.rename({file!r} + ".part", {file!r})

engine_process.EngineLoop = Loop
sys.exit(engine_process.main(sys.argv[-2], int(sys.argv[-1])))
"""


def test_a_late_subscriber_of_an_engines_process_knows_all_that_is_cached(
    context: Context, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, python = tmp_path / "cached", tmp_path / "python"
    python.write_text(NOTING_ITS_CACHE.format(python=sys.executable, file=str(noted), reader=vllm_events.__file__))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = EngineConfig(
        model=str(checkpoints.write().path),
        num_threads=1,
        page_size=4,
        num_pages=40,
        max_running_requests=6,
        kv_events_endpoint=endpoint,
        kv_events_replay_endpoint=replay,
        kv_events_topic="kv-events",
        kv_events_buffer_steps=60,
    )

    async def scenario() -> None:
        engine = await AsyncEngine.start(config)
        subscribers: list[Subscriber] = []
        rng = random.Random(0)
        for _ in range(8):
            traffic = asyncio.gather(*(ask_something(engine, rng, str(name)) for name in range(25)))
            await asyncio.sleep(rng.random() * 0.2)
            subscribers.append(Subscriber(context, endpoint, replay, "kv-events"))
            await asyncio.to_thread(subscribers[-1].catch_up)
            while not traffic.done():
                await asyncio.sleep(0.01)
                for subscriber in subscribers[::2]:  # the others read nothing meanwhile
                    subscriber.listen()
            await traffic
            if rng.random() < 0.3:
                await engine.flush_cache()
            noted.unlink(missing_ok=True)
            await asyncio.to_thread(until, noted.exists)
            cached = read(noted)
            for subscriber in subscribers:
                await asyncio.to_thread(subscriber.listen)
                await asyncio.to_thread(subscriber.catch_up)
                assert subscriber.follower.prefixes == cached
        assert subscribers[0].last > 2 * config.kv_events_buffer_steps
        assert subscribers[0].follower.num_removed > 5 * engine.info.num_pages
        await engine.close()

    asyncio.run(scenario())


def read(file: Path) -> set[Prefix]:
    return {(salt, tuple(tokens)) for salt, tokens in json.loads(file.read_text())}


async def ask_something(engine: AsyncEngine, rng: random.Random, name: str) -> None:
    """A request that shares a prefix with others, now and then with a salt, and left by its client or not."""
    stem, length = rng.randrange(4), rng.randrange(1, 60)
    prompt = [(stem * i * i + i) % 50 + 3 for i in range(length)] + rng.choices(range(3, 53), k=rng.randrange(4))
    params = SamplingParams(temperature=1, seed=rng.randrange(4), max_tokens=rng.randrange(1, 40), ignore_eos=True)
    salt, leaves_after = rng.choice(["", "", "a"]), rng.choice([None, None, 3])
    await asyncio.sleep(rng.random() * 0.5)
    async with aclosing(engine.generate(prompt, params, request_id=name, cache_salt=salt)) as outputs:
        count = 0
        async for _ in outputs:
            count += 1
            if count == leaves_after:
                return


def test_a_server_publishes_and_says_where(context: Context, tmp_path: Path, checkpoints: Checkpoints) -> None:
    any_port = "tcp://127.0.0.1:*"
    options = ("--kv-events-endpoint", any_port, "--kv-events-replay-endpoint", any_port, "--page-size", "2")
    with run_server(tmp_path / "log", "--model", str(checkpoints.write().path), *options) as server:
        config = server.get("/server_info").json()["engine"]["config"]
        subscriber = Subscriber(context, config["kv_events_endpoint"], config["kv_events_replay_endpoint"])
        assert subscriber.catch_up() == 1  # the cache is empty
        body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 1, "temperature": 0}
        assert server.post("/v1/completions", **body, cache_salt="tenant").status_code == 200
        until(lambda: subscriber.listen(100) > 0)
        assert {("tenant", (5, 6)), ("tenant", (5, 6, 7, 8))} <= subscriber.follower.prefixes
        assert server.post("/flush_cache").status_code == 200
        until(lambda: not subscriber.follower.blocks or not subscriber.listen(100))
        assert not subscriber.follower.blocks


def test_a_server_whose_address_is_taken_does_not_start(tmp_path: Path, checkpoints: Checkpoints) -> None:
    options = ("--model", str(checkpoints.write().path), "--kv-events-endpoint", f"ipc://{tmp_path}/missing/events")
    with (
        pytest.raises(AssertionError, match=r"kv_events_endpoint .* cannot be bound"),
        run_server(tmp_path / "log", *options),
    ):
        pass
