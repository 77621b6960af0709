"""Ranks that fail or end while they start, as rank 0 reports them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from patience import HANG

from outrider.errors import ModelError, RankError
from outrider.parallel.group import Group
from outrider.parallel.messages import MessageKind, send, versions

STAGE: Any = SimpleNamespace(options=SimpleNamespace(layout=SimpleNamespace(size=2)))
REPORT: Any = SimpleNamespace(facts={})
SETUP: Any = "a model"


class Ranks:
    """Two ranks without processes.  other: rank 1's end of the connection."""

    def __init__(self) -> None:
        own, other = Pipe()
        self.connections, self.other = [own], other

    def links(self, device: object) -> Any:
        raise AssertionError("not all ranks have loaded")

    def end(self) -> None:
        self.connections[0].close()


@pytest.fixture
def started() -> Iterator[tuple[Group, Connection[Any, Any]]]:
    """Rank 0's side and rank 1's connection.  Rank 1 has sent its versions."""
    ranks = Ranks()
    send((MessageKind.HELLO, 1, versions()), ranks.other)
    group = Group(ranks)
    yield group, ranks.other
    ranks.other.close()
    group.close()


def failed(group: Group) -> bool:
    """Wait until rank 0 knows that a rank has ended."""
    deadline = time.monotonic() + HANG
    while group.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return group.failure is not None


def test_the_error_of_a_rank_that_fails_before_rank_0_has_loaded(
    started: tuple[Group, Connection[Any, Any]],
) -> None:
    """That the rank has ended hid its reason."""
    group, other = started
    group.open(SETUP)
    send((MessageKind.FAILED, ModelError("a file is missing")), other)
    other.close()
    assert failed(group)
    with pytest.raises(ModelError, match="rank 1: a file is missing"):
        group.begin(STAGE, REPORT)


def test_a_rank_that_ends_before_it_loads(started: tuple[Group, Connection[Any, Any]]) -> None:
    """A broken pipe was raised."""
    group, other = started
    other.close()
    with pytest.raises(RankError, match="ended while it started"):
        group.open(SETUP)


def test_a_rank_that_ends_once_it_has_loaded(started: tuple[Group, Connection[Any, Any]]) -> None:
    group, other = started
    group.open(SETUP)
    send((MessageKind.READY, REPORT), other)
    other.close()
    assert failed(group)
    with pytest.raises(RankError, match="rank 1 has ended"):
        group.begin(STAGE, REPORT)
