"""Every setting of the engine: flat, frozen, checked on construction. `server/config.py` has the server's.

Nothing reads the environment or the hardware here; `"auto"` values are resolved where the answer is known (the executor
for device, dtype and pool size), which returns a new config and leaves the caller's alone.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

DEFAULT_MODEL = "smollm2-135m"
WITHOUT_MODEL = ("none", "ngram")  # what `speculative` may be; anything else names a model


def option(default: Any, help: str) -> Any:
    """A field with its one-line explanation, which is also the help of its command-line option."""
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError, naming the field, when a value is out of range."""

    model: str = option(DEFAULT_MODEL, "built-in name, folder of safetensors, .gguf file, or hub id")
    model_source: Literal["huggingface", "modelscope"] = option("huggingface", "hub that a model id is looked up in")
    revision: str | None = option(None, "branch, tag or commit of a hub model; none: the hub's default")
    load_format: Literal["auto", "dummy"] = option("auto", "dummy: random weights from the config alone")
    device: str = option("auto", "cpu or cuda; CUDA_VISIBLE_DEVICES=N in the environment chooses among GPUs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "arithmetic of weights and activations")
    weights: Literal["auto", "dense", "packed"] = option("auto", "packed: quantised matrices as they are stored")
    quantization: Literal["none", "fp8", "fp8-block", "w4a16"] = option("none", "quantise while loading, to nearest")
    seed: int = option(0, "seed of dummy weights")

    page_size: int = option(16, "tokens per page of the KV cache")
    num_pages: int | None = option(
        None, "pages of the KV cache; none: what fits kv_cache_bytes on a CPU, mem_fraction on a GPU"
    )
    kv_cache_bytes: int | None = option(
        None,
        "bytes of the KV cache of a rank on a CPU, where num_pages is not given; none: 1/32 of the memory available",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option("auto", "fp8: e4m3, which ends at 448; auto: the same as dtype")
    cache: Literal["radix", "naive"] = option("radix", "radix: reuse the KV of shared prefixes; naive: reuse nothing")

    context_length: int | None = option(None, "most tokens of one request, prompt and output; none: the model's own")
    max_running_requests: int | None = option(None, "most requests in one step; none: 64 on CPU, 256 on GPU")
    max_prefill_tokens: int | None = option(
        None, "token budget of one step, decodes included; none: 512 on CPU, 8192 on GPU"
    )
    max_step_ms: int | None = option(
        None,
        "most milliseconds of a step that computes prompts beside running requests; 0: no bound; none: 200 on CPU "
        "and 40 on GPU in a server, no bound elsewhere",
    )
    schedule: Literal["fcfs", "lpm", "priority"] = option(
        "fcfs", "order of waiting requests; lpm: longest cached prefix first"
    )
    run_ahead: int | None = option(None, "steps launched before the oldest is read; none: 0 on CPU, 1 on GPU")

    speculative: str = option(
        "none", "who drafts tokens that a step verifies: none, ngram, or a model: a smaller one or an EAGLE-3 head"
    )
    speculative_tokens: int = option(8, "most tokens of a draft")
    speculative_gate: bool = option(True, "draft only as much as pays, as steps and acceptance are measured")

    attention_backend: str = option("auto", "cpu, triton, reference, flashinfer or flash_attn; PREFILL,DECODE for two")
    deterministic: bool = option(
        False, "logits bitwise the same alone and in any batch, chunked or not, cached or not (GPU, triton)"
    )
    mem_fraction: float = option(0.9, "share of a GPU's memory for weights, activations and KV cache together")
    cuda_graph_max_bs: int | None = option(None, "most rows of a CUDA graph; 0: no graphs; none: max_running_requests")
    num_threads: int | None = option(None, "torch threads of a rank on a CPU; none: the cores, shared out")

    tp: int = option(1, "ranks that share the model, each on a GPU of its own (on a CPU: in a process of its own)")
    all_reduce: Literal["auto", "nccl"] = option(
        "auto", "auto: small sums of GPUs of one node through symmetric memory; nccl: all sums through NCCL"
    )
    nnodes: int = option(1, "nodes that the ranks are spread over; the same command runs on each")
    node_rank: int = option(0, "which node this is; 0 schedules and serves, the others lend their devices")
    dist_init_addr: str | None = option(None, "HOST:PORT of node 0 where the nodes meet, in a network that is trusted")

    step_log: str | None = option(None, "file to log every step to, as JSON lines, for mini-sglang bench explain")
    profile_dir: str | None = option(None, "folder for traces of /start_profile; none: there can be no traces")
    kv_events_endpoint: str | None = option(
        None,
        "address to publish events of the prefix cache on, in vLLM's format, as tcp://*:5557, tcp://IP:PORT or "
        "ipc://PATH; they hold prompts, so only in a network that is trusted; none: no events",
    )
    kv_events_replay_endpoint: str | None = option(
        None, "address that replays missed events, as tcp://*:5558; none: there is no replay"
    )
    kv_events_topic: str | None = option(None, "topic of the events; none: the empty one")
    kv_events_buffer_steps: int = option(10_000, "batches of events, one a step at most, that are kept for replay")

    def __post_init__(self) -> None:
        for name in ("page_size", "speculative_tokens", "tp", "nnodes", "kv_events_buffer_steps"):
            at_least(name, getattr(self, name), 1)
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), least)
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
        check_choices(self)
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
_DEVICES = ("auto", "cpu", "cuda")
_GPU_BACKENDS = ("triton", "flashinfer", "flash_attn")
_BACKENDS = ("auto", "cpu", "reference", *_GPU_BACKENDS)


def check_choices(config: Any) -> None:
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


def at_least(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
