"""Replicas of a server on one machine or many: `mini-sglang deploy`, and the same as an app for Ray's own commands.

Ray Serve starts the replicas, has them replaced when they fail, and scales them. Ray is imported when it is needed: it
is an optional package. What replicas and their router do is in `ray_serve`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from mini_sglang.config import EngineConfig
from mini_sglang.options import FAILED, Commands, Parser, add_command, add_fields, from_options
from mini_sglang.server.config import ServerConfig

if TYPE_CHECKING:
    from ray.serve import Application

APP_NAME = "mini-sglang"
MANY = 1 << 20  # requests that Ray gives a replica at once: its own admission answers 429
OBJECT_STORE_BYTES = 100 << 20  # of a Ray that is started here: messages are small
NUM_REQUESTS = 64  # to aim at, where max_running_requests is not given

# Options that are of one process, or of the HTTP server that is Ray's here.
_ENGINE_LEFT_OUT = {
    "model",  # of which there may be several
    "nnodes", "node_rank", "dist_init_addr", "step_log", "profile_dir",
    "kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic", "kv_events_buffer_steps",
}  # fmt: skip
_HTTP = {"host", "port", "ssl_certfile", "ssl_keyfile"}
_SERVER_LEFT_OUT = {*_HTTP, "head_timeout_s", "body_timeout_s", "idle_timeout_s", "shutdown_timeout_s"}


def _option(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeployConfig:
    """How many replicas there are, and how requests find them. Raises ValueError if a value is out of range."""

    replicas: int = _option(1, "replicas; each has an engine of its own, on tp GPUs where there are any")
    min_replicas: int | None = _option(None, "fewest replicas; with max_replicas, instead of replicas")
    max_replicas: int | None = _option(None, "most replicas: their number follows the requests under way")
    target_requests: int | None = _option(
        None, "requests for each replica, waiting ones too, that their number aims at; none: max_running_requests"
    )
    upscale_delay_s: float = _option(30.0, "seconds that there must be too many requests before a replica is added")
    downscale_delay_s: float = _option(600.0, "seconds that there must be too few before one is taken away")
    routing: Literal["prefix", "least_loaded", "round_robin"] = _option(
        "prefix", "replica that gets a request; prefix: the one that has its beginning in the cache, bounded by load"
    )
    drain_timeout_s: float = _option(600.0, "seconds that a replica's requests get to finish before it is replaced")

    def __post_init__(self) -> None:
        for name in ("replicas", "min_replicas", "max_replicas", "target_requests"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("upscale_delay_s", "downscale_delay_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        if self.min_replicas is not None and self.max_replicas is None:
            raise ValueError("min_replicas needs max_replicas")
        if (self.min_replicas or 1) > (self.max_replicas or self.replicas):
            raise ValueError(f"min_replicas must be at most max_replicas, got {self.min_replicas}, {self.max_replicas}")

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.replicas


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model, its replicas and what their servers are set to."""

    config: DeployConfig
    engine: EngineConfig
    server: ServerConfig


def add_deploy(commands: Commands) -> None:
    command = add_command(commands, "deploy", "serve models with several replicas, through Ray Serve", _deploy)
    help = "cluster to deploy to, and leave; auto: the one this machine is part of; none: start Ray here, until Ctrl-C"
    command.add_argument("--ray-address", metavar="ADDRESS", help=help)
    _add_options(command, http=True)


def _add_options(parser: argparse.ArgumentParser, *, http: bool) -> None:
    """The options of models that are deployed, with `http` those of their address too."""
    add_fields(parser, DeployConfig, "replicas")
    help = f"model, as of serve; several share the address and all options (default: {EngineConfig.model})"
    group = parser.add_argument_group("models")
    group.add_argument("models", metavar="MODEL", nargs="*", help=help)
    help = "the same as MODEL; may be repeated"
    group.add_argument("--model", dest="more_models", action="append", default=[], metavar="TEXT", help=help)
    add_fields(parser, EngineConfig, "engine of each replica", leave_out=_ENGINE_LEFT_OUT)
    add_fields(parser, ServerConfig, "server", leave_out=_SERVER_LEFT_OUT - (_HTTP if http else set()))


def _served_models(options: argparse.Namespace) -> list[ServedModel]:
    """Raises ValueError if a value is out of range, or models have no names apart."""
    config: DeployConfig = from_options(DeployConfig, options)
    engine: EngineConfig = from_options(EngineConfig, options)
    server: ServerConfig = from_options(ServerConfig, options)
    models = options.models + options.more_models or [engine.model]
    names = [server.served_model_name]
    if len(models) > 1:
        names = [(name,) for name in server.served_model_name] or [()] * len(models)
        if len(names) != len(models):
            raise ValueError(f"served_model_name must be given once for each of {len(models)} models, got {len(names)}")
    return [
        ServedModel(config, engine.replace(model=model), dataclasses.replace(server, served_model_name=of_model))
        for model, of_model in zip(models, names, strict=True)
    ]


def build_app(args: dict[str, Any]) -> Application:
    """The app, for `serve run mini_sglang.deploy:build_app model=PATH replicas=2` or a configuration file of Ray's.

    `args`: the options of `mini-sglang deploy`, with underscores, that are not of the address. With `models`, a list of
    such options, each entry is a model with options of its own besides the common ones. Raises ValueError.
    """
    common = {name: value for name, value in args.items() if name != "models"}
    entries = args.get("models", [{}])
    if not isinstance(entries, list) or not all(isinstance(own, dict) for own in entries) or not entries:
        raise ValueError("models must be a list of objects, each with a model and its options")
    served = []
    for own in entries:
        parser = _Arguments(prog="build_app", allow_abbrev=False)
        _add_options(parser, http=False)
        served += _served_models(parser.parse_args(_as_words({**common, **own})))
    return application(served)


class _Arguments(Parser):
    """Raises what a command would print before it exits."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _as_words(args: Mapping[str, Any]) -> list[str]:
    """Arguments by name as options of a command: from YAML they have types, from `serve run` all are strings."""
    words = []
    for name, value in args.items():
        option = name.replace("_", "-")
        if value is True or value == "true":
            words.append(f"--{option}")
        elif value is False or value == "false":
            words.append(f"--no-{option}")
        else:
            words += [f"--{option}={one}" for one in (value if isinstance(value, list | tuple) else [value])]
    return words


def application(models: Sequence[ServedModel]) -> Application:
    """Ingress and replicas, for `ray.serve.run`; a request that names no model is for the first.

    Raises ValueError or OSError if a file of keys is wrong, a package is missing, or two models have the same name.
    """
    serve = _import_serve()
    from mini_sglang.ray_serve.ingress import Ingress
    from mini_sglang.server.context import shown_name

    names = [model.server.served_model_name or (shown_name(model.engine.model),) for model in models]
    every = [name for of_model in names for name in of_model]
    if len(set(every)) < len(every):
        raise ValueError(f"served_model_name must tell models apart, got {', '.join(every)}")
    # the first keeps its name for Ray when it becomes another one, so that the one replaces the other without a gap
    deployments = ["replicas", *(f"replicas-{re.sub(r'[^A-Za-z0-9_.-]', '-', of_model[0])}" for of_model in names[1:])]
    replicas = [_replicas(name, model) for name, model in zip(deployments, models, strict=True)]
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=max(model.config.drain_timeout_s for model in models),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=1,  # no request is answered between its loss and the next check
    )
    longest = max(model.server.max_body_bytes for model in models)
    return ingress.bind(list(zip(names, replicas, strict=True)), longest)


def _replicas(name: str, model: ServedModel) -> Application:
    serve = _import_serve()
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from mini_sglang.ray_serve.replica import EngineReplica
    from mini_sglang.ray_serve.router import PolicyRouter
    from mini_sglang.server.run import check_tracing, with_all_keys

    config, engine = model.config, model.engine
    number: dict[str, Any] = {"num_replicas": config.replicas}
    if config.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=config.min_replicas or 1,
            max_replicas=config.max_replicas,
            target_ongoing_requests=config.target_requests or engine.max_running_requests or NUM_REQUESTS,
            upscale_delay_s=config.upscale_delay_s,
            downscale_delay_s=config.downscale_delay_s,
        )
        number = {"autoscaling_config": scaling}
    server = with_all_keys(model.server, os.environ)
    check_tracing(server)
    replicas = serve.deployment(EngineReplica).options(
        name=name,
        **number,
        **_resources(engine),
        max_ongoing_requests=MANY,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=PolicyRouter, request_router_kwargs={"policy": config.routing}
        ),
    )
    return replicas.bind(engine, server)


def _resources(engine: EngineConfig) -> dict[str, Any]:
    """What a replica takes of its node: all of its ranks are on one, so its resources are one bundle."""
    import ray

    on_gpu = engine.device == "cuda" or (
        engine.device == "auto" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    )
    options = {"num_cpus": 1, "num_gpus": engine.tp} if on_gpu else {"num_cpus": _num_cpus(engine)}
    if engine.tp == 1:
        return {"ray_actor_options": options}
    bundle = {"CPU": options["num_cpus"], **({"GPU": engine.tp} if on_gpu else {})}
    return {
        "ray_actor_options": options,
        "placement_group_bundles": [bundle],
        "placement_group_strategy": "STRICT_PACK",
    }


def _num_cpus(engine: EngineConfig) -> int:
    """Cores of a replica without a GPU."""
    return engine.tp * (engine.num_threads or 1)


def _deploy(options: argparse.Namespace) -> int:
    models = _served_models(options)
    server = models[0].server  # the address is of all
    serve = _import_serve()
    import ray

    if options.ray_address is None:
        wanted = sum(model.config.most_replicas * _num_cpus(model.engine) for model in models)
        num_cpus = max(os.cpu_count() or 1, wanted)
        os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1")  # nor while Ray's HTTP proxy is lost
        ray.init(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
    else:
        ray.init(address=options.ray_address)
    serve.start(
        proxy_location="EveryNode",
        http_options={
            "host": server.host,
            "port": server.port,
            "ssl_certfile": server.ssl_certfile,
            "ssl_keyfile": server.ssl_keyfile,
        },
    )
    try:
        serve.run(application(models), name=APP_NAME)
    except RuntimeError as error:  # no replica has started, and Ray has logged why
        print(f"mini-sglang: error: {error}", file=sys.stderr)
        return FAILED
    scheme = "http" if server.ssl_certfile is None else "https"
    served = ", ".join(model.engine.model for model in models)
    print(f"Serving {served} at {scheme}://{server.host}:{server.port}", flush=True)
    if options.ray_address is None:
        _wait_for_signal()
        serve.shutdown()
        ray.shutdown()
    return 0


def _wait_for_signal() -> None:
    """Until SIGINT or SIGTERM; once more to stop at once."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    stopped.wait()
    for number, handler in before.items():
        signal.signal(number, handler)


def _import_serve() -> Any:
    """Raises ValueError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody unless the user says so
    try:
        from ray import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"deploy needs Ray Serve: pip install 'mini-sglang[ray]' ({error})") from error
    return serve
