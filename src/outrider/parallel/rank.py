"""The process of a rank other than 0: it loads its part and runs the commands of rank 0.

`python -m outrider.parallel.rank` starts the ranks of one machine for `start.Local`: it imports torch once
and forks.  Its standard input is open as long as rank 0 lives; at its end all ranks are killed, frozen ones
too.

    rank 0 ──Setup──▶ load ──Report──▶ rank 0 ──all have loaded──▶ links ──▶ commands, until the end

A command `LOAD` adds another model, such as a draft that is divided like the target.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.parallel.layout import Layout
from outrider.parallel.links import Links, SocketLinks, TorchLinks
from outrider.parallel.messages import (
    BEAT_INTERVAL,
    MessageKind,
    Report,
    Setup,
    pinned_device,
    receive,
    send,
    versions,
)
from outrider.parallel.stage import LOAD, Activity, Stage, Stages

GRACE = 5.0  # seconds for this process to end by itself once rank 0 has ended


class RankProcess:
    """One rank and its connection to rank 0.

    local_rank: number on this machine; links: makes those of this rank, once all have loaded
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        rank: int,
        local_rank: int,
        links: Callable[[Layout, torch.device], Links],
    ) -> None:
        self.connection, self.rank, self.local_rank = connection, rank, local_rank
        self.links = links
        self._stages: Stages | None = None
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until rank 0 ends the connection.  An error ends this rank, and rank 0 learns of it."""
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            self._send(MessageKind.HELLO, self.rank, versions())
            self._serve(receive(self.connection))
        except (EOFError, ConnectionError, TimeoutError):
            pass  # rank 0 has ended, or its network
        except Exception as error:
            expected = isinstance(error, OutriderError)
            self._send(MessageKind.FAILED, error if expected else f"{type(error).__name__}: {error}")

    def _load(self, setup: Setup) -> Stage:
        torch.set_num_threads(setup.threads)
        weights, fingerprint = setup.open()
        device = pinned_device(torch.device(setup.options.device), self.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where Triton launches kernels; `backend_for` reads it
        stage = Stage(weights, setup.options, self.rank, device)
        self._send(MessageKind.READY, Report.of(stage, fingerprint))
        return stage

    def _serve(self, setup: Setup) -> None:
        stage = self._load(setup)
        receive(self.connection)  # all have loaded
        stages = self._stages = Stages(self.links(setup.options.layout, stage.backend.device))
        stages.add(0, stage)
        while (command := receive(self.connection)) is not None:
            number, name, args = command
            if name == LOAD:
                if self.rank < args[0].options.layout.size:
                    stages.add(number, self._load(*args))
            else:
                stages.run(number, name, *args)

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            send(message, self.connection)

    def _beat(self) -> None:
        """Send heartbeats to rank 0; end this process if rank 0 cannot be reached."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT_INTERVAL)
                activity = Activity() if self._stages is None else self._stages.activity
                with self._sending:
                    send((MessageKind.BEAT, activity), self.connection)
        time.sleep(GRACE)
        os._exit(1)  # a transfer may block for minutes


@dataclass(frozen=True)
class Sockets:
    """Sockets of one rank, as file descriptors: to rank 0 for commands, and those of `SocketLinks`.

    port: of the store of rank 0, for GPUs
    """

    rank: int
    port: int
    control: int
    sums: Mapping[int, int]
    direct: Mapping[int, int]

    @property
    def descriptors(self) -> list[int]:
        return [self.control, *self.sums.values(), *self.direct.values()]

    def links(self, layout: Layout, device: torch.device) -> Links:
        if device.type == "cuda":
            library: Any = torch.distributed
            store = library.TCPStore("127.0.0.1", self.port, is_master=False)
            return TorchLinks(layout, self.rank, device, store)
        sums, direct = (
            {peer: socket.socket(fileno=descriptor) for peer, descriptor in each.items()}
            for each in (self.sums, self.direct)
        )
        return SocketLinks(layout, self.rank, sums, direct)


def main(everyone: Sequence[Sockets]) -> None:
    """Fork the ranks that have these sockets; kill them when stdin ends."""
    children = []
    descriptors = {each for sockets in everyone for each in sockets.descriptors}
    gc.freeze()  # a collection in a rank would write to the pages of all objects, and so copy them
    for own in everyone:
        child = os.fork()
        if child == 0:
            for other in descriptors.difference(own.descriptors):
                os.close(other)
            os.close(sys.stdin.fileno())
            RankProcess(Connection(own.control), own.rank, own.rank, own.links).run()
            os._exit(0)
        children.append(child)
    for descriptor in descriptors:
        os.close(descriptor)
    while os.read(sys.stdin.fileno(), 1):
        pass
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)  # without the interpreter's end, which takes longer than all of this


if __name__ == "__main__":
    main([Sockets(**given) for given in ast.literal_eval(sys.argv[1])])
