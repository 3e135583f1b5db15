"""The body that SGLang's native /generate takes, for the clients and routers that speak it.

Its fields have SGLang's names and defaults. SGLang also takes lists of `sampling_params`, `return_logprob` and the like
for the single prompts of a batch; this server refuses them: one request, one set of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from mini_sglang.errors import FieldError
from mini_sglang.sampling_params import MAX_LOGPROBS, Json
from mini_sglang.server import fields
from mini_sglang.server.bodies import SAMPLING_FIELDS, Body, JobBody, schema_format

DEFAULT_NEW_TOKENS = 128
SGLANG_FIELDS = frozenset({"text", "input_ids", "sampling_params"})  # a body with one of them is of this kind


def _one_or_none(value: Any) -> Any:
    """None for an empty string, which SGLang's clients send where they have no stop string."""
    return None if value == "" else value


class SglangSampling(Body):
    """`sampling_params`."""

    max_new_tokens: int | None = Field(default=DEFAULT_NEW_TOKENS, ge=0)  # null: up to the context
    min_new_tokens: int | None = None
    n: int | None = Field(default=None, ge=1, le=fields.MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    sampling_seed: int | None = None
    stop: Annotated[fields.StopStrings | None, BeforeValidator(_one_or_none)] = None
    stop_token_ids: fields.StopTokenIds | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: fields.LogitBias | None = None
    spaces_between_special_tokens: bool | None = None  # no tokenizer here puts any
    json_schema: str | None = None  # as JSON text
    regex: str | None = None
    ebnf: str | None = None
    # Not supported.
    stop_regex: fields.Off = None
    structural_tag: fields.Off = None
    custom_params: fields.Off = None


_DEFAULT_SAMPLING = SglangSampling()
_FIELD_NAMES = {  # SGLang's by the engine's, where they differ
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    "response_format": "json_schema",
    "request_id": "rid",
}


class SglangBody(JobBody):
    """POST /generate as SGLang has it. `text` is a string or a list of them, `input_ids` the same of token ids."""

    text: Any = None
    input_ids: Any = None
    sampling_params: SglangSampling | None = None
    model: str | None = None
    rid: Annotated[str, Field(min_length=1, max_length=200)] | None = None  # to abort it by
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(default=None, ge=-1)  # of the prompt, from here on; -1: of the answer alone
    top_logprobs_num: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    return_text_in_logprobs: bool | None = None
    log_metrics: bool | None = None  # changes no answer
    no_logs: bool | None = None  # nor does this
    # Not supported.
    input_embeds: fields.Off = None
    image_data: fields.Off = None
    audio_data: fields.Off = None
    video_data: fields.Off = None
    modalities: fields.Off = None
    lora_path: fields.Off = None
    session_params: fields.Off = None
    custom_logit_processor: fields.Off = None
    token_ids_logprob: fields.Off = None
    return_hidden_states: fields.OffIfFalse = None
    return_routed_experts: fields.OffIfFalse = None
    return_bytes: fields.OffIfFalse = None
    return_entropy: fields.OffIfFalse = None
    background: fields.OffIfFalse = None
    extra_key: fields.Off = None
    data_parallel_rank: fields.Off = None
    routed_dp_rank: fields.Off = None
    bootstrap_host: fields.Off = None
    bootstrap_port: fields.Off = None
    bootstrap_room: fields.Off = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise FieldError("text", "or input_ids is required, and only one of them")
        return self

    @property
    def field_names(self) -> Mapping[str, str]:
        return {**_FIELD_NAMES, "prompt": "text" if self.text is not None else "input_ids"}

    @property
    def sampling(self) -> SglangSampling:
        return self.sampling_params or _DEFAULT_SAMPLING

    @property
    def num_choices(self) -> int:
        return self.sampling.n or 1

    @property
    def prompt(self) -> Any:
        return self.text if self.text is not None else self.input_ids

    @property
    def is_single(self) -> bool:
        """Whether the answer is one object rather than a list."""
        prompt = self.prompt
        is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        return self.num_choices == 1 and not is_batch

    @property
    def is_only_echo(self) -> bool:
        """Whether only the prompt's log-probabilities are asked for."""
        return self.sampling.max_new_tokens == 0

    @property
    def first_logprob(self) -> int | None:
        """The position in the prompt that log-probabilities begin at; None: only the answer's are asked for."""
        start = self.logprob_start_len
        return start if self.return_logprob and start is not None and start >= 0 else None

    def sampling_fields(self) -> Json:
        sampling = self.sampling
        schema, alternatives = sampling.json_schema, self.top_logprobs_num or 0
        return {
            # SGLang has no allowed_token_ids and no choice
            **{name: getattr(sampling, _FIELD_NAMES.get(name, name), None) for name in SAMPLING_FIELDS},
            "response_format": None if schema is None else schema_format(schema, "json_schema", "be JSON text"),
            "max_tokens": 1 if self.is_only_echo else sampling.max_new_tokens,
            "logprobs": alternatives if self.return_logprob else None,
            "prompt_logprobs": None if self.first_logprob is None else alternatives,
        }
