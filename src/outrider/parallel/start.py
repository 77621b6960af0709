"""Start of the other ranks, and rank 0's connections to them.

Local   processes of this machine, started and ended by rank 0
Placed  processes that a launcher has started, on any number of machines, with RANK, WORLD_SIZE, MASTER_ADDR
        and MASTER_PORT in their environment.  torchrun runs the same program in each, and all but rank 0
        call `join`.  ray.py starts tasks that call `run_rank`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from outrider.errors import ConfigError, RankError
from outrider.parallel.layout import Layout
from outrider.parallel.links import Links, SocketLinks, TorchLinks
from outrider.parallel.rank import RankProcess, Sockets

JOIN_TIMEOUT = 60.0  # seconds for all ranks of a launcher to connect
CONTROL = "outrider/control"  # key in the store of the address where rank 0 listens
END_TIMEOUT = 10.0  # seconds
LOST = 8.0  # seconds without an acknowledgement after which another rank treats its network as lost


class Ranks(Protocol):
    """The other ranks, and the connections to rank 1, 2, …"""

    connections: list[Connection[Any, Any]]

    def links(self, device: torch.device) -> Links:
        """Links of rank 0, once all ranks have loaded."""

    def end(self) -> None:
        """End all ranks, frozen ones too."""


class Local:
    """Ranks that are processes of this machine, with `threads` threads each."""

    def __init__(self, layout: Layout, device: torch.device, threads: int) -> None:
        self.layout, ranks, port = layout, range(layout.size), 0
        if device.type == "cuda":
            library: Any = dist
            self.store = library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.store.port
        control, sums, direct = (_Mesh(layout.size) for _ in range(3))
        for low, high in itertools.combinations(ranks, 2):
            if low == 0:
                control.join(low, high)
            if layout.stage(low) == layout.stage(high):
                sums.join(low, high)
            if layout.linked(low, high):
                direct.join(low, high)
        everyone = [
            Sockets(
                rank, port, control.descriptors(rank)[0], sums.descriptors(rank), direct.descriptors(rank)
            )
            for rank in ranks[1:]
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider.parallel.rank", repr([vars(sockets) for sockets in everyone])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[each for sockets in everyone for each in sockets.descriptors],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C is for rank 0
        )
        for mesh in (control, sums, direct):
            mesh.keep(0)
        self.connections = [Connection(control.sockets[0][rank].detach()) for rank in ranks[1:]]
        self.sums, self.direct = sums.sockets[0], direct.sockets[0]

    def links(self, device: torch.device) -> Links:
        if device.type == "cuda":
            return TorchLinks(self.layout, 0, device, self.store)
        return SocketLinks(self.layout, 0, self.sums, self.direct)

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for connection in self.connections:
            connection.close()
        for sock in (*self.sums.values(), *self.direct.values()):
            sock.close()


class _Mesh:
    """Pairs of sockets between ranks.  sockets[rank][other]: this rank's end."""

    def __init__(self, size: int) -> None:
        self.sockets: list[dict[int, socket.socket]] = [{} for _ in range(size)]

    def join(self, rank: int, other: int) -> None:
        self.sockets[rank][other], self.sockets[other][rank] = socket.socketpair()

    def descriptors(self, rank: int) -> dict[int, int]:
        return {other: sock.fileno() for other, sock in self.sockets[rank].items()}

    def keep(self, rank: int) -> None:
        """Close all ends but those of one rank."""
        for other, ends in enumerate(self.sockets):
            for sock in ends.values() if other != rank else ():
                sock.close()


class Placed:
    """Ranks that a launcher has started."""

    def __init__(self, layout: Layout) -> None:
        check_launched(layout)
        self.layout, size = layout, layout.size
        self.store = _environment_store()
        listener = _listener()
        key = secrets.token_hex()
        host = os.environ["MASTER_ADDR"]
        self.store.set(CONTROL, f"{host} {listener.getsockname()[1]} {key}")
        self.connections = [_accept(listener, key.encode(), size) for _ in range(1, size)]
        listener.close()

    def links(self, device: torch.device) -> Links:
        return TorchLinks(self.layout, 0, device, self.store)

    def end(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a blocked `send` returns, which close lets be
                socket.socket(fileno=os.dup(connection.fileno())).shutdown(socket.SHUT_RDWR)


def start(layout: Layout, device: torch.device, threads: int) -> Ranks:
    """Start the other ranks of this machine, or connect to those of a launcher."""
    if placed() is not None:
        return Placed(layout)
    if os.name == "nt":
        raise ConfigError("several ranks need torchrun on Windows: start them with it.")
    return Local(layout, device, threads)


def placed() -> int | None:
    """This process's rank among those of a launcher; None if it has none."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ
    return int(os.environ["RANK"]) if several and "RANK" in os.environ else None


def check_launched(layout: Layout) -> None:
    """Raise ConfigError if a launcher has started another number of processes than a model has ranks."""
    if placed() is not None and (world := int(os.environ["WORLD_SIZE"])) != layout.size:
        raise ConfigError(
            f"the launcher started {world} processes (WORLD_SIZE), and tensor_parallel_size times "
            f"pipeline_parallel_size is {layout.size}: make them equal."
        )


def join() -> NoReturn:
    """Run the rank that a launcher made this process, and exit with it.

    Without the interpreter's end: threads of torch may abort there.
    """
    run_rank()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_rank() -> None:
    """Serve rank 0 as the rank that the environment names, until rank 0 ends."""
    store = _environment_store()
    host, port, key = store.get(CONTROL).decode().split()
    sock = socket.create_connection((host, int(port)), JOIN_TIMEOUT)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux.  Not on rank 0, which watches the beats: see group.py
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST))
    connection = _connection(sock)
    answer_challenge(connection, key.encode())
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    RankProcess(
        connection, rank, local_rank, lambda layout, device: TorchLinks(layout, rank, device, store)
    ).run()


def _listener() -> socket.socket:
    """A server for the other ranks, on all addresses of this machine."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0))
    listener.settimeout(JOIN_TIMEOUT)
    return listener


def _accept(listener: socket.socket, key: bytes, size: int) -> Connection[Any, Any]:
    try:
        sock, _ = listener.accept()
    except TimeoutError as error:
        raise RankError(
            f"not all of {size} ranks connected within {JOIN_TIMEOUT:.0f} seconds: each has to run this "
            "program."
        ) from error
    connection = _connection(sock)
    deliver_challenge(connection, key)
    return connection


def _connection(sock: socket.socket) -> Connection[Any, Any]:
    """The connection for commands and heartbeats."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(sock.detach())


def _environment_store() -> Any:
    library: Any = dist
    store, _, _ = next(iter(library.rendezvous("env://")))
    return store


def threads_of_rank(size: int, device: torch.device) -> int:
    """CPU threads of each of `size` ranks, which share this machine's."""
    if placed() is not None or device.type != "cpu":
        return torch.get_num_threads()
    return max(1, torch.get_num_threads() // size)
