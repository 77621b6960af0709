"""The folder of learned weights.  A kill at any moment leaves complete files.

    model.safetensors   the weights in float32; as metadata hashes of target, base and weights, and statistics
    config.json         with it the folder is a head or draft model as any other
    report.json         what was seen and judged, also while there are no weights; nothing depends on it
    lock                locked by the process that writes

The first two are written beside the old ones, flushed, and then take their names, the weights last.  Files
of other names are left alone.  Texts are never written.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError, writing

log = logging.getLogger("outrider")
WEIGHTS, CONFIG, LOCK, REPORT = "model.safetensors", "config.json", "lock", "report.json"
TEMPORARY = (f"{WEIGHTS}.new", f"{CONFIG}.new")
NAMES = (WEIGHTS, CONFIG, LOCK, REPORT, f"{REPORT}.new", *TEMPORARY)
KEY, KEYS = "outrider.online", {"target", "base", "weights", "statistics"}  # of the metadata


class Lock:
    """The lock of a folder, held by this process while an object of it lives.

    writing: of the folder.  stores: on the folder.  Raises ConfigError if another process holds it.
    """

    held: ClassVar[WeakValueDictionary[Path, Lock]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.writing, self.stores = threading.Lock(), WeakSet[Store]()
        self.file = FileLock(path / LOCK, thread_local=False)
        try:
            self.file.acquire(blocking=False)
        except Timeout as error:
            raise ConfigError(
                f"online: another process learns in {str(path)!r}: end it, or give another path."
            ) from error

    @classmethod
    def of(cls, path: Path) -> Lock:
        path = path.resolve()
        if (lock := cls.held.get(path)) is None:
            lock = cls.held[path] = cls(path)
        return lock

    def has_other(self, owner: object) -> bool:
        """Whether an object other than this one owns a store on the folder."""
        owners = (store.owner and store.owner() for store in self.stores)
        return any(other is not None and other is not owner for other in owners)


class Store:
    """target, base: hashes of the target and of the weights that training began with."""

    def __init__(self, path: str | Path, target: str, base: str, owner: object = None) -> None:
        """Make and lock the folder.  owner: the engine; only stores of one owner share a folder.

        Raises ConfigError for one that cannot be written, is in use, or holds other files.
        """
        self.path, self.key = Path(path).expanduser(), {"target": target, "base": base}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            read(self.path)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"test")
            self.lock = Lock.of(self.path)
        except OSError as error:
            raise ConfigError(
                f"online: {str(path)!r} is no folder that can be written ({error}): give another path."
            ) from error
        self.owner = None if owner is None else ref(owner)
        if owner is not None and self.lock.has_other(owner):
            gc.collect()  # a store that is not in use any more may be part of a cycle
            if self.lock.has_other(owner):
                raise ConfigError(
                    f"online: another model of this process learns in {str(path)!r}: give another path."
                )
        self.lock.stores.add(self)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Weights and statistics; None unless intact.  Raises ConfigError for another target or head."""
        state = read(self.path)
        if state is None:
            return None
        for what, own in self.key.items():
            if state[what] != own:
                raise ConfigError(
                    f"online: {str(self.path)!r} holds weights for another {what}: give another path, or "
                    f"remove them with `outrider online delete {self.path}`."
                )
        tensors = load_file(self.path / WEIGHTS)
        if hashed(tensors) != state["weights"]:
            log.warning("%s is damaged: learning begins anew", self.path)
            return None
        return tensors, dict(state["statistics"])

    def save(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        """Raises OSError if they cannot be written; the weights are then those of before."""
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        state = json.dumps({**self.key, "weights": hashed(kept), "statistics": dict(about)})
        with self.lock.writing, writing(self.path / WEIGHTS, SafetensorError):
            new_weights, new_config = files = [self.path / name for name in TEMPORARY]
            try:
                save_file(kept, new_weights, {"format": "pt", KEY: state})
                new_config.write_text(json.dumps(dict(config), indent=1) + "\n", encoding="utf-8")
                for file in files:
                    synced(file)
                new_config.replace(self.path / CONFIG)  # the same every time, and nothing without weights
                new_weights.replace(self.path / WEIGHTS)
            finally:
                for file in files:
                    file.unlink(missing_ok=True)
            synced(self.path)

    def report(self, about: Mapping[str, Any]) -> None:
        """Replace the report, if that is possible."""
        new = self.path / f"{REPORT}.new"
        try:
            with self.lock.writing:
                new.write_text(json.dumps(dict(about), indent=1) + "\n", encoding="utf-8")
                new.replace(self.path / REPORT)
        except OSError as error:
            log.debug("online: no report: %s", error)


def reported(path: Path) -> dict[str, Any] | None:
    """The report; None without one that can be read."""
    try:
        found = json.loads((path / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read(path: Path) -> dict[str, Any] | None:
    """The metadata of the weights; None without any.  Raises ConfigError for files that are no store's."""
    file = path / WEIGHTS
    if not file.exists():
        found = {each.name for each in path.iterdir()} if path.is_dir() else set()
        own = {*NAMES} if LOCK in found else {*TEMPORARY}  # a kill may leave no weights
        if other := found - own:
            raise ConfigError(
                f"online: {str(path)!r} holds other files, as {min(other)!r}: give a folder of its own."
            )
        return None
    try:
        with safe_open(file, "pt") as opened:
            state = json.loads((opened.metadata() or {}).get(KEY, "null"))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ConfigError(
            f"online: {str(file)!r} cannot be read ({error}): give another path, or remove the file."
        ) from error
    if not (isinstance(state, dict) and state.keys() >= KEYS):
        raise ConfigError(f"online: {str(file)!r} was not written by learning: give a folder of its own.")
    return state


def ours(path: Path) -> list[Path]:
    """Files that a store has written in a folder.  Raises ConfigError for the files of others."""
    read(path)
    return [file for name in NAMES if (file := path / name).is_file()]


def delete(path: Path) -> int:
    """Remove the weights, and the folder if empty; the bytes.  Raises ConfigError while a process learns."""
    size = usage(path)  # before a lock is made in a folder of others
    lock = Lock.of(path)
    with lock.writing:
        for file in ours(path):
            if file.name == LOCK and os.name == "nt":
                lock.file.release()  # Windows removes no open file
            file.unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()
    return size


def usage(path: Path) -> int:
    """Bytes of the learned weights and statistics."""
    return sum(file.stat().st_size for file in ours(path))


def hashed(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the values of named tensors."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def synced(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.  Windows cannot, for what is read."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
