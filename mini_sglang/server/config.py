"""Every setting of the HTTP server: flat, frozen, checked on construction."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from mini_sglang.config import at_least, check_choices, option


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server around one engine."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "port to listen on; 0: a free one")
    served_model_name: tuple[str, ...] = option((), "model name in the API; may be repeated; none: the engine's")
    api_key: tuple[str, ...] = option((), "key that requests must bring, this or another one; may be repeated")
    api_key_file: str | None = option(
        None, "file with such keys, unseen by other users; so are those in the environment's MINI_SGLANG_API_KEY"
    )
    cors_origin: tuple[str, ...] = option((), "web origin whose pages may call the API, * for all; may be repeated")
    tool_call_parser: str = option(
        "auto", "notation of the model's tool calls; auto: the chat template's; none: tools are refused"
    )
    reasoning_parser: str = option(
        "auto", "markers of the model's reasoning; auto: the chat template's; none: it stays in the answer"
    )
    ssl_certfile: str | None = option(None, "certificate chain (PEM) to serve HTTPS with")
    ssl_keyfile: str | None = option(None, "its private key (PEM); none: in ssl_certfile too")
    max_body_bytes: int = option(4 << 20, "largest request body")
    max_waiting_requests: int = option(4096, "requests that may wait for the engine; those beyond get a 429")
    head_timeout_s: float = option(20.0, "seconds that a client may take to send a request's line and headers")
    body_timeout_s: float = option(30.0, "seconds that it may take to send the body, and one more for each 1000 bytes")
    idle_timeout_s: float = option(60.0, "seconds that a connection stays open after an answer")
    shutdown_timeout_s: float = option(7.0, "seconds that running requests get to finish after SIGTERM")
    metrics_names: Literal["both", "mini_sglang", "vllm"] = option(
        "both", "prefix of the names in /metrics: mini_sglang:, or vllm: as vLLM has it, or both"
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector to send spans of requests to, over HTTP; none: no spans"
    )
    access_log: bool = option(True, "log a line for each request, without what was asked and answered")
    log_contents: bool = option(False, "log what is asked and answered, for debugging")

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
        check_choices(self)
        if {self.tool_call_parser, self.reasoning_parser} - {"auto", "none"}:
            from mini_sglang.text.notations import check_parsers  # which takes time, and is rarely needed

            check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name in ("max_body_bytes", "max_waiting_requests"):
            at_least(name, getattr(self, name), 1)
        for name in ("head_timeout_s", "body_timeout_s", "idle_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, got {getattr(self, name)}")
        if not 0 <= self.shutdown_timeout_s < math.inf:  # which not-a-number is not either
            raise ValueError(f"shutdown_timeout_s must be a finite number of at least 0, got {self.shutdown_timeout_s}")


def _words(name: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(isinstance(word, str) and word.strip() for word in values):
        raise ValueError(f"{name} must be a tuple of strings that are not empty")  # the values may be secret


_URL = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")
