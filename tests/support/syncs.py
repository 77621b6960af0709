"""What would stop the host until a device has finished."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Syncs(TorchFunctionMode):
    """Records what would wait for a device: numbers that Python reads from a tensor."""

    NAMES = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        masks = name == "__getitem__" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool
        if name in self.NAMES or masks or (name == "to" and "cpu" in args):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
