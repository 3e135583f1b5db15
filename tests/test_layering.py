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
    "models.config": set(),
    "weights.tensor": set(),
    "scheduling": {"request", "config"},
    "kernels": {"weights.tensor"},
    "attention": {"kernels"},
    "sharding": set(),
    "direct_sum": {"kernels"},
    "parallel": {"sharding", "direct_sum"},
    "lifetime": set(),
    "layers": {"kernels", "attention.base", "models.config", "weights.tensor", "parallel", "sharding"},
    "models": {"layers", "attention.base", "kernels.base", "weights.tensor"},
    "weights": {"models.config"},
    "execution": {
        "kernels",
        "models",
        "layers.placement",
        "weights",
        "attention",
        "scheduling.batch",
        "request",
        "config",
        "parallel",
        "sharding",
        "lifetime",
    },
    "tokenizer": {"weights.hub", "weights.gguf_file", "weights.gguf_tokenizer", "weights.model_config"},
    "step_log": {"request"},
    "profiler": set(),
    "observer": {"profiler", "request", "scheduling", "step_log"},
    "grammar_ending": set(),
    "structured_output": {"grammar_ending", "request", "tokenizer"},
    "grammar_masks": {"structured_output", "request"},
    "grammar_check": {"lifetime", "structured_output", "request"},
    "detokenizer": {"tokenizer"},
    "output_processor": {"tokenizer", "detokenizer", "request"},
    "engine": {
        "config",
        "request",
        "scheduling",
        "execution",
        "grammar_masks",
        "observer",
        "step_log",
        "structured_output",
        "tokenizer",
        "weights.hub",
    },
    "messages": {"request", "config", "scheduling"},
    "engine_process": {"engine", "lifetime", "messages", "config"},
    "async_engine": {
        "messages",
        "config",
        "request",
        "scheduling",
        "output_processor",
        "tokenizer",
        "weights.hub",
        "grammar_check",
        "structured_output",
    },
    "llm": {"engine", "config", "request", "output_processor", "tokenizer", "weights.hub"},
    "verify": {"llm", "config", "request", "models", "tokenizer", "weights"},
    "chat": {"llm", "request"},
    "benchmark": {
        "engine",
        "scheduling",
        "config",
        "request",
        "models.config",
        "weights",
        "attention",
        "kernels",
        "tokenizer",
        "step_log",
    },
    "server": {
        "scheduling.scheduler",
        "async_engine",
        "config",
        "request",
        "structured_output",
        "tokenizer",
        "messages",
        "weights.hub",
        "cli",
    },
    "learn": {"llm", "request", "weights.hub"},
    "cli": {
        "config",
        "benchmark",
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
    *("request", "config", "scheduling", "detokenizer", "messages", "server", "learn"),
    *("structured_output", "grammar_ending", "grammar_masks", "grammar_check", "step_log"),
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
