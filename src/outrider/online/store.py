"""The folder of learned weights: what it holds is complete at every moment.

    state.json               {"folder", "sha256", "target", "base", statistics}, replaced in one step
    weights-<pid>-<n>/       config.json and model.safetensors: a head as any other, in float32

New weights are written beside the old ones and named in state.json last.  What state.json does not name is
removed at the next write.  Texts are never written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.errors import ConfigError

log = logging.getLogger("outrider")
STATE, WEIGHTS, CONFIG = "state.json", "model.safetensors", "config.json"


class Store:
    """target, base: hashes of the target and of the weights that training began with."""

    def __init__(self, path: str | Path, target: str, base: str) -> None:
        self.path, self.key, self.count = Path(path).expanduser(), {"target": target, "base": base}, 0

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The weights and statistics; None if there are none, or if they are corrupt.

        Raises ConfigError for those of another target or head.
        """
        state = read(self.path)
        if state is None:
            return None
        for what, own in self.key.items():
            if state.get(what) != own:
                raise ConfigError(
                    f"online: {str(self.path)!r} holds weights for another {what}: give another path, or "
                    f"remove them with `outrider online delete {self.path}`."
                )
        file = self.path / str(state.get("folder")) / WEIGHTS
        if not file.is_file() or digest(file) != state.get("sha256"):
            log.warning("%s is damaged: learning begins with the head again", self.path)
            return None
        return load_file(file), dict(state.get("statistics", {}))

    def save(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        self.count += 1
        name = f"weights-{os.getpid()}-{self.count}"
        folder = self.path / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(dict(config), indent=1) + "\n")
        for file in (folder / WEIGHTS, folder / CONFIG):
            synced(file)
        state = {"folder": name, "sha256": digest(folder / WEIGHTS), **self.key, "statistics": dict(about)}
        temporary = self.path / f"{STATE}.{os.getpid()}"
        temporary.write_text(json.dumps(state, indent=1) + "\n")
        synced(temporary)
        temporary.replace(self.path / STATE)
        for old in ours(self.path):
            if old.name not in (name, STATE):
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any] | None:
    """state.json; None without one, or if it is no JSON object."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def ours(path: Path) -> list[Path]:
    """What a store has written in a folder."""
    return sorted([*path.glob("weights-*-*"), *path.glob(f"{STATE}*")])


def delete(path: Path) -> int:
    """Remove the learned weights, and the folder if nothing else is in it; returns the bytes."""
    found, size = ours(path), usage(path)
    for old in found:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    if found and not any(path.iterdir()):
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


def synced(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
