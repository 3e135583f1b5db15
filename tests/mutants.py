"""What the tests notice: a module without one of its statements has to fail the tests that own it.

    python -m tests.mutants --jobs 8 --out /tmp/mutants

Statements of functions are removed one at a time: assignments, calls, `del`, `raise`, `return`, `break`, `continue`;
not declarations (fields, constants, docstrings), assertions for the type checker, nor log messages. A removal that
nothing notices is a missing test, or a statement that can go, or has its reason in mutants.toml. (mutmut and cosmic-ray
change operators and values; neither removes statements.)

Each removal is tried in a process of its own, forked from this one, in which the slow imports are done. It compiles one
module without the statement, runs the quickest tests first, and ends with the first that fails. Random tests draw the
same examples each time. An endless loop ends at a limit of processor time, and counts as noticed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import TypedDict

import pytest

from tests.learn.warm_process import SLOW_IMPORTS

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")

_SCHEDULING = ("tests/scheduling",)
_SAMPLING = ("tests/execution/test_request_table.py", "tests/execution/test_sampler.py")
_ON_DEVICE = ("tests/execution/test_device_sampler.py", "tests/execution/test_model_runner.py")
_ANSWERS = ("tests/server/answers", "tests/server/test_chat_tools.py", "tests/server/test_chat_reasoning.py")
_PROMPTS = ("tests/text/test_tool_prompt.py", *_ANSWERS)
# The tests that own each module.
OWNERS: dict[str, tuple[str, ...]] = {
    **{
        f"mini_sglang.scheduling.{name}": _SCHEDULING
        for name in ("batch", "kv_cache", "page_allocator", "policy", "radix_cache", "scheduler", "simulation")
    },
    "mini_sglang.execution.request_table": (*_SAMPLING, *_ON_DEVICE),
    "mini_sglang.execution.sampler": (*_SAMPLING, *_ON_DEVICE),
    "mini_sglang.execution.device_sampler": _ON_DEVICE,
    "mini_sglang.text.detokenizer": ("tests/text/test_detokenizer.py",),
    "mini_sglang.text.output_processor": ("tests/text/test_output_processor.py",),
    "mini_sglang.text.notation": _PROMPTS,
    "mini_sglang.text.template_format": _PROMPTS,
    "mini_sglang.text.tool_prompt": _PROMPTS,
    **{f"mini_sglang.server.answers.{name}": _ANSWERS for name in ("arguments", "deltas", "model_format", "reader")},
}
LEAST_CAUGHT = 0.95

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
_LIMIT_S = 900  # of one process, for tests that wait for what never comes
_TEST_CPU_S = 8  # of one test beside ten times what it takes of itself
_MEMORY = 4 << 30  # bytes, beside what the imports hold


@dataclass(frozen=True, order=True)
class Removal:
    """One statement that is taken away."""

    module: str
    function: str
    statement: str  # in one line
    occurrence: int = 1  # among equal statements of the function, from the top

    def __str__(self) -> str:
        nth = f" (number {self.occurrence} of these)" if self.occurrence > 1 else ""
        return f"{self.module}: {self.function}: {self.statement}{nth}"


@dataclass
class Outcome:
    """What the tests made of a module without one of its statements."""

    removal: Removal
    line: int
    verdict: str = "survived"  # "caught", "endless", "survived"
    by: str = ""  # the test that failed
    seconds: float = 0.0


# -- statements -------------------------------------------------------------------------------------------------------


def removals(module: str, source: str) -> dict[Removal, int]:
    """Every statement of a module that can be removed, with its line."""
    found: dict[Removal, int] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for function, holder, place in _statements(ast.parse(source), (), False):
        text = ast.unparse(holder[place])
        seen[function, text] += 1
        found[Removal(module, function, text, seen[function, text])] = holder[place].lineno
    return found


def without(removal: Removal, source: str) -> ast.Module:
    """The module in which the statement is a `pass`. Raises KeyError if the module does not hold it."""
    tree = ast.parse(source)
    left = removal.occurrence
    for function, holder, place in _statements(tree, (), False):
        if function == removal.function and ast.unparse(holder[place]) == removal.statement:
            left -= 1
            if left == 0:
                holder[place] = ast.copy_location(ast.Pass(), holder[place])
                return tree
    raise KeyError(str(removal))


def _statements(node: ast.AST, scope: tuple[str, ...], in_function: bool) -> Iterator[tuple[str, list[ast.stmt], int]]:
    """(function, the block that holds the statement, its place there)"""
    for _, block in ast.iter_fields(node):
        if not isinstance(block, list):
            continue
        for place, child in enumerate(list(block)):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _statements(child, (*scope, child.name), not isinstance(child, ast.ClassDef))
            elif in_function and _is_removable(child):
                yield ".".join(scope), block, place
            elif isinstance(child, ast.AST):
                yield from _statements(child, scope, in_function)


def _is_removable(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.AnnAssign(value=None):
            return False
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "_logger" | "logging")))):
            return False
    kinds = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Delete | ast.Raise | ast.Return
    return isinstance(node, kinds | ast.Break | ast.Continue)


def read_listed(path: Path = LIST) -> dict[Removal, str]:
    """The removals that are known to pass unnoticed, each with the reason."""
    listed = {}
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("survivor", []):
        reason = entry.pop("reason")
        listed[Removal(**{**entry, "module": f"mini_sglang.{entry['module']}"})] = reason
    return listed


def source_of(module: str) -> str:
    return _path_of(module).read_text(encoding="utf-8")


def _path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


# -- one process ------------------------------------------------------------------------------------------------------


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, without a statement."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self._module = module
        self._tree = tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        file = str(_path_of(fullname))
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, file, self._tree))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, tree: ast.Module) -> None:
        super().__init__(fullname, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec")


class _Watch:
    """A pytest plugin: the quickest tests first, each under a limit of processor time, and what came of them."""

    def __init__(self, durations: Mapping[str, float]) -> None:
        self._known = durations
        self.durations: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._known:  # what fails when nothing is removed says nothing
            items[:] = sorted(
                (item for item in items if item.nodeid in self._known), key=lambda item: self._known[item.nodeid]
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        # nobody handles the signal, so it ends the process, whatever that is doing
        signal.setitimer(signal.ITIMER_PROF, _TEST_CPU_S + 10 * self._known.get(nodeid, _LIMIT_S))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] = self.durations.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)


class _Tested(TypedDict):
    """What a process says when it ends by itself."""

    status: int  # pytest's; 0: all tests passed
    failed: list[str]
    durations: dict[str, float]  # seconds
    modules: list[str]  # all that was imported but for the package, its tests and pytest's plugins


@dataclass(frozen=True)
class _Ended:
    number: int  # of the work that the process did
    tested: _Tested | None
    signal: int  # that ended the process, or 0
    seconds: float


def _test(removal: Removal | None, source: str, owners: Sequence[str], durations: Mapping[str, float]) -> _Tested:
    """Run the owners' tests on the package without the statement, in a process that is there for nothing else."""
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutants")
    if removal is not None:
        sys.meta_path.insert(0, _Finder(removal.module, without(removal, source)))
    watch = _Watch(durations)
    only_first = ["--exitfirst"] if removal is not None else []
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*owners, *only_first, *plugins, "--tb=short"], [watch])
    own = ("__main__", "conftest", "mini_sglang", "tests")
    modules = [name for name in sys.modules if name.partition(".")[0] not in own]
    return {"status": int(status), "failed": watch.failed, "durations": watch.durations, "modules": modules}


def _fork(work: Callable[[], _Tested], folder: Path) -> int:
    """Run `work` in a forked process that writes what it returns to result.json and what it prints to output."""
    pid = os.fork()
    if pid:
        return pid
    try:
        gc.freeze()  # pytest collects garbage, and would look for some in all that was imported
        os.setsid()
        for standard in (1, 2):
            os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, 60)  # until the first test begins
        (folder / "result.json").write_text(json.dumps(work()))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _run_all(works: Iterable[Callable[[], _Tested]], jobs: int, folder: Path) -> Iterator[_Ended]:
    """Run each of `works` in a process of its own, `jobs` at a time; gives out the processes as they end."""
    waiting = enumerate(works)
    running: dict[int, tuple[int, float, Path]] = {}  # by process id: number, start, folder
    while True:
        while len(running) < jobs and (next_one := next(waiting, None)):
            number, work = next_one
            place = folder / str(number)
            place.mkdir()
            running[_fork(work, place)] = (number, time.monotonic(), place)
        if not running:
            return
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for late in [pid for pid, (_, start, _) in running.items() if time.monotonic() - start > _LIMIT_S]:
                os.kill(late, signal.SIGKILL)
            time.sleep(0.02)
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have started
        number, start, place = running.pop(pid)
        result = place / "result.json"
        tested: _Tested | None = json.loads(result.read_text()) if result.exists() and not status else None
        yield _Ended(number, tested, os.WTERMSIG(status), time.monotonic() - start)


# -- all of them ------------------------------------------------------------------------------------------------------


def measure(modules: Sequence[str], jobs: int, folder: Path) -> dict[tuple[str, ...], dict[str, float]]:
    """Seconds of each test that passes when nothing is removed, by owners. Names those that fail.

    What the tests import beside the package is imported here too, so that no later process need do it.
    """
    groups = sorted({OWNERS[module] for module in modules})
    measured, imported = {}, set()
    for ended in _run_all([partial(_test, None, "", owners, {}) for owners in groups], jobs, folder):
        owners, tested = groups[ended.number], ended.tested
        passed = {test: s for test, s in tested["durations"].items() if test not in tested["failed"]} if tested else {}
        if tested is None or not passed:
            output = (folder / str(ended.number) / "output").read_text(errors="replace")
            raise RuntimeError(f"no test of {owners} passes: signal {ended.signal}\n{output}")
        for test in tested["failed"]:
            print(f"left out, since it fails with nothing removed: {test}", flush=True)
        measured[owners] = passed
        imported.update(tested["modules"])
    for name in sorted(imported - sys.modules.keys()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return measured


def try_all(chosen: Mapping[Removal, int], jobs: int) -> list[Outcome]:
    """Remove each of these statements and run the tests that own its module."""
    outcomes = [Outcome(removal, line) for removal, line in chosen.items()]
    sources = {removal.module: source_of(removal.module) for removal in chosen}
    with tempfile.TemporaryDirectory() as name:
        plain, broken = Path(name, "plain"), Path(name, "broken")
        plain.mkdir()
        broken.mkdir()
        measured = measure(sorted({removal.module for removal in chosen}), jobs, plain)
        works = []
        for removal in chosen:
            owners = OWNERS[removal.module]
            works.append(partial(_test, removal, sources[removal.module], owners, measured[owners]))
        for ended in _run_all(works, jobs, broken):
            outcome = outcomes[ended.number]
            outcome.seconds = round(ended.seconds, 1)
            if ended.signal:
                outcome.verdict, outcome.by = "endless", f"signal {ended.signal}"
            elif ended.tested is None:
                output = (broken / str(ended.number) / "output").read_text(errors="replace")
                raise RuntimeError(f"no result without {outcome.removal}:\n{output}")
            elif ended.tested["status"]:
                outcome.verdict, outcome.by = "caught", next(iter(ended.tested["failed"]), "")
            else:
                print(f"unnoticed: {outcome.removal} (line {outcome.line})", flush=True)
    return outcomes


def report(outcomes: Sequence[Outcome], listed: Mapping[Removal, str]) -> tuple[str, bool]:
    """A table by module and all that is not as the list says; and whether all is well."""
    lines = ["", f"{'module':42} removed caught endless listed unlisted"]
    groups = [(module, [o for o in outcomes if o.removal.module == module]) for module in OWNERS]
    for module, group in [*[pair for pair in groups if pair[1]], ("all", list(outcomes))]:
        verdicts = Counter(outcome.verdict for outcome in group)
        known = sum(outcome.verdict == "survived" and outcome.removal in listed for outcome in group)
        lines.append(
            f"{module.removeprefix('mini_sglang.'):42} {len(group):7} {verdicts['caught']:6} {verdicts['endless']:7} "
            f"{known:6} {verdicts['survived'] - known:8}"
        )
    survived = {outcome.removal for outcome in outcomes if outcome.verdict == "survived"}
    caught = {outcome.removal: outcome.by for outcome in outcomes if outcome.verdict != "survived"}
    share = len(caught) / max(len(outcomes), 1)
    unlisted = [f"no test notices, and no reason is listed: {removal}" for removal in survived if removal not in listed]
    outdated = [f"listed, but noticed by {caught[removal]}: {removal}" for removal in listed if removal in caught]
    gone = [f"listed, but not there any more: {removal}" for removal in gone_from(listed)]
    lines += ["", *sorted(unlisted), *outdated, *gone, f"{share:.1%} noticed; the least is {LEAST_CAUGHT:.0%}"]
    return "\n".join(lines), not (unlisted or outdated or gone) and share >= LEAST_CAUGHT


def gone_from(listed: Iterable[Removal]) -> list[Removal]:
    """Those of the list that the source does not have."""
    there = {removal for module in OWNERS for removal in removals(module, source_of(module))}
    return [removal for removal in listed if removal not in there]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--only", default="", help="modules or functions whose name contains this")
    parser.add_argument("--sample", type=int, help="this many, drawn at random, the same each time")
    parser.add_argument("--again", type=Path, help="those that survived, by this results.json of another run")
    parser.add_argument("--unlisted", action="store_true", help="leave out what mutants.toml lists")
    parser.add_argument("--out", type=Path, help="folder for results.json")
    options = parser.parse_args(arguments)
    listed = read_listed()
    chosen = {removal: line for module in OWNERS for removal, line in removals(module, source_of(module)).items()}
    chosen = {
        removal: line
        for removal, line in chosen.items()
        if options.only in f"{removal.module}.{removal.function}" and not (options.unlisted and removal in listed)
    }
    if options.again is not None:
        survived = {
            Removal(**o["removal"]) for o in json.loads(options.again.read_text()) if o["verdict"] == "survived"
        }
        chosen = {removal: line for removal, line in chosen.items() if removal in survived}
    if options.sample is not None:
        kept = random.Random(0).sample(sorted(chosen), min(options.sample, len(chosen)))
        chosen = {removal: chosen[removal] for removal in kept}
    if not chosen:
        parser.error("no statement of a function is left")
    os.environ.update(_ENVIRONMENT)
    os.chdir(ROOT)
    for name in (*SLOW_IMPORTS, "hypothesis.stateful"):
        importlib.import_module(name)
    outcomes = try_all(chosen, options.jobs)
    text, is_well = report(outcomes, listed)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        results = json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False)
        (options.out / "results.json").write_text(results + "\n", encoding="utf-8")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
