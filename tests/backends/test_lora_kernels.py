"""LoRA updates by the C kernels: the torch formula, and the same bits for a row alone and on two threads."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from kernel_cases import c_backend, near, needs_c, two_threads
from torch import Tensor

from outrider.backends.cpu import lora
from outrider.core.lora import LowRankUpdate, Runs

SPEC = SimpleNamespace(hidden=250, inner=600, heads=6, kv_heads=2, head_dim=62)
WIDTH = 10 * 62  # q, k and v
RANKS = {"q": 7, "k": 4, "v": 33}


def updated(x: Tensor, y: Tensor, runs: Runs) -> Tensor:
    y, made = y.clone(), lora.rows(runs)
    c_backend().lib.add_lora(made, len(runs), 0, 3, x.data_ptr(), SPEC.hidden, y.data_ptr(), WIDTH)
    return y


@needs_c
def test_updates_are_the_formula_and_rows_are_independent() -> None:
    torch.manual_seed(0)
    outputs = {"q": 372, "k": 124, "v": 124}
    lows = {
        name: LowRankUpdate(torch.randn(rank, 250) / 16, torch.randn(outputs[name], rank), 0.5)
        for name, rank in RANKS.items()
    }
    adapters = [lora.pack(SPEC, [lows]), lora.pack(SPEC, [{"k": lows["k"]}])]
    x, y = torch.randn(90, 250), torch.randn(90, WIDTH)
    runs = [(1, 70, adapters[0]), (75, 3, adapters[1])]
    alone = y.clone()
    for first, count, adapter in runs:
        for r in range(first, first + count):
            alone[r : r + 1] = updated(x[r : r + 1], y[r : r + 1], [(0, 1, adapter)])
    for threads in (nullcontext(), two_threads()):
        with threads:
            assert torch.equal(updated(x, y, runs), alone)
    formula = torch.cat([0.5 * (x @ low.a.T) @ low.b.T for low in lows.values()], 1)
    near(alone[1:71], y[1:71] + formula[1:71], 1e-4)
    near(alone[75:78, 372:496], y[75:78, 372:496] + formula[75:78, 372:496], 1e-4)
    assert torch.equal(alone[71:75], y[71:75]) and torch.equal(alone[75:78, 496:], y[75:78, 496:])
