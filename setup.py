"""Compiles the C kernels into the wheel, where there is a compiler; all else is in pyproject.toml.

OUTRIDER_COMPILE=0 leaves that to the first use.  A development install (pip install -e) does, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))
from outrider.backends.cpu.build import COMPILED, build_all
from outrider.backends.cpu.compiler import BuildError, find_compiler


def compiles() -> bool:
    """Whether kernels are compiled into the wheel.  Without them it is one for every kind of machine."""
    if os.environ.get("OUTRIDER_COMPILE") == "0":
        return False
    try:
        find_compiler(os.environ)
    except BuildError as error:
        print(f"The C kernels are not compiled, which is tried again on first use: {error}")
        return False
    return True


COMPILES = compiles()


class BuildPackage(build_py):
    def run(self) -> None:
        super().run()
        if COMPILES and not self.editable_mode:
            build_all(Path(self.build_lib, *COMPILED.parts[-4:]), os.environ)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python, since the kernels do not call it."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return COMPILES


setup(
    cmdclass={"build_py": BuildPackage, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
