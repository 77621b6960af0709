"""The C compiler: which one, and what it knows."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

WINDOWS = os.name == "nt"
COMPILERS = ("cc", "gcc", "clang")


class BuildError(Exception):
    """The library could not be built; the message is the reason."""


class Compiler(NamedTuple):
    """A compiler command, and the hash of the command and its version."""

    command: tuple[str, ...]
    id: str


def find_compiler(environment: Mapping[str, str]) -> Compiler:
    """The compiler in CC, otherwise the first of cc, gcc and clang that is installed."""
    try:
        command = split(environment.get("CC", ""))
    except ValueError as error:
        raise BuildError(f"CC={environment['CC']!r} is no command ({error})") from error
    if not command:
        path = environment.get("PATH", os.defpath)
        found = (shutil.which(name, path=path) for name in COMPILERS)
        command = list(filter(None, found))[:1]
    if not command:
        raise BuildError("no C compiler found (install gcc or clang, or set CC)")
    version = run([*command, "--version"])
    return Compiler(tuple(command), hashed("\0".join([*command, version]).encode(), 8))


def split(command: str, windows: bool = WINDOWS) -> list[str]:
    """The words of a command; those of Windows may have backslashes, also between quotes."""
    return [word.strip('"') for word in shlex.split(command, posix=not windows)]


def run(command: Sequence[str]) -> str:
    """The output of a compiler.  Raises BuildError with its messages if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except (OSError, ValueError) as error:
        raise BuildError(f"the C compiler {command[0]!r} cannot be run ({error})") from error
    if result.returncode:
        output = result.stderr.strip()[-800:]
        raise BuildError(f"the C compiler {command[0]!r} failed with status {result.returncode}: {output}")
    return result.stdout


def windows_flags(command: Sequence[str]) -> list[str]:
    """Flags that a compiler for Windows needs.

    There gcc aligns the stack to 16 bytes, and still saves vectors of 32 and 64 bytes on it with instructions
    that fault where an address is no multiple of that (gcc's bug 54412).  The assembler replaces these moves;
    its option came with binutils 2.38.  clang aligns the stack.
    Raises BuildError for Microsoft's libraries: a DLL for them exports nothing by itself.
    """
    macros = run([*command, "-dM", "-E", "-x", "c", os.devnull])
    if "_MSC_VER" in macros:
        raise BuildError("the C kernels need gcc or clang of MinGW, not a compiler for Microsoft's libraries")
    misaligned = "__x86_64__" in macros and "__clang__" not in macros
    return ["-Wa,-muse-unaligned-vector-move"] if misaligned else []


def knows(compiler: Compiler, flag: str) -> bool:
    """Whether the compiler takes a flag."""
    with suppress(BuildError):
        return bool(run([*compiler.command, flag, "-dM", "-E", "-x", "c", os.devnull]))
    return False


def hashed(data: bytes, digits: int = 16) -> str:
    return hashlib.sha256(data).hexdigest()[:digits]
