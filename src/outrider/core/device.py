"""Copies between host and device that do not wait for what the device computes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device.

    CUDA has read memory that is not pinned when it returns.  Elsewhere a copy under way could outlive the
    tensor.
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def wait_for(device: torch.device) -> None:
    """Wait until a device has completed all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Numbers(NamedTuple):
    """int64 numbers on the host, of shape [n, …], row by row."""

    values: array[int]
    shape: tuple[int, ...]

    @staticmethod
    def of(values: Iterable[int], *shape: int) -> Numbers:
        """Numbers of this shape from their values, row by row."""
        made = array("q", values)
        assert len(made) == math.prod(shape)
        return Numbers(made, shape)

    def on(self, device: torch.device) -> Tensor:
        """Tensor int64 of this shape on a device."""
        if not self.values:
            return torch.empty(self.shape, dtype=torch.int64, device=device)
        return to_device(torch.frombuffer(self.values, dtype=torch.int64).view(self.shape), device)


class HostCopy:
    """Asynchronous copy of a tensor to the host, begun by the constructor.  Reading it waits."""

    def __init__(self, tensor: Tensor) -> None:
        self.numbers = tensor
        self.done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.numbers = pinned.copy_(tensor, non_blocking=True)
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[int]:
        """The numbers of a tensor [n]."""
        if self.done is not None:
            self.done.synchronize()
        numbers: list[int] = self.numbers.tolist()
        return numbers


class DeviceEvent:
    """CUDA event recorded on the current stream.  Without effect on other devices."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.reached: torch.cuda.Event | None = None
        if device is not None and device.type == "cuda":
            self.reached = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.reached.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device has reached the event."""
        if self.reached is not None:
            self.reached.synchronize()
            self.reached = None


def power_of_two(n: int) -> int:
    """Smallest power of two of at least n.  Rounded sizes need fewer recorded graphs."""
    return 1 << max(0, n - 1).bit_length()


def take(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of x [n, …] with these numbers, ascending; x itself if these are all."""
    if len(rows) == len(x):
        return x
    return x.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), x.device))


def beside(parts: Sequence[Tensor]) -> Tensor | None:
    """Tensors [n, width] side by side, as a view; None unless they are neighbouring columns of one tensor."""
    first, width = parts[0], 0
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.stride() != first.stride():
            return None
        if part.storage_offset() != first.storage_offset() + width:
            return None
        width += part.shape[1]
    return first if len(parts) == 1 else first.as_strided((len(first), width), first.stride())
