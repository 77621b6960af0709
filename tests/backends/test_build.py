"""The library of C kernels: what is loaded from the cache, what is built again, and failures of both."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.backends.cpu import build, targets
from outrider.backends.cpu.build import Recipe
from outrider.backends.cpu.compiler import BuildError
from outrider.errors import ConfigError

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
needs_c = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


@pytest.fixture
def small(tmp_path: Path) -> Recipe:
    """A library of one function, which is built in no time."""
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }\n")
    return Recipe((source,), ("-shared", "-fPIC"), "0123456789abcdef")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level("INFO", "outrider"):
        yield caplog


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "OUTRIDER_CACHE": str(cache), **more}


def works(library: ctypes.CDLL | None) -> bool:
    return library is not None and library.answer() == 42


def only(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


# ---- what happens where all is well


@needs_c
def test_library_is_built_once_and_logged(
    small: Recipe, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert works(build.load(small, environment(cache)))
    assert "building the C kernels" in caplog.text
    first = only(cache).stat()
    caplog.clear()
    assert works(build.load(small, environment(cache)))
    assert not caplog.text and only(cache).stat() == first


@needs_c
def test_folder_and_file_are_private(small: Recipe, cache: Path) -> None:
    build.load(small, environment(cache))
    assert cache.stat().st_mode & 0o777 == 0o700 and only(cache).stat().st_mode & 0o777 == 0o600


@needs_c
def test_another_command_builds_its_own_library(small: Recipe, cache: Path) -> None:
    for command in (f"{COMPILER}", f"{COMPILER} -DOTHER"):
        assert works(build.load(small, environment(cache, CC=command)))
    assert len(list(cache.iterdir())) == 2


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    base = tmp_path / "base"
    assert build.cache_folder({"OUTRIDER_CACHE": str(tmp_path / "a/b"), "XDG_CACHE_HOME": str(base)}) == (
        tmp_path / "a/b"
    )
    assert build.cache_folder({"XDG_CACHE_HOME": str(base)}) == base / "outrider"
    for ignored in ("", "not/absolute"):
        assert build.cache_folder({"XDG_CACHE_HOME": ignored}) == tmp_path / "home/.cache/outrider"


@needs_c
def test_two_processes_build_at_once(small: Recipe, cache: Path) -> None:
    program = (
        "import os, pathlib, sys; from outrider.backends.cpu import build\n"
        "made = build.Recipe((pathlib.Path(sys.argv[1]),), ('-shared', '-fPIC'), '0123456789abcdef')\n"
        "assert build.load(made, os.environ).answer() == 42\n"
    )
    command = [sys.executable, "-c", program, str(small.sources[0])]
    running = [
        subprocess.Popen(command, env=environment(cache), stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate()[1] for process in running] == [""] * 3
    assert not any(process.returncode for process in running)
    assert only(cache).suffix == ".so"


# ---- what is in the cache is not to be loaded


@needs_c
@pytest.mark.parametrize("damage", ["truncated", "empty", "other content"])
def test_a_damaged_library_is_built_again(
    small: Recipe, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    build.load(small, environment(cache))
    kept = only(cache)
    whole = kept.read_bytes()
    kept.unlink()  # a new file: this process has the old one mapped
    kept.write_bytes({"truncated": whole[:4096], "empty": b"", "other content": whole[:-1] + b"x"}[damage])
    kept.chmod(0o600)
    assert works(build.load(small, environment(cache)))
    assert "is damaged" in caplog.text and only(cache).read_bytes() == whole


@needs_c
@needs_root
def test_a_library_of_another_user_is_not_loaded(
    small: Recipe, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build.load(small, environment(cache))
    os.chown(only(cache), 12345, -1)
    assert works(build.load(small, environment(cache)))
    assert "belongs to another user (12345)" in caplog.text
    assert only(cache).stat().st_uid == os.geteuid()


@needs_c
def test_a_library_that_others_can_write_is_not_loaded(
    small: Recipe, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build.load(small, environment(cache))
    only(cache).chmod(0o666)
    assert works(build.load(small, environment(cache)))
    assert (
        "can be written by others (mode 666)" in caplog.text and only(cache).stat().st_mode & 0o777 == 0o600
    )


@needs_c
@pytest.mark.parametrize("instead", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_loaded(small: Recipe, cache: Path, tmp_path: Path, instead: str) -> None:
    """Neither does a link make it write elsewhere, nor a pipe wait for ever."""
    build.load(small, environment(cache))
    kept, elsewhere = only(cache), tmp_path / "elsewhere.so"
    shutil.move(kept, elsewhere)
    before = elsewhere.stat()
    {"link": lambda: kept.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(kept), "folder": kept.mkdir}[
        instead
    ]()
    assert [*build.sound(cache, "kernels-")] == []
    assert works(build.load(small, environment(cache)))
    assert elsewhere.stat() == before and (instead == "folder" or (kept.is_file() and not kept.is_symlink()))


# ---- the cache cannot be used: the library is built for this process


@needs_c
@pytest.mark.parametrize("fault", ["others can write", "another owner", "is a file", "no folder can be made"])
def test_unusable_cache_folder_is_logged_and_left_unchanged(
    small: Recipe, cache: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "another owner" and os.geteuid() != 0:
        pytest.skip("only root gives folders to other users")
    if fault in ("others can write", "another owner"):
        cache.mkdir()
        cache.chmod(0o777 if fault == "others can write" else 0o700)
        if fault == "another owner":
            os.chown(cache, 12345, -1)
    else:
        cache.write_text("a file")
    place = cache / "below" if fault == "no folder can be made" else cache
    assert works(build.load(small, environment(place)))
    assert "built anew at every start" in caplog.text and "OUTRIDER_CACHE" in caplog.text
    assert cache.is_file() or not any(cache.iterdir())


@needs_c
def test_a_home_that_is_not_there(small: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    """As of users of a container that no passwd file knows."""
    given = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": "/proc/nowhere"}
    assert works(build.load(small, given))
    assert "built anew at every start" in caplog.text


@needs_c
def test_kernels_work_without_a_cache_on_a_full_disk(
    small: Recipe, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert works(build.load(small, environment(cache)))
    assert "will be built again at the next start" in caplog.text and "No space left" in caplog.text
    assert not any(cache.iterdir())


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError):
            build.keep(bytes(1 << 20), tmp_path, "kernels-a-b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


@needs_c
def test_a_temporary_library_is_removed(
    small: Recipe, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert works(build.load(small, environment(cache)))
    assert not any(scratch.iterdir())


# ---- the compiler


@needs_c
@pytest.mark.parametrize(
    "missing", [{"PATH": ""}, {"CC": "/no/such/compiler"}, {"CC": "false"}, {"CC": "cc '"}]
)
def test_a_library_built_before_needs_no_compiler(
    small: Recipe, cache: Path, missing: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    build.load(small, environment(cache))
    caplog.clear()
    assert works(build.load(small, {**environment(cache), **missing}))
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"PATH": ""}, "no C compiler found"),
        ({"PATH": "", "CC": "  "}, "no C compiler found"),
        ({"CC": "gcc '"}, 'CC="gcc \'" is no command (No closing quotation)'),
        ({"CC": "/no/such/compiler"}, "'/no/such/compiler' cannot be run"),
        ({"CC": "false"}, "'false' failed with status 1"),
    ],
)
def test_an_unusable_compiler_is_reported(
    small: Recipe, cache: Path, given: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.load(small, {**environment(cache), **given}) is None
    assert "the torch kernels are used" in caplog.text and message in caplog.text


@needs_c
def test_compiler_errors_are_reported(small: Recipe, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    small.sources[0].write_text("int answer(void) { return 42 }\n")
    known = ("-mavx",) if "avx2" in targets.TARGETS else ()  # its instructions are not at fault
    assert build.load(small._replace(flags=(*known, *small.flags)), environment(cache)) is None
    assert "expected" in caplog.text and "compiled without" not in caplog.text


@needs_c
@pytest.mark.parametrize("flag", ["-mavxvnni", *targets.ARM64["neon_bf16"].flags])
def test_a_flag_that_the_compiler_does_not_know_is_left_out(
    small: Recipe, cache: Path, tmp_path: Path, flag: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "old-cc"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *{flag}*) exit 1;; esac\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o700)
    made = small._replace(flags=(flag, *small.flags))
    assert works(build.load(made, environment(cache, CC=str(compiler))))
    assert f"compiled without {flag}" in caplog.text
    caplog.clear()
    assert works(build.load(made, environment(cache, CC=str(compiler)))) and "without" not in caplog.text


# ---- the instruction set


@pytest.fixture
def x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The instruction sets of x86-64, on every machine."""
    monkeypatch.setattr(targets, "TARGETS", {"portable": targets.TARGETS["portable"], **targets.X86_64})


@pytest.mark.usefixtures("x86_64")
@pytest.mark.parametrize("name", ["sse2", "AVX2", "avx2 "])
def test_an_unknown_instruction_set_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown OUTRIDER_ISA .* "
        "Valid: amx, avx2, avx512, avx512_bf16, avx512_vnni, avx_vnni, portable",
    ):
        build.recipe({"OUTRIDER_ISA": name})


@pytest.mark.usefixtures("x86_64")
def test_an_instruction_set_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "processor", lambda: targets.AVX2 | {"fpu", "avx"})
    assert targets.available() == ["portable", "avx2"]
    assert build.recipe({"OUTRIDER_ISA": "avx2"}).flags[0] == "-march=x86-64-v3"
    assert build.recipe({"OUTRIDER_ISA": "avx2"}) == build.recipe({})
    with pytest.raises(ConfigError, match="OUTRIDER_ISA=avx512 needs a processor with avx512bw, avx512cd"):
        build.recipe({"OUTRIDER_ISA": "avx512"})


@pytest.mark.parametrize("listed", ["flags\t\t: fpu avx asimddp", "Features : fp asimd asimddp"])
def test_features_of_a_processor(listed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_ = tmp_path / "cpuinfo"
    list_.write_text(f"processor : 0\n{listed}\n")
    monkeypatch.setattr(targets, "CPUINFO", list_)
    assert {"asimddp"} < targets.processor()


@pytest.mark.parametrize("known", [0, 1])
def test_features_of_an_apple_processor(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(targets.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(targets, "_sysctl", lambda name: known if name == "hw.optional.arm.FEAT_BF16" else 0)
    assert targets.processor() == ({"asimddp", "bf16"} if known else {"asimddp"})


@pytest.mark.usefixtures("x86_64")
def test_every_instruction_set_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        targets, "processor", lambda: frozenset[str]().union(*(t.needs for t in targets.TARGETS.values()))
    )
    keys = {build.recipe({"OUTRIDER_ISA": name}).key for name in targets.TARGETS}
    assert len(keys) == len(targets.TARGETS)
    assert build.recipe({}) == build.recipe({"OUTRIDER_ISA": "amx"})
    assert {"-mavx512bf16", "-mamx-tile", "-mamx-bf16"} < set(build.recipe({}).flags)
    other = build.recipe({"OUTRIDER_CFLAGS": " -O1  -g"})
    assert other.flags[-2:] == ("-O1", "-g") and other.key not in keys


@pytest.mark.usefixtures("x86_64")
@pytest.mark.parametrize("allowed", [False, True])
def test_tiles_are_a_feature_if_the_system_gives_them(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "CPUINFO", tmp_path / "cpuinfo")
    targets.CPUINFO.write_text(f"flags : {' '.join(sorted(targets.TARGETS['amx'].needs))}\n")
    monkeypatch.setattr(targets, "_allows_tiles", lambda: allowed)
    assert targets.available()[-1] == ("amx" if allowed else "avx512_bf16")
    if not allowed:
        with pytest.raises(ConfigError, match="OUTRIDER_ISA=amx needs a processor with amx_bf16, amx_tile"):
            build.recipe({"OUTRIDER_ISA": "amx"})


def test_own_flags_are_kept_apart_by_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(feature: str, **given: str) -> str:
        monkeypatch.setattr(targets, "processor", lambda: frozenset((feature,)))
        return build.recipe({"OUTRIDER_ISA": "portable", **given}).key

    assert key("sse3") == key("sse4")
    assert key("sse3", OUTRIDER_CFLAGS="-march=native") != key("sse4", OUTRIDER_CFLAGS="-march=native")


def test_errors_of_the_cache_are_one_kind(tmp_path: Path) -> None:
    for place in ("~nobody-of-this-name/x", "a\0b", str(tmp_path / ("x" * 300))):
        with pytest.raises(BuildError):
            build.cache_folder({"OUTRIDER_CACHE": place})
