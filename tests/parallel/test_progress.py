"""The watch over ranks whose transfers GPUs complete, over a stand-in for NCCL: three stages in threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl import Wires, nccl
from patience import HANG

from outrider.errors import RankError
from outrider.parallel import group as groups
from outrider.parallel.group import Group
from outrider.parallel.layout import Layout
from outrider.parallel.links import Answer, TorchLinks
from outrider.parallel.messages import MessageKind, Report, receive, send, versions
from outrider.parallel.stage import Stages

__all__ = ["nccl"]
LAYOUT, BEAT = Layout(1, 3), 0.02


def links_of(rank: int) -> TorchLinks:
    return TorchLinks(LAYOUT, rank, torch.device("cuda", rank), dist.HashStore())


class Passing:
    """A stage whose one command passes a tensor on, from rank 0 over all others and back."""

    def __init__(self, rank: int) -> None:
        self.rank, self.last = rank, LAYOUT.size - 1
        self.options, self.backend = (
            SimpleNamespace(layout=LAYOUT),
            SimpleNamespace(device=torch.device("cuda", 0)),
        )
        self.links: Any = None

    def forward(self) -> Answer:
        x = torch.zeros(1)
        self.links.settle()
        if self.rank:
            self.links.receive(x, self.rank - 1)
        self.links.send(x, (self.rank + 1) % LAYOUT.size)
        return Answer() if self.rank else Answer({"x": x}, [self.links.expect(x, self.last)])


REPORT = Report({}, "here", torch.device("cuda", 0), 1, True)


def serve(connection: Connection[Any, Any], rank: int) -> None:
    """A rank, as `RankProcess` runs it."""

    def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                time.sleep(BEAT)
                with sending:
                    send((MessageKind.BEAT, stages.activity), connection)

    sending = threading.Lock()
    send((MessageKind.HELLO, rank, versions()), connection)
    receive(connection)
    send((MessageKind.READY, REPORT), connection)
    receive(connection)
    stages = Stages(links_of(rank))
    stages.add(0, Passing(rank))  # type: ignore[arg-type]
    threading.Thread(target=beat, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, name, args = receive(connection)
            stages.run(number, name, *args)


class Threads:
    """The other ranks."""

    def __init__(self) -> None:
        pipes = [Pipe() for _ in range(1, LAYOUT.size)]
        self.connections = [ours for ours, _ in pipes]
        for rank, (_, theirs) in enumerate(pipes, start=1):
            threading.Thread(target=serve, args=(theirs, rank), daemon=True).start()

    def links(self, device: torch.device) -> TorchLinks:
        return links_of(0)

    def end(self) -> None:
        for connection in self.connections:
            connection.close()


@pytest.fixture
def group(nccl: Wires, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(groups, "STALL", 0.5)
    made = Group(Threads())
    made.open(None)  # type: ignore[arg-type]
    made.begin(Passing(0), REPORT)  # type: ignore[arg-type]
    yield made
    made.close()


def test_two_other_gpus_that_lose_each_other_end_every_call(group: Group, nccl: Wires) -> None:
    """All hosts go on, and beat."""
    for _ in range(3):
        group.call(0, "forward").result(HANG)
    nccl.cut.add((1, 2))
    calls = [group.call(0, "forward") for _ in range(2)]
    for call in calls:
        with pytest.raises(RankError, match="no rank has got on"):
            call.result(HANG)
    with pytest.raises(RankError, match="two of them cannot reach each other"):
        group.call(0, "forward")
    group.close()
    own = [each for each in nccl.groups if each.rank == 0 and each.size == LAYOUT.size]
    assert own and own[0].aborted, "the GPU of rank 0 would stay busy"


def test_gpus_that_take_long_but_get_on_are_left_alone(
    group: Group, nccl: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that runs only between two transfers that the watch has seen."""
    nccl.most, began = 0, time.monotonic()
    clock = SimpleNamespace(now=began)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))

    def wait_until(seen: Callable[[], bool]) -> None:
        while not seen() and group.failure is None:
            assert time.monotonic() - began < HANG
            time.sleep(0.01)

    call = group.call(0, "forward")
    while not call.done():
        before, clock.now, nccl.most = group._before, clock.now + 0.6 * groups.STALL, nccl.most + 1
        wait_until(lambda: call.done() or group._before != before)  # noqa: B023
    assert call.result()["x"] is not None and clock.now - began > groups.STALL
    clock.now += 2 * groups.STALL  # and ranks without work are no loss
    wait_until(lambda: group._moved == clock.now)
    assert group.failure is None


def test_a_rank_counts_transfers_when_its_gpu_has_completed_them(nccl: Wires) -> None:
    first, second = links_of(0), links_of(1)
    thread, x = threading.get_ident(), torch.zeros(1)
    second.receive(x, 0)
    assert (second.progress.completed(), second.progress.waits(thread)) == (0, True)
    first.send(x, 1)
    assert (second.progress.completed(), second.progress.waits(thread)) == (1, False)


def test_a_result_comes_when_all_transfers_before_it_have(nccl: Wires) -> None:
    first, second = links_of(0), links_of(1)
    x, came = torch.zeros(1), threading.Event()
    first.receive(x, 2)
    arrive: Callable[[], object] = first.expect(x, 1)
    second.send(x, 0)
    waiting = threading.Thread(target=lambda: (arrive(), came.set()))
    waiting.start()
    assert not came.wait(0.1), "what rank 2 sends comes first"
    links_of(2).send(x, 0)
    assert came.wait(HANG)
    waiting.join()
    late = first.expect(x, 1)
    first.abort()
    first.all.aborted = False
    with pytest.raises(ConnectionError, match="ended"):
        late()
