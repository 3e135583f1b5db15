"""Tiny random models and what tests do with them: checkpoints as users have them, engines run to their end, servers.

Plain functions and classes with types, for test modules to import; fixtures stay in the conftest.py files. What a test
expects is not said here, but for what transformers makes of a model.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import gguf
import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch
import uvicorn
import zmq
import zmq.asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import mini_sglang.execution.worker_group
from mini_sglang import Engine, EngineConfig, SamplingParams, ServerConfig
from mini_sglang import Tokenizer as MiniTokenizer
from mini_sglang.execution import worker_main
from mini_sglang.execution.worker_group import Assignment, Job
from mini_sglang.ipc.async_engine import AsyncEngine
from mini_sglang.ipc.engine_process import EngineLoop, engine_info
from mini_sglang.outputs import StepOutputs as StepOutputs  # these two also for test modules to name
from mini_sglang.outputs import TokenOutput as TokenOutput
from mini_sglang.server.app import create_app
from mini_sglang.weights.hub import ModelSource

VOCAB_SIZE = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TRAINING_TEXT = [
    "The capital of France is Paris. Once upon a time there was a little robot who lived by the sea.",
    "def add(a, b):\n    return a + b\n",
    "Numbers 0123456789, punctuation .,;:!? and emoji 🙂 中文 café.",
] * 4
ROPE_SCALINGS: dict[str, dict[str, str | float | bool]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_GGUF_FAMILIES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}  # as llama.cpp calls them
_INTERLEAVED = {"llama", "smollm3"}  # of llama.cpp's families: those whose converter reorders the rows of q and k


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint on disk and the transformers model (float32, eval mode) whose weights it holds."""

    path: Path  # a folder, or a .gguf file
    model: PreTrainedModel

    @property
    def source(self) -> ModelSource:
        return ModelSource(str(self.path), self.path, "gguf" if self.path.suffix == ".gguf" else "safetensors")


@dataclass
class RunningServer:
    """`python -m mini_sglang.server` in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def post(self, route: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + route, json=body, timeout=120)

    def get(self, route: str) -> httpx.Response:
        return httpx.get(self.url + route, timeout=120)

    @property
    def engine_pid(self) -> int:
        return int(self.get("/server_info").json()["engine"]["pid"])


class ThreadWorkers:
    """Like LocalWorkers, without processes: threads start at once, and what they run is what a process runs."""

    def __init__(self, job: Job, ranks: range, first_of_node: int) -> None:
        self._threads = [
            threading.Thread(target=worker_main.run, args=(Assignment(job, rank, 0),), daemon=True) for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    def ended(self) -> None:
        return None

    def wait(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)
            assert not thread.is_alive()

    def kill(self) -> None:
        pass


def use_thread_workers(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone, the workers of tensor parallelism are threads."""
    patch.setattr(mini_sglang.execution.worker_group, "LocalWorkers", ThreadWorkers)


@contextmanager
def run_server(log: Path, *options: str, descriptors: int | None = None) -> Iterator[RunningServer]:
    """A server on a free port, killed when the block is left; what it prints goes to `log`.

    `descriptors`: as many as each of its processes may have open.
    """
    command = (sys.executable, "-m", "mini_sglang.server", "--port", "0", "--num-threads", "1", *options)
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    if descriptors is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
    try:
        while not (url := _url_in(log)):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield RunningServer(process, url, log)
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for `condition`. Raises AssertionError if it does not come true within the limit."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def _url_in(log: Path) -> str | None:
    greetings = [line for line in log.read_text().splitlines() if line.startswith("Serving ")]
    return greetings[0].rpartition(" ")[2] if greetings else None


class _EngineThread:
    """What AsyncEngine sees of an engine's process: here it is a thread, around an engine that there is already."""

    def __init__(self, engine: Engine, address: str) -> None:
        self.returncode: int | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, address), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, address: str) -> None:
        torch.set_num_threads(1)  # which each thread has to say for itself
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.connect(address)
            EngineLoop(engine, socket, os.getppid()).run()

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        self.returncode = 0
        return 0

    def kill(self) -> None:
        raise RuntimeError("a thread cannot be killed")


@contextmanager
def serve(engine: Engine, tokenizer: MiniTokenizer) -> Iterator[str]:
    """A server in this process, on a free port of a real socket; gives its address.

    In the block the engine belongs to a thread of the server's, and talks to the API by messages as in a process.
    """
    started = threading.Event()
    servers: list[uvicorn.Server] = []

    async def run() -> None:
        context = zmq.asyncio.Context()
        with tempfile.TemporaryDirectory() as folder, context.socket(zmq.PAIR) as socket:
            socket.bind(f"ipc://{folder}/engine")
            process = cast(asyncio.subprocess.Process, _EngineThread(engine, f"ipc://{folder}/engine"))
            api = AsyncEngine(process, context, socket, engine_info(engine), tokenizer)
            app = create_app(api, tokenizer, ServerConfig())
            servers.append(uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off")))
            started.set()
            await servers[0].serve()
            await api.close(timeout=10)

    thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
    thread.start()
    try:
        assert started.wait(timeout=30)
        while not servers[0].started:
            assert thread.is_alive()
            time.sleep(0.001)
        yield f"http://127.0.0.1:{servers[0].servers[0].sockets[0].getsockname()[1]}"
    finally:
        for server in servers:
            server.should_exit = True
        thread.join()


def with_template(tokenizer: MiniTokenizer, source: str) -> MiniTokenizer:
    """The same tokenizer with another chat template."""
    renderer = copy.copy(tokenizer.renderer)
    renderer.chat_template = source
    return MiniTokenizer(tokenizer.backend, tokenizer.eos_token_ids, lambda: renderer)


def make_tokenizer(chat_template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB_SIZE` tokens, trained on a few sentences."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TRAINING_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def run_engine(model: str | Path, **settings: object) -> Iterator[Engine]:
    """An engine in float32 unless `dtype` says otherwise; checked for lost pages when the block is left."""
    engine = Engine(EngineConfig(model=str(model), dtype="float32", num_threads=1).replace(**settings))
    try:
        yield engine
        assert not engine.has_work
        engine.check()
        engine.flush_cache()
        assert engine.stats().num_free_pages == engine.stats().num_pages, "a page was lost"
    finally:
        engine.close()


def run_all(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], *, arrivals: int = 1000
) -> list[list[TokenOutput]]:
    """What came of each prompt; `arrivals` of them join at each step."""
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    waiting = list(zip(range(len(prompts)), prompts, params, strict=True))
    for _ in range(10_000):
        for index, prompt, how in waiting[:arrivals]:
            engine.add_request(str(index), prompt, how)
        del waiting[:arrivals]
        for output in engine.step():
            assert output.error is None, output.error
            outputs[int(output.request_id)].append(output)
        if not waiting and not engine.has_work:
            return outputs
    raise RuntimeError("the requests did not end")


def generate_ids(
    engine: Engine, prompts: Sequence[list[int]], *, arrivals: int = 1000, num_tokens: int = 20
) -> list[list[int]]:
    """The greedy output ids of each prompt, past any end token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = run_all(engine, prompts, [params] * len(prompts), arrivals=arrivals)
    return [[token for output in of_prompt for token in output.token_ids] for of_prompt in outputs]


def greedy_ids(model: PreTrainedModel, prompt: list[int], num_tokens: int = 20) -> list[int]:
    """What transformers makes of `prompt`: the whole sequence computed anew for every token."""
    torch.set_num_threads(1)  # for models this small, waking a second thread takes longer than the work
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer


def make_ragged_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Lengths 1 to 90; every third prompt begins like an earlier one, some end inside its pages, one is its whole."""
    rng = random.Random(0)
    prompts: list[list[int]] = []
    for index in range(count):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 90]))]
        if index % 3 == 2:
            earlier = prompts[index - 2]
            prompt = earlier[: rng.randint(0, len(earlier))] + prompt
        prompts.append(prompt)
    prompts[-1] = list(prompts[0])
    return prompts


def make_model(family: str, *, seed: int = 0, rope: str | None = None, **config: object) -> PreTrainedModel:
    """A random model, large enough that greedy tokens vary and small enough to run in milliseconds.

    `family` is a `model_type` of transformers, `rope` a key of ROPE_SCALINGS; other keywords change the config.
    """
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_theta": 10000.0, **ROPE_SCALINGS.get(rope or "", {"rope_type": "default"})},
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**settings, **config})
    ).eval()
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide mistakes
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", ".sinks")):
                parameter.normal_(0.0, 0.2)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    return model


@dataclass(frozen=True)
class Checkpoints:
    """Writes tiny checkpoints, each to a new folder in `root`."""

    root: Path
    tokenizer: PreTrainedTokenizerFast

    def write(
        self,
        family: str = "llama",
        *,
        seed: int = 0,
        sharded: bool = False,
        fused: bool = False,
        rope: str | None = None,
        **config: object,
    ) -> TinyCheckpoint:
        """`make_model` as safetensors.

        With `fused` all experts of a layer are one tensor, as transformers 5 holds them, else in the published layout.
        """
        folder = self._new_folder(family)
        model = make_model(family, seed=seed, rope=rope, **config)
        model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB", save_original_format=not fused)
        self.tokenizer.save_pretrained(folder)
        return TinyCheckpoint(folder, model)

    def write_gguf(
        self, family: str = "llama", *, kind: str = "F32", seed: int = 0, rope: str | None = None, **config: object
    ) -> TinyCheckpoint:
        """`make_model` as a .gguf file, as llama.cpp converts it.

        `kind` is the type of the matrices, a name of gguf.GGMLQuantizationType. The model of a quantised file holds the
        dequantised weights, so that it computes what the file says.
        """
        model = make_model(family, seed=seed, rope=rope, **config)
        path = self._new_folder(family) / f"{family}-{kind}.gguf"
        save_gguf(path, family, model, self.tokenizer, gguf.GGMLQuantizationType[kind])
        return TinyCheckpoint(path, model)

    def _new_folder(self, family: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{family}-", dir=self.root))


def save_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    kind: gguf.GGMLQuantizationType,
) -> None:
    """Write `model` as llama.cpp's converter does; its weights become those that the file holds."""
    config = model.config
    architecture = _GGUF_FAMILIES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    _add_rope(writer, config)
    _add_tokenizer(writer, tokenizer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, tensor in _named_experts(state):
        module = name.split(".")[-2]
        values = tensor.numpy()
        permute = heads.get(module) if architecture in _INTERLEAVED else None
        stored = interleave(values, permute) if permute else np.ascontiguousarray(values)
        quantised = kind if values.ndim > 1 and not name.endswith("mlp.gate.weight") else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored, quantised)
        writer.add_tensor(gguf_name(architecture, name), data, raw_dtype=quantised)
        kept = gguf.quants.dequantize(data, quantised).reshape(values.shape)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(deinterleave(kept, permute) if permute else kept.copy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named_experts(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model, those of its experts as llama.cpp has them: gate, up and down, each for all of a layer"""
    for name, tensor in state.items():
        if name.endswith(".experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            yield from zip((f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"), tensor.chunk(2, 1), strict=True)
        else:
            yield f"{name}.weight" if name.endswith(".experts.down_proj") else name, tensor


def interleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of two rotary halves per head → rows of pairs, llama.cpp's order."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def deinterleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The inverse of `interleave`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()


def gguf_name(architecture: str, name: str) -> str:
    """The GGUF name of a Hugging Face tensor, by the gguf package's table for what llama.cpp calls `architecture`."""
    found: str | None = _name_map(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@functools.cache
def _name_map(architecture: str) -> gguf.TensorNameMap:
    (family,) = (family for family, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(family, 8)


def _add_rope(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config.head_dim))


def llama3_divisors(rope: Mapping[str, float], head_dim: int) -> npt.NDArray[np.float32]:
    """What the Llama 3.1 release divides rotary frequencies by, case by case, float32."""
    divisors = []
    for exponent in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (exponent / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    special = {entry["content"] for entry in document["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in document["model"]["merges"]])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_pad_token_id(vocab["<|endoftext|>"])
    writer.add_chat_template(tokenizer.chat_template)
