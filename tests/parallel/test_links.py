"""Transfers over torch.distributed within one rank: NCCL too, where there is a GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl import Wires, nccl

from outrider import ConfigError
from outrider.parallel import rank as ranks
from outrider.parallel.layout import Layout
from outrider.parallel.links import SocketLinks, TorchLinks, add_parts
from outrider.parallel.rank import RankProcess, Sockets
from outrider.parallel.start import Local

__all__ = ["nccl"]
HAS_NCCL = torch.cuda.is_available() and dist.is_nccl_available()


@pytest.mark.parametrize(
    "kind", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_NCCL, reason="needs a GPU"))]
)
def test_one_rank_gets_its_own_parts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    links = TorchLinks(Layout(), 0, torch.device(kind), dist.HashStore())
    x, part = torch.rand(3, 5, device=kind), torch.rand(3, 5, device=kind)
    (own,) = links.gather(part)
    assert torch.equal(own, part) and own.data_ptr() != part.data_ptr()
    assert torch.equal(add_parts(links, x.clone(), part), x + part)
    links.settle()
    if kind == "cuda":
        torch.cuda.synchronize()
    assert links.progress.completed() == 2 and not links.progress.waits(threading.get_ident())


def test_gpu_ranks_transfer_over_nccl_alone(nccl: Wires) -> None:
    links: Any = TorchLinks(Layout(2, 2), 3, torch.device("cuda", 1), dist.HashStore())
    assert (links.all.rank, links.all.size, links.stage.rank, links.stage.size) == (3, 4, 1, 2)
    part = torch.arange(6.0).view(2, 3)
    assert torch.equal(add_parts(links, torch.zeros(2, 3), part), 2 * part + 1)
    links.send(part, 1)
    links.receive(part, 0)
    links.settle()
    assert links.stage.asked == [("allgather", 2)]
    assert links.all.asked == [("send", 1, 1), ("recv", 1, 0)]


@pytest.mark.parametrize(("kind", "links"), [("cuda", TorchLinks), ("cpu", SocketLinks)])
def test_ranks_of_one_machine_use_sockets_on_cpus_only(nccl: Wires, kind: str, links: type[Any]) -> None:
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first: Any = object.__new__(Local)
    first.layout, first.store, first.sums, first.direct = Layout(2), store, {}, {}
    other = Sockets(1, store.port, 0, {}, {})
    for made in (first.links(torch.device(kind)), other.links(Layout(2), torch.device(kind))):
        assert type(made) is links


def test_a_rank_makes_its_gpu_the_current_one_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, kernels of Triton are not used on any GPU but the first."""
    seen = list[object]()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(ranks, "Stage", lambda weights, options, rank, device: seen.append((rank, device)))
    monkeypatch.setattr(ranks.Report, "of", lambda *given: None)
    setup: Any = SimpleNamespace(
        threads=torch.get_num_threads(), open=lambda: (None, None), options=SimpleNamespace(device="cuda")
    )
    connection: Any = SimpleNamespace(send_bytes=lambda data: None)
    RankProcess(connection, 3, 1, lambda layout, device: None)._load(setup)
    assert seen == [torch.device("cuda", 1), (3, torch.device("cuda", 1))]
    with pytest.raises(ConfigError, match="this machine has 2 GPUs, too few for rank 2"):
        RankProcess(connection, 4, 2, lambda layout, device: None)._load(setup)
