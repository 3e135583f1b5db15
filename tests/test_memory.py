"""What of a machine's memory a program may take."""

from __future__ import annotations

from pathlib import Path

from mini_sglang.memory import available_memory


def test_available_is_what_machine_and_container_both_allow(tmp_path: Path) -> None:
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:       32 kB\n")
    assert available_memory(meminfo, group) == 32 << 10
    group.mkdir()
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(meminfo, group) == 32 << 10
    (group / "memory.max").write_text("5000\n")
    assert available_memory(meminfo, group) == 4000
