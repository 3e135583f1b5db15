"""The settings of `bench serving`, which are also its command-line options. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

from mini_sglang.bench.slo import read_limits

AUTO = "auto"  # a sweep that chooses its rates
MOST_REQUESTS = 20_000  # of a run that judges a rate
_LEAST_NOT_GOOD, _LEAST_SECONDS = 10, 20.0  # such a run is long enough for both


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def enough_requests(rate: float, good: float) -> int:
    """How many requests it takes to judge a rate, in requests/s, by the share that is good.

    Enough for 10 to miss the limits (200 at 95 %, 1,000 at most), and 20 s of arrivals: the first find an empty server.
    """
    share = round(_LEAST_NOT_GOOD / max(1 - good, 0.01))
    return min(MOST_REQUESTS, max(share, math.ceil(_LEAST_SECONDS * rate)))


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """One measurement of one server. Raises ValueError, naming the field, for values that make none."""

    url: str = _option("http://127.0.0.1:8000", "address of the server")
    api: Literal["completions", "chat", "generate", "sglang"] = _option(
        "completions", "/v1/completions, /v1/chat/completions, or /generate in this project's or SGLang's form"
    )
    model_name: str | None = _option(None, "model to ask for; none: the first that /v1/models names")
    api_key: str | None = _option(None, "sent as a bearer token")
    header: tuple[str, ...] = _option((), "'NAME: VALUE' to send with every request; may be repeated")
    extra_body: str | None = _option(None, "JSON object of more fields for every request's body")
    ignore_eos: bool = _option(True, "ask the server to go on after the model's end token")
    temperature: float = _option(0.0, "0 is greedy")
    timeout: float = _option(600.0, "seconds after which a request counts as failed")

    dataset: Literal["random", "sharegpt", "chat", "trace"] = _option(
        "random", "random tokens; ShareGPT's JSON; chats as JSONL (WildChat); a trace: Mooncake, Qwen-Bailian, Azure"
    )
    dataset_path: str | None = _option(None, "file of the data set")
    num_requests: int | None = _option(
        None, "requests of a run; none: 100 random ones, or all of the file; with --good: 200 (95 %) or 20 s of them"
    )
    input_length: str = _option("512", "random: prompt tokens, one number or LOW:HIGH (uniform), prefix included")
    output_length: str | None = _option(
        None, "tokens to generate, one number or LOW:HIGH; none: 128 if random, else those of the data set"
    )
    shared_prefix: int = _option(0, "random: tokens at the start that requests of a group share")
    prefix_groups: int = _option(1, "random: number of such groups")
    vocab: str = _option("100:10000", "random and trace: token ids to draw from, LOW:HIGH")
    turns: Literal["first", "all"] = _option("first", "chats: ask for the first answer only, or for each with its past")
    tokenizer: str = _option(
        "smollm2-135m", "model whose tokenizer counts the tokens of chats, and spells random tokens for --api chat"
    )
    scale_length: float = _option(1.0, "trace: factor on all lengths; equal blocks stay equal")
    max_input: int | None = _option(None, "most prompt tokens: traces are cut to it, chats beyond it left out")
    max_output: int | None = _option(None, "most tokens to generate")

    rate: float | None = _option(None, "requests per second, whatever the server does; inf: all at once")
    arrival: Literal["poisson", "gamma", "fixed"] = _option("poisson", "how gaps between requests are distributed")
    burstiness: float = _option(1.0, "gamma: shape of the gaps; 1 is Poisson, less comes in bursts")
    concurrency: int | None = _option(None, "closed loop: keep so many requests under way")
    replay: bool = _option(False, "trace: send at the times of the trace, a turn not before the answer it follows")
    speed: float = _option(1.0, "replay: factor on the trace's speed")
    sweep: str | None = _option(
        None, "measure at each of these rates, as 1,2,4; with --good none are needed: they double from 1", bare=AUTO
    )
    good: float | None = _option(
        None, "sweep: find the highest rate, to 5 %, at which this share of the requests keeps --slo, as 0.95"
    )

    warmup: int = _option(4, "requests before each run that do not count")
    repeats: int = _option(1, "runs, with other random tokens each; medians are reported")
    flush_cache: bool = _option(False, "POST /flush_cache before each run")
    seed: int = _option(0, "of everything that is random")
    slo: str | None = _option(
        None, "limits in ms on a good request's own latencies, as ttft=500,itl_p99=50; also itl_max, tpot and e2e"
    )

    def __post_init__(self) -> None:
        ways = {"rate": self.rate, "concurrency": self.concurrency, "replay": self.replay or None, "sweep": self.sweep}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"exactly one of --rate, --concurrency, --replay and --sweep is needed, got {got}")
        if self.dataset != "random" and self.dataset_path is None:
            raise ValueError(f"dataset {self.dataset} needs --dataset-path")
        if self.dataset != "trace" and (self.replay or self.scale_length != 1):
            raise ValueError(f"replay and scale_length need --dataset trace, got {self.dataset}")
        for name in ("num_requests", "concurrency", "prefix_groups", "max_input", "max_output", "repeats"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup", "shared_prefix", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("speed", "scale_length", "burstiness", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if any(not rate > 0 for rate in self.rates if rate is not None):
            raise ValueError(f"rates must be above 0 requests/s, got {self.sweep or self.rate}")
        self._check_search()
        for read in (self.slos, self.extra_fields, self.headers, self.input_range, self.output_range, self.vocab_range):
            read()

    def _check_search(self) -> None:
        """Raise ValueError for a sweep without rates that has nothing to look for, and for a search without a sweep."""
        if self.good is None:
            if self.sweep == AUTO:
                raise ValueError(
                    "sweep needs rates like --sweep 1,2,4, "
                    "or a search like --sweep --slo ttft=500,itl_p99=50 --good 0.95"
                )
            return
        if not 0 < self.good <= 1:
            raise ValueError(f"good must be a share above 0 and at most 1, like 0.95, got {self.good:g}")
        if self.sweep is None or self.slo is None:
            raise ValueError(
                "good needs --sweep, which looks for the highest rate with that share of good requests, "
                "and --slo, which says what is good, like --slo ttft=500,itl_p99=50"
            )
        if len({*self.rates, math.inf}) <= len(self.rates):
            raise ValueError(f"good needs rates that are finite and different, got {self.sweep!r}")

    def num_requests_at(self, rate: float | None) -> int | None:
        """How many of the data set's requests a run at `rate` sends; None: all."""
        if self.good is None or rate is None or self.num_requests is not None:
            return None
        return enough_requests(rate, self.good)

    @property
    def rates(self) -> list[float | None]:
        """The rates to measure at in any case; [None] if requests do not come at a rate."""
        if self.sweep is None:
            return [self.rate]
        if self.sweep == AUTO:
            return []
        try:
            return [float(rate) for rate in self.sweep.split(",")]
        except ValueError:
            raise ValueError(f"sweep must be rates like 1,2,4, got {self.sweep!r}") from None

    def slos(self) -> dict[str, float]:
        """The limits by metric, in ms."""
        return {} if self.slo is None else read_limits(self.slo)

    def extra_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra_body or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"extra_body must be JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"extra_body must be a JSON object, got {self.extra_body}")
        return fields

    def headers(self) -> dict[str, str]:
        """What is sent with every request."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        for line in self.header:
            name, colon, value = line.partition(":")
            if not colon or not name.strip() or not line.isprintable():
                raise ValueError(f"header must be like 'NAME: VALUE', got {line!r}")
            headers[name.strip()] = value.strip()
        return headers

    def input_range(self) -> range:
        return _range("input_length", self.input_length)

    def output_range(self) -> range | None:
        return None if self.output_length is None else _range("output_length", self.output_length)

    def vocab_range(self) -> range:
        return _range("vocab", self.vocab, least=0)


def _range(name: str, text: str, least: int = 1) -> range:
    """ "5:9" → range(5, 10), "5" → range(5, 6)."""
    low, _, high = text.partition(":")
    try:
        values = range(int(low), int(high or low) + 1)
    except ValueError:
        raise ValueError(f"{name} must be a number or LOW:HIGH, got {text!r}") from None
    if not values or values.start < least:
        raise ValueError(f"{name} must rise and start at {least} or more, got {text!r}")
    return values
