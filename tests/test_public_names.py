"""The package's public names, and that a light import stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mini_sglang


def test_every_public_name_is_there_once_used() -> None:
    for name in mini_sglang.__all__:
        assert getattr(mini_sglang, name) is not None
    assert len(set(mini_sglang.__all__)) == len(mini_sglang.__all__)
    assert set(mini_sglang.__all__) <= set(dir(mini_sglang))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = mini_sglang.Llm


@pytest.mark.parametrize(
    "statement",
    [
        "import mini_sglang",
        "from mini_sglang import SamplingParams, EngineConfig, ServerConfig, RequestOutput",
        "import mini_sglang.text.detokenizer, mini_sglang.text.output_processor",
        "from mini_sglang.cli import main\ntry: main(['generate', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_a_light_import_loads_no_torch(statement: str) -> None:
    code = f"{statement}\nimport sys\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0
