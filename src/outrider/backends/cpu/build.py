"""Find the C kernels among those that were built with the wheel; otherwise build them, once.

A library is one file, `kernels-<key>-<compiler>-<content>.so`, on Windows `.dll`:

    key       hash of sources, flags and kind of machine; known without a compiler
    compiler  hash of the command and its version, so that another compiler builds its own
    content   hash of the file itself, checked before the library is loaded

Those of the wheel are in the package's folder `compiled`.  One that is built later, on first use, is kept in
a cache folder.  There is a library for each instruction set, so that no function of one can end up in
another.  A process uses the best one that its processor runs.

Loading a library runs its code.  So cache folder and file must belong to this user or to root, and be
writable by the owner only.  If the cache cannot be used, the library is built in a private temporary folder
for this process alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from outrider.backends.cpu import targets
from outrider.backends.cpu.compiler import (
    WINDOWS,
    BuildError,
    Compiler,
    find_compiler,
    hashed,
    knows,
    run,
    windows_flags,
)
from outrider.core.limits import MAX_HEAD_DIM
from outrider.errors import ConfigError, unknown

FOLDER = Path(__file__).parent / "csrc"
COMPILED = FOLDER.with_name("compiled")
SOURCES = sorted(FOLDER.glob("*.c"))
SUFFIX = ".dll" if WINDOWS else ".so"
COMMON = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-std=gnu11", f"-DMAX_HEAD_DIM={MAX_HEAD_DIM}")
SHARED = {True: ("-shared", "-static-libgcc"), False: ("-shared", "-fPIC", "-pthread")}  # Windows, POSIX
FLAGS = (*COMMON, *SHARED[WINDOWS])
LINKED = ("-shared", "-static-libgcc")
# O_BINARY is Windows' own, the others are POSIX's
READ = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
SLOW = "the torch kernels are used, which are exact but many times slower: %s"
log = logging.getLogger("outrider")


class Recipe(NamedTuple):
    """Sources, flags and processor of a library, and their hash."""

    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    key: str


def load(made: Recipe, environment: Mapping[str, str]) -> ctypes.CDLL | None:
    """The compiled kernels.  Returns None after one warning if they can neither be found nor built."""
    if not environment.get("CC", "").strip() and (library := opened(COMPILED, made.key)) is not None:
        return library
    folder = None
    try:
        folder = cache_folder(environment)
    except BuildError as error:
        log.warning("the C kernels are built anew at every start: %s", error)
    try:
        compiler = find_compiler(environment)
        return opened(folder, made.key, compiler.id) or build(made, compiler, folder)
    except BuildError as error:
        kept = opened(folder, made.key)  # by any compiler
        if kept is None:
            log.warning(SLOW, error)
        return kept


def build_all(folder: Path, environment: Mapping[str, str]) -> None:
    """Build the library of every instruction set of this kind of processor, for a wheel.

    A set that the compiler does not know is left out.  Raises BuildError without a compiler.
    """
    compiler = find_compiler(environment)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
    folder.mkdir(parents=True)
    for name in targets.TARGETS:
        made = recipe_of(name)
        try:
            with tempfile.TemporaryDirectory(prefix="outrider-") as private:
                library = Path(private, f"kernels{SUFFIX}")
                _compile(made.sources, compiler, made.flags, library)
                keep(library.read_bytes(), folder, f"kernels-{made.key}-{compiler.id}")
        except BuildError as error:
            print(f"The C kernels for {name} are left out: {error}")


# ---- sources and flags


def recipe(environment: Mapping[str, str]) -> Recipe:
    """The kernels for the instruction set in OUTRIDER_ISA; OUTRIDER_CFLAGS is appended to our flags.

    Without OUTRIDER_ISA the best set that this processor has.
    Raises ConfigError for an unknown name, or for a set that this processor lacks.
    """
    name, features = environment.get("OUTRIDER_ISA") or targets.available()[-1], targets.processor()
    if name not in targets.TARGETS:
        raise ConfigError(unknown("OUTRIDER_ISA", name, targets.TARGETS))
    if lacking := targets.TARGETS[name].needs - features:
        raise ConfigError(f"OUTRIDER_ISA={name} needs a processor with {', '.join(sorted(lacking))}.")
    own = environment.get("OUTRIDER_CFLAGS", "").split()
    return recipe_of(name, own, sorted(features) if own else ())  # -march=native: a processor's own


def recipe_of(name: str, own: Sequence[str] = (), features: Iterable[str] = ()) -> Recipe:
    """The kernels for an instruction set, with flags of one's own, for processors with these features."""
    flags = (*targets.TARGETS[name].flags, *FLAGS, *own)
    texts = [path.read_text(encoding="utf-8") for path in (*sorted(FOLDER.glob("*.h")), *SOURCES)]
    parts = [*texts, *flags, platform.machine(), *features]
    return Recipe(tuple(SOURCES), flags, hashed("\0".join(parts).encode()))


def build(made: Recipe, compiler: Compiler, folder: Path | None) -> ctypes.CDLL:
    """Compile the library, keep it in `folder` if possible, and load it."""
    log.info("building the C kernels with %s (once, takes some seconds)", shlex.join(compiler.command))
    began = time.perf_counter()
    try:
        # Windows removes no library that is loaded: one that cannot be kept stays among the temporary files
        with tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=WINDOWS) as private:
            library = Path(private, f"kernels{SUFFIX}")
            _compile_for(made, compiler, library)
            log.info("built the C kernels in %.1f s", time.perf_counter() - began)
            if folder is not None:
                library = _kept_or(library, folder, f"kernels-{made.key}-{compiler.id}")
            return ctypes.CDLL(str(library))  # stays mapped when the folder is removed
    except OSError as error:
        raise BuildError(f"the library cannot be built or loaded ({error})") from error


def _compile_for(made: Recipe, compiler: Compiler, library: Path) -> None:
    """Compile the library, without instructions that an older compiler does not know.

    That is slower.  The bits are the same, but without AMX or bfdot those of processors without it.
    """
    flags = list(made.flags)
    while True:
        try:
            _compile(made.sources, compiler, flags, library)
            return
        except BuildError:
            newest = next((flag for flag in reversed(flags) if flag.startswith(targets.OPTIONAL_FLAGS)), None)
            if newest is None or knows(compiler, newest):
                raise
            flags.remove(newest)
            log.warning("the C kernels are compiled without %s: the compiler does not know it", newest)


def _compile(sources: Sequence[Path], compiler: Compiler, flags: Iterable[str], library: Path) -> None:
    """Compile the files, as many at once as there are processors, and link them."""
    own = windows_flags(compiler.command) if WINDOWS else []
    start = [*compiler.command, *flags, *own]
    alone = [flag for flag in start if flag not in LINKED]  # clang warns of them where nothing is linked

    def compiled(source: Path) -> str:
        part = str(library.with_name(f"{source.stem}.o"))
        run([*alone, "-c", str(source), "-o", part])
        return part

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(compiled, sources))
    run([*start, *parts, "-o", str(library), "-lm"])


# ---- the cache


def cache_folder(environment: Mapping[str, str]) -> Path:
    """OUTRIDER_CACHE, otherwise `outrider` in the user's cache folder; created with mode 700 if missing.

    On Windows it must be in the user's profile, which by default only the user and administrators may write.
    Raises BuildError if it cannot be created or is not safe to load from.
    """
    given = environment.get("OUTRIDER_CACHE")
    base = environment.get("LOCALAPPDATA" if WINDOWS else "XDG_CACHE_HOME", "")
    default = "AppData/Local" if WINDOWS else ".cache"
    try:
        if given:
            folder = Path(given).expanduser()
        else:
            folder = Path(base if os.path.isabs(base) else Path.home() / default, "outrider")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder = folder.resolve()
        if fault := out_of_profile(folder) if WINDOWS else untrusted(folder.stat()):
            raise BuildError(
                f"the cache folder {folder} {fault} (chmod 700 it, or set OUTRIDER_CACHE to a private one)"
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise BuildError(f"there is no cache folder ({error}); set OUTRIDER_CACHE to one") from error
    return folder


def out_of_profile(folder: Path) -> str | None:
    """Why users of Windows other than this one and administrators could change a folder; None if they cannot.

    Its access lists are not read: those of folders in the profile are inherited from it.
    """
    profile = Path.home().resolve()
    return None if folder.is_relative_to(profile) else f"is not in the user's profile, {profile}"


def untrusted(status: os.stat_result) -> str | None:
    """Why users other than this one or root could change a file or folder; None if they cannot."""
    if not hasattr(os, "geteuid"):
        return None  # Windows has no such modes: out_of_profile
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def opened(folder: Path | None, key: str, compiler: str = "*") -> ctypes.CDLL | None:
    """Load a kept library of this key, by default from any compiler; None if no intact, safe one exists."""
    if folder is None:
        return None
    for path in sound(folder, f"kernels-{key}-{compiler}"):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            log.info("%s cannot be loaded: %s", path, error)
    return None


def sound(folder: Path, stem: str) -> Iterator[Path]:
    """Regular files `<stem>-<content>.so` that are safe to load and match the hash in their name."""
    for path in sorted(folder.glob(f"{stem}-*{SUFFIX}")):
        try:
            with open(os.open(path, READ), "rb") as file:
                status = os.fstat(file.fileno())
                fault = None if stat.S_ISREG(status.st_mode) else "is not a regular file"
                if folder != COMPILED:  # the package's own file, as safe as its code
                    fault = fault or untrusted(status)
                content = "" if fault else hashed(file.read())
        except OSError as error:
            fault, content = f"cannot be read ({error})", ""
        if not fault and path.stem.endswith(f"-{content}"):
            yield path
        else:
            log.warning("%s is ignored: it %s", path, fault or "is damaged")


def _kept_or(library: Path, folder: Path, stem: str) -> Path:
    """Path of the library in the cache; its present path if it cannot be kept."""
    try:
        return keep(library.read_bytes(), folder, stem)
    except OSError as error:
        log.warning(
            "the C kernels will be built again at the next start: %s cannot be written (%s); "
            "set OUTRIDER_CACHE to a folder that can",
            folder,
            error,
        )
        return library


def keep(data: bytes, folder: Path, stem: str) -> Path:
    """Write a library to the cache atomically, for other processes and across crashes."""
    target = folder / f"{stem}-{hashed(data)}{SUFFIX}"
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".kernels-")  # mode 600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(name, target)
        except PermissionError:  # on Windows, where a process has loaded it
            if not WINDOWS or target.read_bytes() != data:
                raise
            os.unlink(name)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    return target
