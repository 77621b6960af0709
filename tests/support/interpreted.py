"""Triton's interpreter for tests, which conftest.py chooses, without its repeated patching."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Rerun:
    """Recorder of graphs without a device: a replay calls the recorded function again.

    It sees what a graph keeps: its own tensors, and numbers as they were when it was recorded.  Results of a
    graph are lost as soon as another is replayed, for they share memory.

    around: context of every replay
    """

    around: ClassVar[Callable[[], AbstractContextManager[Any]]] = nullcontext

    def __init__(self) -> None:
        self.results: list[list[Tensor]] = []

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
        own: list[Tensor] = []
        self.results.append(own)

        def replay() -> tuple[Tensor, ...]:
            for other in self.results:
                for lost in other if other is not own else ():
                    lost.fill_(float("nan") if lost.is_floating_point() else 0)
            new = run()
            if not own:
                own.extend(part.clone() for part in new)
            for to, part in zip(own, new):
                to.copy_(part)
            return tuple(own)

        def watched() -> tuple[Tensor, ...]:
            with Rerun.around():
                return replay()

        return watched

    def reserved(self) -> int:
        return 0


class _Patched:
    def restore(self) -> None:
        pass


def keep_patched() -> None:
    """Patch the language once.  The interpreter does so in every call of a function: 1 ms each."""
    import triton.language as tl
    from triton.runtime import interpreter

    if interpreter._patch_lang.__name__ == "_patch_lang":

        def both() -> None: ...

        both.__globals__.update(tl=tl, core=tl.core)
        interpreter._patch_lang(both)
        interpreter._patch_lang = lambda fn: _Patched()
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


if find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1":
    keep_patched()
