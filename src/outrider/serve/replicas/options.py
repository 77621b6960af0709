"""Options of several replicas."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.core.validate import check_fields, whole
from outrider.errors import ConfigError
from outrider.serve.options import SECONDS

REPLICA_OPTIONS = {"replicas": whole(1), "replica_timeout": SECONDS}


@dataclass(frozen=True)
class ReplicaOptions:
    """Options of several servers behind one port.

    replicas             processes that serve the model; above 1, a router in front of them answers
    replica_timeout      seconds without an answer after which a replica counts as frozen and is restarted
    """

    replicas: int = 1
    replica_timeout: float = 10.0

    def __post_init__(self) -> None:
        check_fields(self, REPLICA_OPTIONS)


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use; none on a machine without."""
    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


def shares(gpus: Sequence[str], replicas: int, ranks: int) -> list[list[str]]:
    """GPUs of every replica, `ranks` each.  Raises ConfigError if there are too few."""
    if len(gpus) < replicas * ranks:
        raise ConfigError(
            f"{replicas} replicas of {ranks} GPUs need {replicas * ranks}, and {len(gpus)} are visible: "
            "lower --replicas, or choose --device cpu."
        )
    return [list(gpus[i * ranks : (i + 1) * ranks]) for i in range(replicas)]
