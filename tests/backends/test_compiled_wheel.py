"""The libraries of C kernels that are compiled with a wheel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kernel_cases import needs_c

from outrider.backends.cpu import build, targets
from outrider.backends.cpu.compiler import BuildError
from outrider.backends.cpu.targets import Target

PORTABLE, FAST = Target((), frozenset()), Target(("-O1",), frozenset(("fast",)))
UNKNOWN = Target(("-mno-compiler-knows-it",), frozenset(("unknown",)))


@pytest.fixture(autouse=True)
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel whose kernels are one small function, for three instruction sets."""
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }\n")
    sets = {"portable": PORTABLE, "fast": FAST, "unknown": UNKNOWN}
    monkeypatch.setattr(build, "SOURCES", [source])
    monkeypatch.setattr(build, "COMPILED", tmp_path / "compiled")
    monkeypatch.setattr(targets, "TARGETS", sets)
    return tmp_path / "compiled"


def have(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(targets, "processor", lambda: frozenset(features))


@needs_c
def test_the_best_library_of_the_wheel_is_loaded_without_a_compiler(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.build_all(compiled, os.environ)
    assert "C kernels for unknown are left out" in capsys.readouterr().out
    assert len([*compiled.iterdir()]) == 2
    for path in compiled.iterdir():
        path.chmod(0o664)  # as pip leaves it where groups are of one user
    bare = {"PATH": "", "OUTRIDER_CACHE": str(tmp_path / "cache")}
    names = list[str]()
    for features in ((), ("fast",)):
        have(monkeypatch, *features)
        library = build.load(build.recipe(bare), bare)
        assert library is not None and library.answer() == 42
        names.append(library._name)
    assert names[0] != names[1] and all(Path(name).parent == compiled for name in names)
    assert not (tmp_path / "cache").exists()
    have(monkeypatch, "fast", "unknown")
    assert build.load(build.recipe(bare), bare) is None


@pytest.fixture
def wheel(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a wheel's libraries, built for processors without any of the features."""
    have(monkeypatch)
    build.build_all(compiled, os.environ)
    return compiled


@needs_c
def test_a_given_compiler_or_flag_builds_its_own_library(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for i, given in enumerate(({"CC": "cc"}, {"OUTRIDER_CFLAGS": "-O1"})):
        environment = {**os.environ, "OUTRIDER_CACHE": str(cache), **given}
        assert build.load(build.recipe(environment), environment) is not None
        assert len([*cache.iterdir()]) == i + 1


@needs_c
def test_a_damaged_library_of_the_wheel_is_not_loaded(wheel: Path, tmp_path: Path) -> None:
    for path in wheel.iterdir():
        path.write_bytes(b"")
    bare = {"PATH": "", "OUTRIDER_CACHE": str(tmp_path / "cache")}
    assert build.load(build.recipe(bare), bare) is None


def test_without_a_compiler_a_wheel_has_no_libraries(compiled: Path) -> None:
    with pytest.raises(BuildError, match="no C compiler found"):
        build.build_all(compiled, {"PATH": ""})
