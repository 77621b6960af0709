"""Messages between rank 0 and the other ranks, and what must agree when they start."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

import torch

from outrider.checkpoints.gguf.file import GgufFile
from outrider.checkpoints.hub import Checkpoint, locate
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.errors import ConfigError
from outrider.parallel.stage import ModelOptions, Stage
from outrider.version import VERSION

BEAT_INTERVAL = 0.5  # seconds


class MessageKind(StrEnum):
    """Kinds of messages to rank 0, with what follows the kind."""

    HELLO = "hello"  # rank, versions
    BEAT = "beat"  # activity
    READY = "ready"  # report
    FAILED = "failed"  # error


@dataclass(frozen=True)
class Setup:
    """A model to load on a rank.  Every machine finds the checkpoint by its name, without transformers.

    weights: in place of a checkpoint; files in it have the same paths on every machine.
    """

    model: str
    revision: str | None
    scheme: Scheme | None
    small: Spec | None
    options: ModelOptions
    threads: int
    weights: Source | None = None

    @staticmethod
    def of(checkpoint: Checkpoint, revision: str | None, options: ModelOptions, threads: int) -> Setup:
        return Setup(checkpoint.name, revision, checkpoint.scheme, checkpoint.small, options, threads)

    def open(self) -> tuple[Source, str | None]:
        """The weights, and the fingerprint of a checkpoint."""
        if self.weights is not None:
            return self.weights, None
        path = locate(self.model, self.revision)
        file = GgufFile(path) if path.is_file() else None
        folder = path.parent if file else path
        spec = self.options.spec
        found = Checkpoint(self.model, folder, None, spec, self.scheme, file, small=self.small)
        return found.tensors(), found.fingerprint


@dataclass(frozen=True)
class Report:
    """Properties of a rank that has loaded.  host: name of its machine; slot_bytes: of K/V."""

    facts: Mapping[str, str]
    host: str
    device: torch.device
    slot_bytes: int
    exact: bool

    @staticmethod
    def of(stage: Stage, fingerprint: str | None) -> Report:
        facts = {"kernels": stage.backend.name, "last norm": fingerprint or "unknown"}
        return Report(facts, platform.node(), stage.backend.device, stage.slot_bytes, stage.backend.exact)


def send(message: object, *connections: Connection[Any, Any]) -> None:
    """Send by plain pickle: `Connection.send` would share the memory of tensors, on one machine only."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    for connection in connections:
        connection.send_bytes(data)


def receive(connection: Connection[Any, Any]) -> Any:
    return pickle.loads(connection.recv_bytes())


def versions() -> dict[str, str]:
    return {"outrider": VERSION, "torch": torch.__version__, "Python": platform.python_version()}


def check_same(rank: int, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError if a rank differs from rank 0, with all that differs."""
    differing = [
        f"{name} is {found.get(name)!r}, and {value!r} on rank 0"
        for name, value in own.items()
        if found.get(name) != value
    ]
    if differing:
        raise ConfigError(
            f"rank {rank} differs from rank 0: {'; '.join(differing)}. All ranks need the same."
        )


def pinned_device(device: torch.device, local_rank: int) -> torch.device:
    """The device of a rank: on a machine with GPUs, one each."""
    if device.type != "cuda":
        return device
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} GPUs, too few for rank {local_rank} of it: lower "
            "tensor_parallel_size or pipeline_parallel_size, or set device='cpu'."
        )
    return torch.device("cuda", local_rank)
