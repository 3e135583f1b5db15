"""What the API process and the engine process say to each other: msgpack over one ZeroMQ socket pair.

Each message is a tagged msgspec struct; the two unions at the end are the whole protocol. Calls that expect an answer
carry a `call_id`, which the answer repeats. Nothing here knows sockets, text or tensors.
"""

from __future__ import annotations

import msgspec

from mini_sglang.config import EngineConfig
from mini_sglang.outputs import FinishReason, StepOutputs
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.scheduling.stats import SchedulerStats


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes while an engine runs, and what the API process needs to admit requests."""

    model: str  # as given to the engine: built-in name, path or hub id
    dtype: str
    device: str
    vocab_size: int
    context_length: int  # prompt and output tokens of one request together
    page_size: int  # tokens
    num_pages: int
    max_prompt_tokens: int  # longest prompt that the context and the KV pool can serve
    max_running_requests: int
    eos_token_ids: list[int]
    pid: int
    config: EngineConfig  # every `auto` resolved

    @property
    def kv_pool_tokens(self) -> int:
        """Tokens that the KV pool holds, over all requests."""
        return self.page_size * self.num_pages


class AddRequest(msgspec.Struct, tag=True):
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    client: str = ""


class AbortRequest(msgspec.Struct, tag=True):
    request_id: str
    reason: FinishReason = FinishReason.ABORT


class Ping(msgspec.Struct, tag=True):
    call_id: int


class GetStats(msgspec.Struct, tag=True):
    call_id: int


class FlushCache(msgspec.Struct, tag=True):
    call_id: int


class StartTrace(msgspec.Struct, tag=True):
    call_id: int
    num_steps: int | None = None  # None: until StopTrace


class StopTrace(msgspec.Struct, tag=True):
    call_id: int


class Shutdown(msgspec.Struct, tag=True):
    """Leave now; whatever runs is dropped."""


class Ready(msgspec.Struct, tag=True):
    """The first message of an engine whose model is loaded."""

    info: EngineInfo


class Outputs(msgspec.Struct, tag=True):
    """Everything that one step produced."""

    outputs: StepOutputs


class RequestRejected(msgspec.Struct, tag=True):
    """The engine refused an AddRequest with a FieldError of these parts."""

    request_id: str
    field: str
    problem: str
    others: list[str] = []


class Pong(msgspec.Struct, tag=True):
    call_id: int


class Stats(msgspec.Struct, tag=True):
    call_id: int
    stats: SchedulerStats


class CacheFlushed(msgspec.Struct, tag=True):
    call_id: int
    num_pages: int


class Trace(msgspec.Struct, tag=True):
    """Answers StartTrace and StopTrace: with the path of the file that StopTrace has written, or with what failed."""

    call_id: int
    path: str | None = None
    error: str | None = None


class Fatal(msgspec.Struct, tag=True):
    """The last message of an engine that cannot go on. `is_setting`: the configuration is wrong, nothing is broken."""

    error: str
    is_setting: bool = False


Reply = Pong | Stats | CacheFlushed | Trace  # to a call
ToEngine = AddRequest | AbortRequest | Ping | GetStats | FlushCache | StartTrace | StopTrace | Shutdown
FromEngine = Ready | Outputs | RequestRejected | Reply | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
