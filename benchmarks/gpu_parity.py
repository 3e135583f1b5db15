"""Whether the engine on a GPU says what transformers says: reference ids in float32, log-probabilities in bfloat16, and
the same outputs with graphs and overlap on and off.

    python benchmarks/gpu_parity.py [--device cuda] [--models smollm2-135m,qwen3-0.6b,llama-3.2-1b] [--json FILE]

Per model, our bfloat16 engine samples 8,000 tokens (decode steps, in graphs) and is asked for the same tokens again as
the next ones of 8,000 prompts (prefill steps). Transformers scores the same tokens in float32, which is taken as exact,
and in bfloat16; each side's figure is its distance from the exact log-probabilities. `qwen3-0.6b` and `llama-3.2-1b`
are random weights of these shapes, written once by transformers and loaded by both sides.

`quantised_parity` does the same with weights in FP8 and 4 bits, of which transformers gets the dequantised values.
Where our activations are float8 too, transformers scores the tokens once more in float32 with activations rounded
alike: that error is the format's, and ours may be as large as it and bfloat16's together.

Beyond a 99th percentile lie 20 of 2,000 tokens, and others whenever rounding changes what is sampled: too few to tell
two sides apart.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mini_sglang.config import EngineConfig
from mini_sglang.engine import Engine
from mini_sglang.outputs import TokenOutput
from mini_sglang.quantize import Format, quantize_model
from mini_sglang.sampling_params import SamplingParams
from mini_sglang.text.tokenizer import load_tokenizer
from mini_sglang.verify import PROMPTS, load_reference
from mini_sglang.weights.hub import BUILTIN_MODELS, builtin_path, resolve_model

BUILTIN = "smollm2-135m"
SHAPES = Path(__file__).parent / "shapes"
MODELS = (BUILTIN, "qwen3-0.6b", "llama-3.2-1b")
MISSING = "not run: model file missing"
NO_GRAPHS = {"cuda_graph_max_bs": 0}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of settings that must give the same bits
    "overlap on and off": ({"run_ahead": 1}, {"run_ahead": 0}),
    "overlap on and off, no graphs": ({"run_ahead": 1, **NO_GRAPHS}, {"run_ahead": 0, **NO_GRAPHS}),
    "graphs on and off, deterministic": ({"deterministic": True}, {"deterministic": True, **NO_GRAPHS}),
}
ACTIVATION_GROUPS: dict[Format, int | None] = {"fp8": 0, "fp8-block": 128, "w4a16": None}  # None: they stay as they are
ROWS = 8
SAMPLES = 4  # of each prompt
RESAMPLED = 200  # times, for the standard error of a percentile
LOGIT_DEVIATION = 3.0  # of random models; trained ones have about as much
_REFERENCE = Path(__file__).parent.parent / "tests" / "data" / "smollm2_reference.json"

Sequence = tuple[list[int], list[int]]  # a prompt, and the tokens that follow it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    figures = parity(device=args.device, models=tuple(args.models.split(",")))
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


def parity(*, device: str = "cuda", models: tuple[str, ...] = MODELS, num_tokens: int = 8000) -> dict[str, Any]:
    """All comparisons, as in the module's docstring.

    `reference_ids_equal` is a bool, or says why it was not run. `models` holds for each name what `measure` and
    `equal_modes` return, or why it was not run. `holds` is whether everything that was run holds, and `complete`
    whether nothing was left out.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32 in what is taken as exact
    figures: dict[str, Any] = {"reference_ids_equal": reference_ids_equal(device), "models": {}}
    for name in models:
        figures["models"][name] = compare_model(name, device, num_tokens)
    run = [entry for entry in figures["models"].values() if entry != MISSING]
    figures["complete"] = MISSING not in (figures["reference_ids_equal"], *figures["models"].values())
    figures["holds"] = bool(figures["reference_ids_equal"]) and all(
        all(entry["no_worse_than_transformers"].values()) and all(entry["equal_modes"].values()) for entry in run
    )
    return figures


def compare_model(name: str, device: str, num_tokens: int) -> dict[str, Any] | str:
    """One model's `measure` and `equal_modes`; `name` is the built-in model or a folder of `SHAPES`."""
    if name == BUILTIN:
        if not builtin_path(BUILTIN_MODELS[BUILTIN]).is_file():
            return MISSING
        encode = load_tokenizer(resolve_model(BUILTIN)).encode
        prompts = [encode(text) for text in list(PROMPTS.values())[:ROWS]]
        return compare(BUILTIN, prompts, device, num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(SHAPES / name, Path(folder), device)
        prompts = random_prompts(AutoConfig.from_pretrained(folder).vocab_size)
        return compare(folder, prompts, device, num_tokens)


def compare(model: str, prompts: list[list[int]], device: str, num_tokens: int) -> dict[str, Any]:
    figures = measure(model, prompts * SAMPLES, device, num_tokens)
    return figures | {"equal_modes": equal_modes(model, prompts, device)}


# --- (1) reference ids in float32 ------------------------------------------------------------------------------------


def reference_ids_equal(device: str) -> bool | str:
    """Whether the built-in model's recorded prompts give the recorded ids in float32, one by one and together."""
    if not builtin_path(BUILTIN_MODELS[BUILTIN]).is_file():
        return MISSING
    cases = json.loads(_REFERENCE.read_text())["cases"]
    expected = [case["output_ids_ignore_eos"] for case in cases]
    params = SamplingParams(temperature=0, max_tokens=len(expected[0]), ignore_eos=True)
    prompts = [case["prompt_ids"] for case in cases]
    engine = make_engine(BUILTIN, device, dtype="float32")
    alone = [token_ids(generate(engine, [prompt], [params]))[0] for prompt in prompts]
    together = token_ids(generate(engine, prompts, [params] * len(prompts)))
    engine.close()
    return alone == expected and together == expected


# --- (2) log-probabilities in bfloat16 -------------------------------------------------------------------------------


def measure(model: str, prompts: list[list[int]], device: str, num_tokens: int) -> dict[str, Any]:
    """How far from float32 the log-probabilities of `num_tokens` tokens are: ours, decoded and prefilled, and theirs.

    Distances are absolute, in nats: mean, 99th percentile and its standard error, max. A side of ours is no worse than
    transformers if neither its mean nor its 99th percentile is larger; the maximum is a single token, and falls on
    either side by chance.
    """
    sequences, decoded = sample_and_score(model, prompts, device, num_tokens)
    prefilled = score_by_prefill(model, sequences, device)
    exact, theirs = score_by_transformers(model, sequences, device)
    ours = {"decode": distances(decoded, exact), "prefill": distances(prefilled, exact)}
    reference = distances(theirs, exact)
    no_worse = {path: all(mine[key] <= reference[key] for key in ("mean", "p99")) for path, mine in ours.items()}
    return {
        "tokens": len(exact),
        "mean_logprob": float(exact.mean()),
        "ours_bfloat16": ours,
        "transformers_bfloat16": reference,
        "no_worse_than_transformers": no_worse,
    }


def sample_and_score(
    model: str, prompts: list[list[int]], device: str, num_tokens: int, **settings: Any
) -> tuple[list[Sequence], torch.Tensor]:
    """What our engine samples, at temperature 1, and its log-probabilities [num_tokens] float64, prompt by prompt."""
    length = num_tokens // len(prompts)
    params = [
        SamplingParams(temperature=1.0, seed=index, max_tokens=length, ignore_eos=True, logprobs=0)
        for index in range(len(prompts))
    ]
    engine = make_engine(model, device, **settings)
    outputs = generate(engine, prompts, params)
    engine.close()
    sequences = list(zip(prompts, token_ids(outputs), strict=True))
    return sequences, chosen_logprobs(outputs)


def score_by_prefill(model: str, sequences: list[Sequence], device: str, **settings: Any) -> torch.Tensor:
    """Our log-probabilities of the same tokens, each the only one allowed after all before it as a whole prompt."""
    prompts, params = [], []
    for prompt, output in sequences:
        for index, token in enumerate(output):
            prompts.append(prompt + output[:index])
            params.append(SamplingParams(max_tokens=1, ignore_eos=True, logprobs=0, allowed_token_ids=[token]))
    engine = make_engine(model, device, cache="naive", max_running_requests=32, num_pages=2048, **settings)
    outputs = generate(engine, prompts, params)
    engine.close()
    return chosen_logprobs(outputs)


@torch.inference_mode()
def score_by_transformers(model: str, sequences: list[Sequence], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' log-probabilities of the same tokens [tokens] float64, in float32 and in bfloat16."""
    reference = load_reference(resolve_model(model)).to(device)
    results = []
    for dtype, attention in ((torch.float32, "eager"), (torch.bfloat16, "sdpa")):  # sdpa is transformers' default
        for parameter in reference.parameters():  # not the rotary buffers, which from_pretrained keeps in float32 too
            parameter.data = parameter.data.to(dtype)
        reference.set_attn_implementation(attention)
        results.append(score(reference, sequences, device))
    exact, rounded = results
    return exact, rounded


def score(reference: Any, sequences: list[Sequence], device: str) -> torch.Tensor:
    """A transformers model's log-probabilities of the tokens of all sequences [tokens] float64."""
    scores = []
    for prompt, output in sequences:
        logits = reference(torch.tensor([prompt + output], device=device)).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(output, device=device).unsqueeze(1)
        scores.append(logits.float().log_softmax(-1).gather(1, chosen).squeeze(1).double().cpu())
    return torch.cat(scores)


def distances(logprobs: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """logprobs, exact [tokens] float64. `p99_error` is the standard error of `p99`, from samples drawn again of these
    tokens (bootstrap; Efron 1979)."""
    distance = (logprobs - exact).abs()
    drawn = torch.randint(len(distance), (RESAMPLED, len(distance)), generator=torch.Generator().manual_seed(0))
    return {
        "mean": float(distance.mean()),
        "p99": float(distance.quantile(0.99)),
        "p99_error": float(distance[drawn].quantile(0.99, dim=1).std()),
        "max": float(distance.max()),
    }


# --- (3) quantised weights -------------------------------------------------------------------------------------------


def quantised_parity(*, device: str = "cuda", model: str = "qwen3-0.6b", num_tokens: int = 8000) -> dict[str, Any]:
    """For each format what `measure` returns, beside the error of activations in float8, in random weights of a shape.

    `no_worse` is whether neither path's mean distance is larger than transformers' in bfloat16 and that error together.
    """
    torch.set_float32_matmul_precision("highest")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dense = Path(folder) / "dense"
        write_random_model(SHAPES / model, dense, device)
        prompts = random_prompts(AutoConfig.from_pretrained(dense).vocab_size) * SAMPLES
        for kind, group in ACTIVATION_GROUPS.items():
            target = Path(folder) / kind
            quantize_model(resolve_model(str(dense)), target, kind)
            figures[kind] = measure_quantised(str(target), prompts, device, num_tokens, group)
    return figures


def measure_quantised(
    model: str, prompts: list[list[int]], device: str, num_tokens: int, group: int | None
) -> dict[str, Any]:
    """`measure` with weights kept as they are stored; `group` is as in `round_activations`."""
    sequences, decoded = sample_and_score(model, prompts, device, num_tokens, weights="packed")
    prefilled = score_by_prefill(model, sequences, device, weights="packed")
    exact, theirs = score_by_transformers(model, sequences, device)
    ours = {"decode": distances(decoded, exact), "prefill": distances(prefilled, exact)}
    reference, of_activations = distances(theirs, exact), None
    bound = reference["mean"]
    if group is not None:
        rounded = load_reference(resolve_model(model)).to(device)
        round_activations(rounded, group)
        with torch.inference_mode():
            of_activations = distances(score(rounded, sequences, device), exact)
        bound += of_activations["mean"]
    return {
        "tokens": len(exact),
        "ours": ours,
        "transformers_bfloat16": reference,
        "activations_float8": of_activations,
        "no_worse": {path: mine["mean"] <= bound for path, mine in ours.items()},
    }


def round_activations(model: Any, group: int) -> None:
    """From now on the linear layers within `model`'s blocks read float8, a scale for each `group` inputs; 0: for all.

    A scale makes the largest magnitude 448, the largest float8, as in our kernels.
    """

    def rounded(module: torch.nn.Linear, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = arguments
        groups = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp_min(1e-12)
        return (((groups / scale).to(torch.float8_e4m3fn).float() * scale).view_as(x),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers." in name:
            module.register_forward_pre_hook(rounded)


# --- (4) graphs and overlap ------------------------------------------------------------------------------------------


def equal_modes(model: str, prompts: list[list[int]], device: str, num_tokens: int = 64) -> dict[str, bool]:
    """Whether bfloat16 outputs are equal: greedy and seeded tokens as the graphs draw them, and the bits of
    log-probabilities. Graphs fill steps up to captured sizes, for which a library may choose other kernels: so with
    and without them the bits are compared in deterministic mode.
    """
    kinds = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=num_tokens, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=num_tokens, ignore_eos=True, logprobs=5),
    ]

    def outputs(**settings: Any) -> list[Any]:
        engine = make_engine(model, device, cache="naive", **settings)
        runs = [generate(engine, prompts, [params] * len(prompts)) for params in kinds]
        engine.close()
        return [[[(o.token_ids, o.logprobs) for o in request] for request in run] for run in runs]

    pairs = {name: pair for name, pair in PAIRS.items() if device != "cpu" or "deterministic" not in pair[0]}
    return {name: outputs(**one) == outputs(**other) for name, (one, other) in pairs.items()}


# --- models, engines, requests ---------------------------------------------------------------------------------------


def write_random_model(shape: Path, target: Path, device: str, seed: int = 0) -> None:
    """Write a bfloat16 checkpoint of random weights for the config.json in `shape`.

    Transformers' own start would leave the logits nearly flat: the output head is scaled so that they deviate by
    `LOGIT_DEVIATION`, and norm weights vary, since ones would hide mistakes.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1)
        head = model.get_output_embeddings().weight  # [vocab, hidden]; the embedding too, where they are tied
        head.normal_(0.0, LOGIT_DEVIATION / head.shape[1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(target)


def random_prompts(vocab_size: int) -> list[list[int]]:
    """`ROWS` prompts of 20 to 230 random ids."""
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(20 + 30 * row)] for row in range(ROWS)]


def make_engine(model: str, device: str, **settings: Any) -> Engine:
    """Small enough that several follow each other quickly: `ROWS` requests of 1,024 tokens unless `settings` differ."""
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "weights": "dense",
        "max_running_requests": ROWS,
        "num_pages": ROWS * 64,
    }
    return Engine(EngineConfig(model=model, device=device, **{**fields, **settings}))


def generate(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[TokenOutput]]:
    """Run all to their end, added at once. Raises RuntimeError if one fails."""
    for index, (prompt, how) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(index), prompt, how)
    outputs: list[list[TokenOutput]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            outputs[int(output.request_id)].append(output)
    return outputs


def token_ids(outputs: list[list[TokenOutput]]) -> list[list[int]]:
    return [[token for output in request for token in output.token_ids] for request in outputs]


def chosen_logprobs(outputs: list[list[TokenOutput]]) -> torch.Tensor:
    """Of every token of every request, in order [tokens] float64."""
    entries = [entry for request in outputs for output in request for entry in output.logprobs or []]
    return torch.tensor([entry.logprobs[0] for entry in entries], dtype=torch.float64)


if __name__ == "__main__":
    main()
