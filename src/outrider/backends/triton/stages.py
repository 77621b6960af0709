"""Launch of kernels that load tiles ahead, with as many stages as a device has shared memory for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from triton.runtime.errors import OutOfResources

_FITTING: dict[Hashable, int] = {}  # kind of a launch -> stages that fit


def launch(kernel: Any, kind: Hashable, most: int, *arguments: Any, **named: Any) -> None:
    """Launch a kernel (with its grid) with at most so many stages.

    kind: what its shared memory depends on
    """
    for stages in range(_FITTING.get(kind, most), 0, -1):
        try:
            kernel(*arguments, **named, num_stages=stages)
        except OutOfResources:
            if stages == 1:
                raise
        else:
            _FITTING[kind] = stages
            break
