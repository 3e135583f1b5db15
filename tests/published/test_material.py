"""Artefacts are fetched once, by the registries' clients, and are those that were pinned; others are a skip."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path
from typing import Literal

import pytest

from tests.published.material import Package, fetched


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A wheel in a folder that pip takes its packages from, and an empty cache."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "tiny_artefact-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/kept.txt", "kept")
        archive.writestr("other/left.txt", "left")
        archive.writestr(
            "tiny_artefact-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-artefact\nVersion: 1.0\n"
        )
        archive.writestr("tiny_artefact-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_artefact-1.0.dist-info/RECORD", "")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(shelf), "MINI_SGLANG_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    return Package("tiny-artefact", "1.0", "wheel", hashlib.sha256(wheel.read_bytes()).hexdigest(), ("tiny/",))


def test_members_are_unpacked_once(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetched(package)
    assert [str(path.relative_to(folder)) for path in folder.rglob("*.txt")] == ["tiny/kept.txt"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetched(dataclasses.replace(package)) == folder


def test_another_file_than_the_pinned_one_is_an_error(package: Package) -> None:
    with pytest.raises(ValueError, match=r"tiny_artefact-1\.0-py3-none-any\.whl .* has SHA-256 .*, expected 0000"):
        fetched(dataclasses.replace(package, sha256="0000"))


@pytest.mark.parametrize(
    ("version", "kind", "reason"),
    [
        ("2.0", "wheel", r"tiny-artefact 2\.0 could not be fetched: ERROR: No matching distribution"),
        ("1.0", "npm", "npm is not there, which fetches tiny-artefact"),
    ],
)
def test_what_cannot_be_had_skips_with_the_reason(
    package: Package, monkeypatch: pytest.MonkeyPatch, version: str, kind: Literal["wheel", "npm"], reason: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match=reason):
        fetched(dataclasses.replace(package, version=version, kind=kind))
