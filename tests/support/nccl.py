"""A stand-in for NCCL and CUDA's events: the host only queues transfers, and a test may cut them."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.parallel import links


class Wires:
    """Between ranks.  A transfer is complete once both GPUs have come to it, unless its wire is cut.

    most: transfers that may complete
    """

    def __init__(self) -> None:
        self.cut, self.most = set[tuple[int, int]](), 1 << 30
        self.streams = defaultdict[int, list["Work"]](list)  # what the GPU of each rank waits for
        self.ends = defaultdict[tuple[str, int, int], list["Work"]](list)
        self.groups, self.lock = list[Nccl](), threading.RLock()
        self._done = set[tuple[int, int, int]]()

    def complete(self, source: int, to: int, number: int) -> bool:
        """Whether the transfer of this number between two ranks is."""
        ends = [self.ends[end, source, to] for end in ("send", "recv")]
        there = min(map(len, ends)) > number and (source, to) not in self.cut
        there = there and all(work.is_completed() for end in ends for work in end[number].before)
        if there and len(self._done) < self.most:  # those before it count first
            self._done.add((source, to, number))
        return (source, to, number) in self._done


class Work:
    """A transfer.  `wait` holds up the stream only.  place: source and destination; None: complete."""

    def __init__(self, group: Nccl, end: str, place: tuple[int, int] | None = None) -> None:
        self.group, self.wires, self.place = group, group.wires, place
        with self.wires.lock:
            self.before = [*self.wires.streams[group.rank]]
            if place is not None:
                self.number = len(self.wires.ends[end, *place])
                self.wires.ends[end, *place].append(self)

    def wait(self) -> None:
        with self.wires.lock:
            self.wires.streams[self.group.rank].append(self)

    def is_completed(self) -> bool:
        with self.wires.lock:
            return self.group.aborted or self.place is None or self.wires.complete(*self.place, self.number)


class Event:
    """Of CUDA: complete once what the stream had been given before is."""

    def record(self, stream: list[Work]) -> None:
        self.before = [*stream]

    def query(self) -> bool:
        return all(work.is_completed() for work in self.before)


class Nccl:
    """A ProcessGroupNCCL: what it was made with, and what it was asked to transfer."""

    wires: Wires

    class Options:
        _timeout: Any = None

    def __init__(self, store: object, rank: int, size: int, options: Options) -> None:
        assert isinstance(options, Nccl.Options) and options._timeout is not None
        self.rank, self.size, self.aborted = rank, size, False
        self.asked = list[tuple[object, ...]]()
        self.wires.groups.append(self)

    def allgather(self, parts: list[list[Tensor]], own: list[Tensor]) -> Work:
        for i, part in enumerate(parts[0]):
            part.copy_(own[0] + i)
        self.asked.append(("allgather", len(parts[0])))
        return Work(self, "allgather")

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        self.asked.append(("send", len(tensors), to))
        return Work(self, "send", (self.rank, to))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        self.asked.append(("recv", len(tensors), source))
        return Work(self, "recv", (source, self.rank))

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Wires:
    """The wires of the stand-in, which is used for every GPU."""

    def refused(kind: object) -> None:
        raise AssertionError("a device of gloo on a GPU")

    wires = Wires()
    monkeypatch.setattr(Nccl, "wires", wires, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(links, "_network", refused)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: wires.streams[device.index])
    return wires
