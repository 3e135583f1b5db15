"""Everything is said in pyproject.toml but this: the course lies beside the package, and in a wheel it lies inside."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithCourse(build_py):
    """Also copies course/ to where `mini_sglang.learn.lesson` finds it in an installed package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "mini_sglang" / "course"
            shutil.copytree("course", target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithCourse})
