#!/usr/bin/env python
"""Compile the C kernels for other systems, and compare those for Windows with those for Linux under Wine.

scripts/cross.py                         every system, every instruction set; warnings are errors
scripts/cross.py --systems windows-gcc   one of them
scripts/cross.py --run                   also runs the results of MinGW's compilers, and compares digests

Debian has MinGW's gcc (mingw-w64), clang and Wine (wine64); `pip install ziglang` has compilers for all
systems.  What is not installed is named and left out.  Nothing is run for macOS or arm64.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from outrider.backends.cpu import build, compiler, targets  # noqa: E402
from outrider.backends.cpu.targets import ARM64, TARGETS, X86_64, Target  # noqa: E402

ZIG = [sys.executable, "-m", "ziglang", "cc", "-target"]
MINGW, CLANG = "x86_64-w64-mingw32-gcc", ["clang", "--target=x86_64-w64-mingw32"]
DRIVER = ROOT / "tests" / "backends" / "kernel_digests.c"
STRICT = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Werror")
SILENT = ("-Wno-unknown-warning-option", "-Wno-unused-command-line-argument")  # of clang: gcc's flags


class System(NamedTuple):
    """A compiler for a system.

    windows: what it builds is a DLL.
    like: the system to compare results with, for the same compiler; None if nothing is run.
    """

    compiler: list[str]
    sets: dict[str, Target]
    windows: bool = False
    like: str | None = None


PORTABLE = {"portable": TARGETS["portable"]}
X86, ARM = PORTABLE | X86_64, PORTABLE | ARM64
WINDOWS_X86 = {name: target for name, target in X86.items() if name != "amx"}  # see targets.py
SYSTEMS = {
    "linux-gcc": System(["gcc"], X86, like="linux-gcc"),
    "linux-clang": System(["clang"], X86, like="linux-clang"),
    "linux-zig": System([*ZIG, "x86_64-linux-gnu"], X86, like="linux-zig"),
    "windows-gcc": System([MINGW], WINDOWS_X86, windows=True, like="linux-gcc"),
    "windows-clang": System(CLANG, WINDOWS_X86, windows=True, like="linux-clang"),
    "windows-zig": System([*ZIG, "x86_64-windows-gnu"], WINDOWS_X86, windows=True, like="linux-zig"),
    "windows-arm64-zig": System([*ZIG, "aarch64-windows-gnu"], ARM, windows=True),
    "macos-zig": System([*ZIG, "x86_64-macos"], X86),
    "macos-arm64-zig": System([*ZIG, "aarch64-macos"], ARM),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    options.add_argument("--sets", nargs="+", choices=[*X86, *ARM64], help="instruction sets; default: all")
    options.add_argument("--run", action="store_true", help="compare digests of results under Wine")
    options.add_argument("--out", type=Path, help="folder to keep the libraries in")
    given = options.parse_args()
    likes = {SYSTEMS[name].like for name in given.systems} if given.run else set()
    systems = [name for name in SYSTEMS if name in given.systems or name in likes]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        failed = [name for name in systems if not checked(name, given.sets, folder, given.run)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def checked(name: str, sets: Sequence[str] | None, folder: Path, run: bool) -> bool:
    """Compile a system's libraries, and compare those that run here.  True if nothing failed."""
    system, failures = SYSTEMS[name], 0
    if missing := lacks(system.compiler):
        print(f"{name}: not compiled, {missing} is not installed")
        return True
    if run and system.like and system.windows and shutil.which("wine") is None:
        print(f"{name}: not run, wine is not installed")
        run = False
    to = folder / name
    to.mkdir(parents=True, exist_ok=True)
    driver = compiled_driver(system, to) if run and system.like else None
    for isa, target in system.sets.items():
        if sets is not None and isa not in sets:
            continue
        library = to / f"{isa}{'.dll' if system.windows else '.so'}"
        error = command_error([*command(system, target), *map(str, build.SOURCES), "-o", str(library), "-lm"])
        verdict = error or "compiled"
        if driver is not None and not error and isa in targets.available():
            error, note = compare(driver, library, folder / str(system.like) / f"{isa}.digests")
            verdict = error or f"compiled, run{note}"
        failures += bool(error)
        print(f"{name} {isa}: {verdict}", flush=True)
    return not failures


def lacks(compiler: Sequence[str]) -> str | None:
    """What has to be installed for a compiler; None if it is there."""
    if compiler[0] == sys.executable:
        return None if find_spec("ziglang") else "ziglang"
    return None if shutil.which(compiler[0]) else compiler[0]


def libgcc() -> list[str]:
    """The folder of MinGW's libgcc, which Debian's clang does not find by itself."""
    if shutil.which(MINGW) is None:
        return []
    done = subprocess.run([MINGW, "-print-libgcc-file-name"], capture_output=True, text=True, check=True)
    return [f"-L{Path(done.stdout).parent}"]


def zig_flags(flags: Sequence[str]) -> list[str]:
    """The flags of a target for zig, which has its own names of processors."""
    if not flags:
        return []
    if "armv8.2-a" in flags[-1]:
        return [flags[-1].replace("-march=armv8.2-a", "-mcpu=generic+v8_2a")]
    level, *features = (flag.removeprefix("-march=").removeprefix("-m").replace("-", "_") for flag in flags)
    return [f"-mcpu={'+'.join([level, *features])}"]


def command(system: System, target: Target) -> list[str]:
    """The command that build.py would use on that system, with warnings."""
    flags = zig_flags(target.flags) if system.compiler[0] == sys.executable else target.flags
    warnings = [*STRICT, *(SILENT if system.compiler[0] in ("clang", sys.executable) else ())]
    own = compiler.windows_flags(system.compiler) if system.windows else []
    own += libgcc() if system.compiler == CLANG else []
    return [
        *system.compiler,
        *flags,
        *build.COMMON,
        *build.SHARED[system.windows],
        *own,
        *warnings,
    ]


def command_error(words: Sequence[str]) -> str | None:
    """Run a command.  Returns its last lines of errors if it failed."""
    done = subprocess.run(words, capture_output=True, text=True)
    return (done.stderr or done.stdout).strip()[-1500:] or "failed" if done.returncode else None


def compiled_driver(system: System, folder: Path) -> list[str]:
    """The command that prints the digests of a library."""
    program = folder / ("digests.exe" if system.windows else "digests")
    flags = ["-O1", "-std=gnu11", "-Wall", f"-I{build.FOLDER}", str(DRIVER), "-o", str(program)]
    flags += libgcc() if system.compiler == CLANG else []
    if error := command_error([*system.compiler, *flags]):
        sys.exit(error)
    return ["wine", str(program)] if system.windows else [str(program)]


def compare(driver: Sequence[str], library: Path, expected: Path) -> tuple[str | None, str]:
    """Run a library, and compare its digests with those of Linux and the same compiler, which come first.

    Returns what failed, and a note on the results of kernels that call the system's log, exp and tanh.
    """
    quiet = {**os.environ, "WINEDEBUG": "-all", "WINEPREFIX": str(expected.parents[1].resolve() / "wine")}
    done = subprocess.run(
        [*driver, library.name], capture_output=True, text=True, cwd=library.parent, env=quiet
    )
    if done.returncode:
        return f"ended with status {done.returncode}: {(done.stderr + done.stdout)[-500:]}", ""
    lines = done.stdout.splitlines()
    if library.parent == expected.parent:
        expected.write_text("\n".join(lines))
        return None, ""
    wanted = expected.read_text().splitlines()
    other = sorted({line.split()[0] for line, known in zip(lines, wanted, strict=True) if line != known})
    wrong = [name for name in other if not name.startswith("libm")]
    if wrong:
        return f"other bits than Linux: {', '.join(wrong)}", ""
    return None, f"; other bits where log, exp or tanh decide: {', '.join(other)}" if other else ""


if __name__ == "__main__":
    main()
