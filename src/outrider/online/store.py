"""The folder of learned weights: what it holds is complete at every moment.

    state.json      {"folder", "sha256", "target", "base", "statistics"}, replaced in one step
    weights-<hex>/  config.json and model.safetensors: a head as any other, in float32
    lock            locked by the process that writes

New weights are written beside the old ones and named in state.json last.  What state.json does not name is
removed at the end of a write.  Files of other names are left alone.  Texts are never written.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError

log = logging.getLogger("outrider")
STATE, TEMPORARY, LOCK = "state.json", "state.json.new", "lock"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
FOLDER = re.compile(r"weights-[0-9a-f]{32}")
KEYS = {"folder", "sha256", "target", "base", "statistics"}


class Lock:
    """The lock of a folder, held by this process while an object of it lives.

    writing: of the folder.  stores: on the folder.  Raises ConfigError if another process holds it.
    """

    held: ClassVar[WeakValueDictionary[Path, Lock]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self.writing, self.stores = threading.Lock(), WeakSet[Store]()
        self.file = (path / LOCK).open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.file.close()
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
        """The weights and statistics; None if there are none, or if they are corrupt.

        Raises ConfigError for those of another target or head.
        """
        state = read(self.path)
        if state is None:
            return None
        for what, own in self.key.items():
            if state[what] != own:
                raise ConfigError(
                    f"online: {str(self.path)!r} holds weights for another {what}: give another path, or "
                    f"remove them with `outrider online delete {self.path}`."
                )
        file = self.path / str(state["folder"]) / WEIGHTS
        if not file.is_file() or digest(file) != state["sha256"]:
            log.warning("%s is damaged: learning begins with the head again", self.path)
            return None
        return load_file(file), dict(state["statistics"])

    def save(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        """Raises OSError if they cannot be written; the folder then holds what it held before."""
        folder = self.path / f"weights-{uuid.uuid4().hex}"
        with self.lock.writing:
            try:
                self._write(folder, config, tensors, about)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            (self.path / TEMPORARY).replace(self.path / STATE)
            synced(self.path)
            for old in ours(self.path):
                if FOLDER.fullmatch(old.name) and old != folder:
                    shutil.rmtree(old, ignore_errors=True)

    def _write(
        self,
        folder: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
    ) -> None:
        """Write new weights, and the state that names them under a temporary name."""
        folder.mkdir(parents=True)
        try:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (folder / CONFIG).write_text(json.dumps(dict(config), indent=1) + "\n")
        sha256 = digest(folder / WEIGHTS)
        state = {"folder": folder.name, "sha256": sha256, **self.key, "statistics": dict(about)}
        temporary = self.path / TEMPORARY
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        for each in (folder / WEIGHTS, folder / CONFIG, folder, temporary):
            synced(each)


def read(path: Path) -> dict[str, Any] | None:
    """state.json; None for a folder without any.

    Raises ConfigError for a state.json that is not a store's, and for a folder of other files without one.
    """
    if not (path / STATE).exists():
        if path.is_dir() and (other := {*path.iterdir()} - {*ours(path)}):
            first = min(other).name
            raise ConfigError(
                f"online: {str(path)!r} holds other files, as {first!r}: give a folder of its own."
            )
        return None
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"online: {str(path / STATE)!r} cannot be read ({error}): give another path, or remove the file."
        ) from error
    if not (isinstance(state, dict) and state.keys() >= KEYS):
        raise ConfigError(
            f"online: {str(path / STATE)!r} was not written by learning: give a folder of its own."
        )
    return state


def ours(path: Path) -> list[Path]:
    """What a store has written in a folder."""
    names = STATE, TEMPORARY, LOCK
    return sorted(file for file in path.glob("*") if file.name in names or FOLDER.fullmatch(file.name))


def delete(path: Path) -> int:
    """Remove the learned weights, and the folder if nothing else is in it; returns the bytes.

    Raises ConfigError while a process learns there.
    """
    lock, size = Lock.of(path), usage(path)
    with lock.writing:
        for old in ours(path):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        if not any(path.iterdir()):
            path.rmdir()
    return size


def usage(path: Path) -> int:
    """Bytes of the learned weights and statistics."""
    files = (file for each in ours(path) for file in (each, *each.glob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hashed(tensors: Mapping[str, Tensor]) -> str:
    """Hash of the values of named tensors."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]


def synced(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
