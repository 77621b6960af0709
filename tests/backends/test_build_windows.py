"""What the build of the C kernels does otherwise on Windows, tried on this system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from outrider.backends.cpu import build, compiler, targets
from outrider.backends.cpu.compiler import BuildError


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WINDOWS", True)


# ---- the cache


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's profile."""
    folder = tmp_path / "profile"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.usefixtures("windows")
def test_the_cache_is_in_local_application_data(profile: Path) -> None:
    local = profile / "AppData" / "Local"
    assert build.cache_folder({}) == local / "outrider"
    assert build.cache_folder({"LOCALAPPDATA": str(profile / "own")}) == profile / "own" / "outrider"
    assert build.cache_folder({"OUTRIDER_CACHE": str(profile / "a")}) == profile / "a"


@pytest.mark.usefixtures("windows")
def test_a_cache_out_of_the_profile_is_not_used(profile: Path, tmp_path: Path) -> None:
    """Other folders may be writable by every user."""
    (profile / "link").symlink_to(tmp_path)
    for folder in (tmp_path / "public", profile / "link" / "public", profile / ".." / "public"):
        with pytest.raises(BuildError, match="is not in the user's profile"):
            build.cache_folder({"OUTRIDER_CACHE": str(folder)})


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("same", [True, False])
def test_a_loaded_library_is_not_replaced(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = build.keep(b"library", tmp_path, "kernels-a-b")
    if not same:
        kept.write_bytes(b"damaged")

    def in_use(source: str, target: Path) -> None:
        raise PermissionError(13, "The process cannot access the file", str(target))

    monkeypatch.setattr(os, "replace", in_use)
    if same:
        assert build.keep(b"library", tmp_path, "kernels-a-b") == kept
    else:
        with pytest.raises(PermissionError):
            build.keep(b"library", tmp_path, "kernels-a-b")
    assert [*tmp_path.iterdir()] == [kept]


# ---- the compiler


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (r"C:\mingw\bin\gcc.exe", [r"C:\mingw\bin\gcc.exe"]),
        (r'"C:\Program Files\LLVM\bin\clang.exe" -O2', [r"C:\Program Files\LLVM\bin\clang.exe", "-O2"]),
        ("ccache gcc", ["ccache", "gcc"]),
        ("", []),
    ],
)
def test_words_of_a_command(command: str, words: list[str]) -> None:
    assert compiler.split(command, windows=True) == words


@pytest.mark.parametrize(("name", "flags"), [("gcc", ["-Wa,-muse-unaligned-vector-move"]), ("clang", [])])
def test_gcc_moves_vectors_unaligned(name: str, flags: list[str]) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    assert compiler.windows_flags([name]) == flags


def test_a_compiler_for_microsofts_libraries_is_refused(tmp_path: Path) -> None:
    fake = tmp_path / "clang"
    fake.write_text("#!/bin/sh\necho '#define _MSC_VER 1929'\n")
    fake.chmod(0o700)
    with pytest.raises(BuildError, match="need gcc or clang of MinGW"):
        compiler.windows_flags([str(fake)])


# ---- the processor


@pytest.mark.skipif(not targets.CPUINFO.exists(), reason="no list of features here")
@pytest.mark.skipif(not hasattr(torch.cpu, "get_capabilities"), reason="torch does not list features")
def test_torch_finds_the_features_that_linux_lists() -> None:
    needed = frozenset[str]().union(*(target.needs for target in targets.TARGETS.values()))
    assert targets.torch_features() == targets.processor() & needed - targets.AMX


@pytest.mark.parametrize(("level", "features"), [("DEFAULT", frozenset()), ("AVX512", targets.LEVELS["v4"])])
def test_older_versions_of_torch_know_a_level(
    level: str, features: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    assert targets.torch_features() == features


def test_windows_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.platform, "system", lambda: "Windows")
    monkeypatch.setattr(targets, "torch_features", lambda: targets.AVX2)
    assert targets.processor() == targets.AVX2
