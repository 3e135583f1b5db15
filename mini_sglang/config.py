"""Every setting of the engine and of the server: flat, frozen, checked on construction.

Nothing reads the environment or the hardware here; `"auto"` values are resolved where the answer is known (the executor
for device, dtype and pool size), which returns a new config and leaves the caller's alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

DEFAULT_MODEL = "smollm2-135m"


def _option(default: Any, help: str) -> Any:
    """A field with its one-line explanation, which is also the help of its command-line option."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError, naming the field, when a value is out of range."""

    model: str = _option(DEFAULT_MODEL, "built-in name, folder of safetensors, .gguf file, or hub id")
    model_source: Literal["huggingface", "modelscope"] = _option("huggingface", "hub that a model id is looked up in")
    revision: str | None = _option(None, "branch, tag or commit of a hub model; none: the hub's default")
    load_format: Literal["auto", "dummy"] = _option("auto", "dummy: random weights from the config alone")
    device: str = _option("auto", "cpu or cuda; CUDA_VISIBLE_DEVICES=N in the environment chooses among GPUs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option("auto", "arithmetic of weights and activations")
    weights: Literal["auto", "dense", "packed"] = _option("auto", "packed: quantised matrices as they are stored")
    quantization: Literal["none", "fp8", "fp8-block", "w4a16"] = _option("none", "quantise while loading, to nearest")
    seed: int = _option(0, "seed of dummy weights")

    page_size: int = _option(16, "tokens per page of the KV cache")
    num_pages: int | None = _option(
        None, "pages of the KV cache; none: what fits kv_cache_bytes on a CPU, mem_fraction on a GPU"
    )
    kv_cache_bytes: int | None = _option(
        None,
        "bytes of the KV cache of a rank on a CPU, where num_pages is not given; none: 1/32 of the memory available",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = _option("auto", "fp8: e4m3, which ends at 448; auto: the same as dtype")
    cache: Literal["radix", "naive"] = _option("radix", "radix: reuse the KV of shared prefixes; naive: reuse nothing")

    context_length: int | None = _option(None, "most tokens of one request, prompt and output; none: the model's own")
    max_running_requests: int | None = _option(None, "most requests in one step; none: 64 on CPU, 256 on GPU")
    max_prefill_tokens: int | None = _option(
        None, "token budget of one step, decodes included; none: 512 on CPU, 8192 on GPU"
    )
    max_step_ms: int | None = _option(
        None,
        "most milliseconds of a step that computes prompts beside running requests; 0: no bound; none: 200 on CPU "
        "and 40 on GPU in a server, no bound elsewhere",
    )
    schedule: Literal["fcfs", "lpm", "priority"] = _option(
        "fcfs", "order of waiting requests; lpm: longest cached prefix first"
    )
    run_ahead: int | None = _option(None, "steps launched before the oldest is read; none: 0 on CPU, 1 on GPU")

    attention_backend: str = _option("auto", "cpu, triton, reference, flashinfer or flash_attn; PREFILL,DECODE for two")
    deterministic: bool = _option(
        False, "logits bitwise the same alone and in any batch, chunked or not, cached or not (GPU, triton)"
    )
    mem_fraction: float = _option(0.9, "share of a GPU's memory for weights, activations and KV cache together")
    cuda_graph_max_bs: int | None = _option(None, "most rows of a CUDA graph; 0: no graphs; none: max_running_requests")
    num_threads: int | None = _option(None, "torch threads of a rank on a CPU; none: the cores, shared out")

    tp: int = _option(1, "ranks that share the model, each on a GPU of its own (on a CPU: in a process of its own)")
    all_reduce: Literal["auto", "nccl"] = _option(
        "auto", "auto: small sums of GPUs of one node through symmetric memory; nccl: all sums through NCCL"
    )
    nnodes: int = _option(1, "nodes that the ranks are spread over; the same command runs on each")
    node_rank: int = _option(0, "which node this is; 0 schedules and serves, the others lend their devices")
    dist_init_addr: str | None = _option(None, "HOST:PORT of node 0 where the nodes meet, in a network that is trusted")

    step_log: str | None = _option(None, "file to log every step to, as JSON lines, for mini-sglang bench explain")
    profile_dir: str | None = _option(None, "folder for traces of /start_profile; none: there can be no traces")
    kv_events_endpoint: str | None = _option(
        None,
        "address to publish events of the prefix cache on, in vLLM's format, as tcp://*:5557, tcp://IP:PORT or "
        "ipc://PATH; they hold prompts, so only in a network that is trusted; none: no events",
    )
    kv_events_replay_endpoint: str | None = _option(
        None, "address that replays missed events, as tcp://*:5558; none: there is no replay"
    )
    kv_events_topic: str | None = _option(None, "topic of the events; none: the empty one")
    kv_events_buffer_steps: int = _option(10_000, "batches of events, one a step at most, that are kept for replay")

    def __post_init__(self) -> None:
        for name in ("page_size", "tp", "nnodes", "kv_events_buffer_steps"):
            _at_least(name, getattr(self, name), 1)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), least)
        for name, (most, advice) in _MOST.items():
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}; {advice}")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction must be greater than 0 and at most 1, got {self.mem_fraction}")
        if self.device not in _DEVICES:
            raise ValueError(
                f"device must be one of {', '.join(_DEVICES)}, got {self.device!r}; "
                "CUDA_VISIBLE_DEVICES=N in the environment chooses among GPUs"
            )
        _check_choices(self)
        _check_attention_backend(self.attention_backend)
        self._check_nodes()
        self._check_kv_events()

    def _check_nodes(self) -> None:
        if self.tp % self.nnodes:
            raise ValueError(f"tp must be a multiple of nnodes, got {self.tp} and {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be between 0 and nnodes - 1, {self.nnodes - 1}, got {self.node_rank}")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise ValueError(f"dist_init_addr must be given with nnodes {self.nnodes}, as HOST:PORT of node 0")
        if self.nnodes == 1 and self.dist_init_addr is not None:
            raise ValueError(f"dist_init_addr needs nnodes of at least 2, got 1 and {self.dist_init_addr!r}")
        if self.dist_init_addr is not None:
            host, _, port = self.dist_init_addr.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"dist_init_addr must be HOST:PORT, got {self.dist_init_addr!r}")

    def _check_kv_events(self) -> None:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(self, name)
            if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
                raise ValueError(f"{name} must be tcp://*:PORT, tcp://IP:PORT or ipc://PATH, got {endpoint!r}")
        for name in ("kv_events_replay_endpoint", "kv_events_topic"):
            if self.kv_events_endpoint is None and getattr(self, name) is not None:
                raise ValueError(f"{name} needs kv_events_endpoint, where the events themselves are published")
        if self.kv_events_endpoint is not None and self.cache == "naive":
            raise ValueError("kv_events_endpoint needs cache radix: naive keeps nothing that events could be about")

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig in which nothing is left open: what was `auto` or None is what machine and model give."""

    num_pages: int = dataclasses.field()  # without a default: a bare annotation would inherit None
    context_length: int = dataclasses.field()
    max_running_requests: int = dataclasses.field()
    max_prefill_tokens: int = dataclasses.field()
    max_step_ms: int = 0
    run_ahead: int = 0
    cuda_graph_max_bs: int = 0
    num_threads: int = 1


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server around one engine."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _option(8000, "port to listen on; 0: a free one")
    served_model_name: tuple[str, ...] = _option((), "model name in the API; may be repeated; none: the engine's")
    api_key: tuple[str, ...] = _option((), "key that requests must bring, this or another one; may be repeated")
    api_key_file: str | None = _option(
        None, "file with such keys, unseen by other users; so are those in the environment's MINI_SGLANG_API_KEY"
    )
    cors_origin: tuple[str, ...] = _option((), "web origin whose pages may call the API, * for all; may be repeated")
    tool_call_parser: str = _option(
        "auto", "notation of the model's tool calls; auto: the chat template's; none: tools are refused"
    )
    reasoning_parser: str = _option(
        "auto", "markers of the model's reasoning; auto: the chat template's; none: it stays in the answer"
    )
    ssl_certfile: str | None = _option(None, "certificate chain (PEM) to serve HTTPS with")
    ssl_keyfile: str | None = _option(None, "its private key (PEM); none: in ssl_certfile too")
    max_body_bytes: int = _option(4 << 20, "largest request body")
    max_waiting_requests: int = _option(4096, "requests that may wait for the engine; those beyond get a 429")
    head_timeout_s: float = _option(20.0, "seconds that a client may take to send a request's line and headers")
    body_timeout_s: float = _option(30.0, "seconds that it may take to send the body, and one more for each 1000 bytes")
    idle_timeout_s: float = _option(60.0, "seconds that a connection stays open after an answer")
    shutdown_timeout_s: float = _option(7.0, "seconds that running requests get to finish after SIGTERM")
    metrics_names: Literal["both", "mini_sglang", "vllm"] = _option(
        "both", "prefix of the names in /metrics: mini_sglang:, or vllm: as vLLM has it, or both"
    )
    otlp_traces_endpoint: str | None = _option(
        None, "URL of an OpenTelemetry collector to send spans of requests to, over HTTP; none: no spans"
    )
    access_log: bool = _option(True, "log a line for each request, without what was asked and answered")
    log_contents: bool = _option(False, "log what is asked and answered, for debugging")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        for name in ("served_model_name", "api_key", "cors_origin"):
            _words(name, getattr(self, name))
        for origin in self.cors_origin:
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"cors_origin must be like https://example.com, without a path, or *, got {origin!r}")
        if self.otlp_traces_endpoint is not None and not _URL.fullmatch(self.otlp_traces_endpoint):
            raise ValueError(
                "otlp_traces_endpoint must be like http://localhost:4318, with nothing secret in it: "
                "headers come from the environment's OTEL_EXPORTER_OTLP_HEADERS"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile, the certificate that the key belongs to")
        _check_choices(self)
        if {self.tool_call_parser, self.reasoning_parser} - {"auto", "none"}:
            from mini_sglang.text.notations import check_parsers  # which takes time, and is rarely needed

            check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name in ("max_body_bytes", "max_waiting_requests"):
            _at_least(name, getattr(self, name), 1)
        for name in ("head_timeout_s", "body_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")
        if not 0 <= self.shutdown_timeout_s < math.inf:  # which not-a-number is not either
            raise ValueError(f"shutdown_timeout_s must be a finite number of at least 0, got {self.shutdown_timeout_s}")


_LEAST = {  # of settings that may be left open
    "max_running_requests": 1,
    "max_prefill_tokens": 1,
    "num_pages": 1,
    "kv_cache_bytes": 1,
    "context_length": 2,
    "num_threads": 1,
    "run_ahead": 0,
    "max_step_ms": 0,
    "cuda_graph_max_bs": 0,
}
_MOST = {
    "run_ahead": (32, "1 keeps a GPU busy"),  # the rings in execution/pinned_ring.py are twice as long
    "max_step_ms": (3_600_000, "0 bounds no step"),
    "num_threads": (1024, "one for each core is the fastest"),
}
_ENDPOINT = re.compile(r"tcp://(\*|[^\s:\[\]*]+|\[[0-9A-Fa-f:.]+\]):(\*|[0-9]{1,5})|ipc://\S+")
_URL = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
_DEVICES = ("auto", "cpu", "cuda")
_GPU_BACKENDS = ("triton", "flashinfer", "flash_attn")
_BACKENDS = ("auto", "cpu", "reference", *_GPU_BACKENDS)


def _check_choices(config: EngineConfig | ServerConfig) -> None:
    """Each field that is declared as one of some words holds one of them."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(get_args(hint))}, got {getattr(config, name)!r}")


def _check_attention_backend(names: str) -> None:
    known = _GPU_BACKENDS if "," in names else _BACKENDS
    if names.count(",") > 1 or not all(name in known for name in names.split(",")):
        raise ValueError(
            f"attention_backend must be one of {', '.join(_BACKENDS)}, or PREFILL,DECODE of "
            f"{', '.join(_GPU_BACKENDS)}; got {names!r}"
        )


def _words(name: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(isinstance(word, str) and word.strip() for word in values):
        raise ValueError(f"{name} must be a tuple of strings that are not empty")  # the values may be secret


def _at_least(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
