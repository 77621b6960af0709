"""Launches on a device, counted without one: operations, copies, kernels and replays of graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from interpreted import Rerun
from torch.utils._python_dispatch import TorchDispatchMode

# What makes another view of a tensor, or a tensor without a value: nothing is computed.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "empty", "empty_like",
    "expand", "lift_fresh", "new_empty", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what is launched outside of graphs, by name; a replay is one launch.

    Operations on host tensors count, too, for all tensors are on the CPU here.  Copies to a device that are
    made by `to` do not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.inside = Counter[str](), 0
        self.patches: list[Any] = []

    def note(self, name: str) -> None:
        if not self.inside:
            self.seen[name] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) not in VIEWS:
            self.note(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Launches:
        from triton.runtime.interpreter import InterpretedFunction

        grid = InterpretedFunction.__getitem__

        def launched(kernel: Any, size: Any) -> Callable[..., None]:
            def run(*args: Any, **named: Any) -> None:
                self.note(f"kernel {kernel.fn.__name__}")
                with self.hidden():
                    grid(kernel, size)(*args, **named)

            return run

        @contextmanager
        def replayed() -> Iterator[None]:
            self.note("replay")
            with self.hidden():
                yield

        self.patches = [
            mock.patch.object(InterpretedFunction, "__getitem__", launched),
            mock.patch.object(Rerun, "around", replayed),
        ]
        for patch in self.patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for patch in self.patches:
            patch.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Nothing counts inside."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
