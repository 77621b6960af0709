"""Folders of a training run: each has one writer, and what stays empty is removed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from outrider.errors import ConfigError
from outrider.train.options import TrainOptions


def cache_folder(options: TrainOptions) -> Path:
    return Path(options.cache).expanduser() if options.cache else options.work


@contextmanager
def new_folders(options: TrainOptions) -> Iterator[None]:
    """Make the folder of the result.  In the end, those that were made and hold nothing are removed.

    Raises ConfigError if it cannot be made.
    """
    out = Path(options.out).expanduser()
    new = [folder for folder in (cache_folder(options), options.work, out) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {options.out!r} cannot be made: {error}") from error
    try:
        yield
    finally:
        for folder in new:
            with suppress(OSError):  # it holds something, or was not made
                folder.rmdir()


def only_writer(folder: Path) -> AbstractContextManager[None]:
    """Keep other runs from writing answers and features to a folder.  Raises ConfigError if one does."""
    return _locked(
        folder / "lock",
        f"another run writes answers and features to {str(folder)!r}: wait until its steps have begun, or "
        "give another folder as cache.",
    )


def only_run(options: TrainOptions) -> AbstractContextManager[None]:
    """Keep other runs from training in the folder of the result.  Raises ConfigError if one does."""
    fault = f"another run trains in {options.out!r}: wait until it ends, or give another folder as out."
    return _locked(options.work / "run.lock", fault)


@contextmanager
def _locked(path: Path, fault: str) -> Iterator[None]:
    """Hold the lock of a file, then remove it.  Raises ConfigError(fault) if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(path, thread_local=False).acquire(blocking=False)
    except Timeout as error:
        raise ConfigError(fault) from error
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):  # some systems keep open files
                path.unlink()
