"""Number of threads of the CPU kernels: OMP_NUM_THREADS, torch.set_num_threads, limited by the quota.

torch counts the processors in the affinity mask.  It ignores the quota of a container (`docker --cpus=2`).
More threads than the quota wait for each other.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VERSION_1 = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
numbers: dict[ctypes.CDLL, int] = {}  # libraries of kernels -> their numbers of threads


@lru_cache(maxsize=1)
def limit() -> None:
    """Lower torch's number of threads, once per process, to the processors of its control group.

    Has no effect if OMP_NUM_THREADS is set.  A later torch.set_num_threads is respected.
    """
    allowed = quota(GROUPS, OWN)
    if allowed is not None and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), max(1, math.ceil(allowed))))


def use(threads: int | None) -> None:
    """Use so many threads, at most one a processor.  None: torch's number, limited."""
    limit()  # now, so that an explicit number is not lowered later
    if threads is not None:
        torch.set_num_threads(min(threads, processors()))


def processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def adopt(kernels: ctypes.CDLL) -> None:
    """Let the kernels use as many threads as torch does."""
    count = torch.get_num_threads()
    if numbers.get(kernels) != count:
        kernels.set_threads(count)
        numbers[kernels] = count


def adopt_in_all() -> None:
    """Let all kernels that are loaded use as many threads as torch does now.

    Not called in a step: behind a forward torch takes 10 µs to tell its number.
    """
    for kernels in [*numbers]:
        adopt(kernels)


def quota(groups: Path, own: Path) -> float | None:
    """Processors, often a fraction, allowed by a process's control group and its parents.

    groups: mount point of the control groups, version 1 or 2
    own:    file that lists the process's groups
    Returns None without a quota.
    """
    return min(_quotas(groups, own), default=None)


def _quotas(groups: Path, own: Path) -> Iterator[float]:
    """Processors allowed by each control group that sets a quota, the own one and its parents."""
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mounts, files = [groups], ["cpu.max"]
            elif "cpu" in controllers.split(","):
                mounts, files = [groups / controllers, groups / "cpu"], VERSION_1
            else:
                continue
            inner = Path(path.strip("/"))
            for folder in (mount / part for mount in mounts for part in (inner, *inner.parents)):
                with suppress(OSError, ValueError, ZeroDivisionError):
                    if (allowed := _share(*(folder / file for file in files))) > 0:
                        yield allowed


def _share(*files: Path) -> float:
    """Processors by the quota and the period in these files: -1 or "max", a ValueError, is no quota."""
    most, period = " ".join(file.read_text(encoding="utf-8") for file in files).split()
    return int(most) / int(period)
