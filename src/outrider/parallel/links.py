"""Tensors between ranks.

    SocketLinks  CPU ranks of one machine, over Unix sockets: a sum of two small parts takes 20 µs, and 480 µs
                 over gloo
    TorchLinks   torch.distributed: NCCL on GPUs, gloo on the CPUs of several machines

Sums are taken in the order of the ranks, on every rank: parts are gathered and added one after another.  An
all-reduce may add in an order that depends on the size of the tensor, and so on the other rows of a step.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import ConfigError
from outrider.parallel.layout import Layout
from outrider.parallel.progress import DeviceProgress, HostProgress, Progress

TIMEOUT = timedelta(minutes=10)  # of one transfer; ranks that died or froze are noticed by group.py
PIECE = 1 << 15  # bytes; two of them fit into the buffer of a socket


@dataclass
class Answer:
    """Tensors of a command on rank 0.  arrivals: calls that receive the rest of them, in order."""

    tensors: dict[Any, Tensor] = field(default_factory=dict)
    arrivals: list[Callable[[], object]] = field(default_factory=list)

    def wait(self) -> dict[Any, Tensor]:
        for arrive in self.arrivals:
            arrive()
        return self.tensors


class Links(Protocol):
    """Transfers of one rank.  Ranks of a pair send and receive in the same order.

    progress: of its transfers, which are not counted where no network can be lost
    """

    progress: Progress

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        """The parts of all ranks of the stage, in rank order."""

    def send(self, x: Tensor, to: int) -> None:
        """Send a tensor, which must not change before `settle`."""

    def settle(self) -> None:
        """Wait until all that was sent has left."""

    def receive(self, x: Tensor, source: int) -> None:
        """Receive into x, for what this rank computes next."""

    def expect(self, x: Tensor, source: int) -> Callable[[], object]:
        """Prepare to receive into x.  The result waits for it; it may run in another thread."""

    def abort(self) -> None:
        """End transfers that other ranks never complete."""


def add_parts(links: Links, x: Tensor, part: Tensor) -> Tensor:
    """x plus the parts of all ranks of the stage, in rank order and in float32.  May overwrite x."""
    total = x.float()
    for each in links.gather(part):
        total += each
    return total.to(x.dtype)


class SocketLinks:
    """sums: socket to every other rank of the stage; direct: to ranks that `send` and `expect` name."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        sums: Mapping[int, socket.socket],
        direct: Mapping[int, socket.socket],
    ) -> None:
        self.peers, self.rank, self.sums, self.direct = layout.peers(layout.stage(rank)), rank, sums, direct
        self.progress: Progress = HostProgress()

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        """Exchanged in pieces, so that no two ranks wait for each other with full buffers."""
        part = part.contiguous()
        parts = [part if peer == self.rank else torch.empty_like(part) for peer in self.peers]
        own = _bytes(part)
        others = [(self.sums[peer], _bytes(x)) for peer, x in zip(self.peers, parts) if peer != self.rank]
        for at in range(0, len(own), PIECE):
            for sock, _ in others:
                sock.sendall(own[at : at + PIECE])
            for sock, room in others:
                _fill(sock, room[at : at + PIECE])
        return parts

    def send(self, x: Tensor, to: int) -> None:
        self.direct[to].sendall(_bytes(x.contiguous()))

    def settle(self) -> None:
        pass

    def receive(self, x: Tensor, source: int) -> None:
        _fill(self.direct[source], _bytes(x))

    def expect(self, x: Tensor, source: int) -> Callable[[], object]:
        return lambda: self.receive(x, source)

    def abort(self) -> None:
        pass  # sockets end with the ranks


def _bytes(x: Tensor) -> memoryview:
    data: Any = x.view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def _fill(sock: socket.socket, room: memoryview) -> None:
    while room:
        count = sock.recv_into(room)
        if not count:
            raise ConnectionError("another rank has ended")
        room = room[count:]


class TorchLinks:
    """all: process group of all ranks, to send and receive.  stage: that of this stage, to gather.

    store: torch's key-value store, which all ranks reach.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device, store: Any) -> None:
        stage = layout.stage(rank)
        self.peers = layout.peers(stage)
        self._nccl = device.type == "cuda"
        self.progress: Progress = DeviceProgress(device) if self._nccl else HostProgress()
        self._sent: list[tuple[Any, Tensor]] = []  # a tensor must live until it has left
        self.all = _group(store, "all", rank, layout.size, device)
        self.stage = self.all
        if layout.pipeline > 1:
            self.stage = _group(store, f"stage {stage}", layout.index(rank), layout.tensor, device)

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        parts = [torch.empty_like(part) for _ in self.peers]
        self.progress.wait(self.stage.allgather([parts], [part.contiguous()]))
        return parts

    def send(self, x: Tensor, to: int) -> None:
        x = x.contiguous()
        self._sent.append((self.all.send([x], to, 0), x))

    def settle(self) -> None:
        for work, _ in self._sent:
            self.progress.wait(work)
        self._sent.clear()

    def receive(self, x: Tensor, source: int) -> None:
        self.progress.wait(self.all.recv([x], source, 0))

    def expect(self, x: Tensor, source: int) -> Callable[[], object]:
        return self.progress.result(self.all.recv([x], source, 0))

    def abort(self) -> None:
        """Only NCCL needs it: its kernels would keep the GPU, and a host that waits for it, busy."""
        self.progress.end()
        if self._nccl:
            groups = {id(group): group for group in (self.all, self.stage)}.values()
            self.all._group_start()  # all at once: one would wait for another
            for group in groups:
                group.abort()
            self.all._group_end()


def _group(store: Any, name: str, rank: int, size: int, device: torch.device) -> Any:
    """A process group of its own: torch's default group belongs to the program that uses Outrider."""
    library: Any = dist
    nccl = device.type == "cuda"
    kind = getattr(library, "ProcessGroupNCCL" if nccl else "ProcessGroupGloo", None)
    if kind is None:
        raise ConfigError(f"several ranks need a torch with {'NCCL' if nccl else 'gloo'}; this one has none.")
    options = kind.Options() if nccl else kind._Options()
    options._timeout = TIMEOUT
    if not nccl:
        options._devices = [_network(kind)]
    return kind(library.PrefixStore(name, store), rank, size, options)


def _network(kind: Any) -> Any:
    """gloo's device: the interface that GLOO_SOCKET_IFNAME names, or the one that leads to rank 0.

    gloo's own default is the address of the host's name, which other machines often cannot reach.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return kind.create_device(interface=interface)
    family, *_, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return kind.create_device(hostname=probe.getsockname()[0])
