"""Transfers over torch.distributed within one rank: NCCL too, where there is a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from outrider.parallel.layout import Layout
from outrider.parallel.links import TorchLinks, add_parts

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
    assert (links.transfers, links.waiting) == (2, set())
