"""Left may import right, never back: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mini_sglang"

# Each part may import what its line names, and itself.
ALLOWED: dict[str, set[str]] = {
    "request": set(),
    "config": set(),
    "model_config": set(),
    "child_process": set(),
    "weights.tensor": set(),
    "parallel.sharding": set(),
    "scheduling": {"request", "config"},
    "kernels": {"weights.tensor"},
    "attention": {"kernels"},
    "parallel": {"kernels"},
    "layers": {"kernels", "attention.base", "model_config", "weights.tensor", "parallel"},
    "models": {"layers", "model_config", "attention.base", "kernels.interface", "weights.tensor"},
    "weights": {"model_config"},
    "execution": {
        "kernels",
        "model_config",
        "models",
        "layers.placement",
        "weights",
        "attention",
        "scheduling.batch",
        "request",
        "config",
        "parallel",
        "child_process",
    },
    "text.tokenizer": {"weights.hub", "weights.gguf_file", "weights.gguf_tokenizer", "weights.gguf_config"},
    "text": {"request"},
    "observability": {"request", "scheduling"},
    "grammar": {"child_process", "request", "text.tokenizer"},
    "engine": {
        "config",
        "request",
        "scheduling",
        "execution",
        "grammar",
        "observability",
        "text.tokenizer",
        "weights.hub",
    },
    "ipc": set(),
    "ipc.messages": {"request", "config", "scheduling"},
    "ipc.engine_process": {"engine", "child_process", "ipc.messages", "config"},
    "ipc.async_engine": {
        "ipc.messages",
        "config",
        "request",
        "scheduling",
        "text",
        "weights.hub",
        "grammar.checker",
        "grammar.compiler",
    },
    "llm": {"engine", "config", "request", "text", "weights.hub"},
    "verify": {"llm", "config", "request", "model_config", "models", "text.tokenizer", "weights"},
    "chat": {"llm", "request"},
    "bench": {
        "engine",
        "scheduling",
        "config",
        "request",
        "model_config",
        "weights",
        "attention",
        "kernels",
        "text.tokenizer",
        "observability.step_log",
    },
    "server": {
        "scheduling.scheduler",
        "ipc.async_engine",
        "ipc.messages",
        "config",
        "request",
        "grammar.compiler",
        "text.tokenizer",
        "weights.hub",
        "cli",
    },
    "learn": {"llm", "request", "weights.hub"},
    "cli": {
        "config",
        "bench",
        "chat",
        "execution",
        "learn",
        "llm",
        "parallel",
        "request",
        "server",
        "verify",
        "weights",
    },
}
TORCH_FREE = [
    *("request", "config", "model_config", "scheduling", "grammar", "ipc.messages", "server", "learn"),
    *("text", "observability.step_log"),
]


def part_of(module: str) -> str:
    """The most specific key of ALLOWED that `module` (without the package name) falls under."""
    names = [key for key in ALLOWED if module == key or module.startswith(f"{key}.")]
    return max(names, key=len, default=module.split(".")[0])


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if alias.name != "mini_sglang"]  # for its version
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "mini_sglang":  # the public names, which only say where they live
                names += [f"mini_sglang.{alias.name}" for alias in node.names if alias.name != "__version__"]
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
