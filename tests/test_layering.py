"""Left may import right, never back: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mini_sglang"

# Each part may import what its line names, and itself.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "options": {"config"},
    "sampling_params": {"errors"},
    "outputs": {"errors"},
    "request": {"outputs", "sampling_params"},
    "model_config": set(),
    "child_process": set(),
    "collector": set(),
    "memory": set(),
    "weights.tensor": {"parallel.sharding", "weights.quantized_weight"},
    "weights.quantized_weight": {"parallel.sharding"},
    "parallel.sharding": set(),
    "scheduling": {"config", "errors", "outputs", "request", "sampling_params"},
    "kernels": {"weights.quantized_weight"},
    "attention": {"kernels"},
    "parallel": {"kernels"},
    "layers": {
        "attention.base",
        "kernels.interface",
        "model_config",
        "parallel",
        "weights.arriving_matrix",
        "weights.quantized_weight",
        "weights.tensor",
    },
    "models": {"kernels.interface", "layers", "model_config", "weights.tensor"},
    "weights": {"config", "errors", "model_config", "parallel.sharding"},
    "execution": {
        "attention",
        "child_process",
        "config",
        "kernels",
        "layers",
        "memory",
        "model_config",
        "models",
        "outputs",
        "parallel",
        "sampling_params",
        "scheduling.batch",
        "scheduling.step_cost",
        "weights",
    },
    "text.template_bounds": set(),
    "text.tokenizer": {"errors", "text.template_bounds", "weights"},
    "text.json_types": set(),
    "text.notation": {"text.json_types"},
    "text.notations": {"text.notation"},
    "text.template_format": {"errors", "text.notation", "text.notations"},
    "text": {"errors", "outputs", "sampling_params"},
    "observability": {"config", "outputs", "scheduling"},
    "grammar": {
        "child_process",
        "errors",
        "sampling_params",
        "text.json_types",
        "text.notation",
        "text.tokenizer",
    },
    "engine": {
        "collector",
        "config",
        "errors",
        "execution",
        "grammar",
        "observability",
        "outputs",
        "request",
        "sampling_params",
        "scheduling",
        "text.tokenizer",
        "weights",
    },
    "ipc": set(),
    "ipc.messages": {"config", "outputs", "sampling_params", "scheduling"},
    "ipc.launch": {"config", "ipc.messages"},
    "ipc.kv_events": {"config", "observability.cache_events"},
    "ipc.engine_process": {
        "child_process",
        "collector",
        "config",
        "engine",
        "errors",
        "execution.resolve",
        "ipc.kv_events",
        "ipc.messages",
        "observability.cache_events",
    },
    "ipc.async_engine": {
        "collector",
        "config",
        "errors",
        "grammar.checker",
        "grammar.compiler",
        "ipc.launch",
        "ipc.messages",
        "outputs",
        "sampling_params",
        "scheduling",
        "text",
        "weights",
    },
    "turns": set(),
    "llm": {
        "config",
        "engine",
        "errors",
        "outputs",
        "sampling_params",
        "scheduling.speculation",
        "text",
        "turns",
        "weights",
    },
    "verify": {"config", "llm", "model_config", "sampling_params", "text.tokenizer", "weights"},
    "quantize": {"weights"},
    "chat": {"llm", "outputs", "sampling_params"},
    "bench": {
        "attention",
        "config",
        "engine",
        "kernels",
        "model_config",
        "observability.step_log",
        "options",
        "request",
        "sampling_params",
        "scheduling",
        "text.tokenizer",
        "weights",
    },
    "routing": set(),
    "simulate": {
        "bench",
        "config",
        "errors",
        "observability.step_log",
        "options",
        "outputs",
        "request",
        "routing",
        "sampling_params",
        "scheduling",
    },
    "server": {
        "cli",
        "collector",
        "config",
        "errors",
        "grammar.calls",
        "grammar.compiler",
        "ipc.async_engine",
        "ipc.launch",
        "ipc.messages",
        "outputs",
        "sampling_params",
        "scheduling",
        "text.json_types",
        "text.notation",
        "text.notations",
        "text.template_format",
        "text.conversation",
        "text.detokenizer",
        "text.tokenizer",
        "text.tool_prompt",
        "weights",
    },
    "ray_serve": set(),
    "ray_serve.in_process": set(),
    "ray_serve.router": {"ray_serve.in_process", "routing"},
    "ray_serve.combined": set(),
    "ray_serve.model_choice": {"ray_serve.combined", "ray_serve.in_process"},
    "ray_serve.replica": {
        "config",
        "ipc.async_engine",
        "ray_serve.combined",
        "ray_serve.in_process",
        "server.app",
        "server.config",
    },
    "ray_serve.ingress": {
        "ray_serve.combined",
        "ray_serve.in_process",
        "ray_serve.model_choice",
        "ray_serve.replica",
        "server.answering",
        "server.anthropic.format",
        "server.errors",
    },
    "deploy": {"config", "options", "ray_serve", "server.config", "server.context", "server.run"},
    "learn": {"llm", "options", "sampling_params", "weights"},
    "cli": {
        "bench",
        "chat",
        "config",
        "deploy",
        "execution",
        "learn",
        "llm",
        "options",
        "parallel",
        "quantize",
        "sampling_params",
        "server",
        "simulate",
        "verify",
        "weights",
    },
}
TORCH_FREE = [
    *(
        "errors",
        "sampling_params",
        "outputs",
        "request",
        "config",
        "options",
        "model_config",
        "scheduling",
        "routing",
        "simulate",
        "grammar",
        "ipc.messages",
        "server",
        "learn",
    ),
    *("text", "observability.step_log", "observability.cache_events", "ipc.kv_events"),
]


def part_of(module: str) -> str:
    """The most specific key of ALLOWED that `module` (without the package name) falls under."""
    names = [key for key in ALLOWED if module == key or module.startswith(f"{key}.")]
    return max(names, key=len, default=module.split(".")[0])


PACKAGES = {".".join(path.parent.relative_to(PACKAGE.parent).parts) for path in PACKAGE.rglob("__init__.py")}


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name != "mini_sglang"]  # for its version
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module in PACKAGES:  # of the top one: public names, which only say where they live
                names += [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
            else:
                names.append(node.module or "")
    return names


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.name.startswith("__"))


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(module_of(path))
    assert part in ALLOWED, f"{path} belongs to no known part"
    for name in imports_of(path):
        if name.startswith("mini_sglang"):
            target = name.removeprefix("mini_sglang").removeprefix(".")
            allowed = ALLOWED[part] | {part}
            assert any(target == key or target.startswith(f"{key}.") for key in allowed), (
                f"{module_of(path)} imports {name}; {part} may import {sorted(allowed)}"
            )


@pytest.mark.parametrize("path", [path for path in MODULES if part_of(module_of(path)) in TORCH_FREE], ids=module_of)
def test_these_never_import_torch(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"]


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        module_of(path)
        for path in MODULES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent
