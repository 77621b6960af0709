"""Rows of a block see the text before it and each other: in the step input, in C and in the reference."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest
import torch

from outrider.backends.base import LayerKV, Scores
from outrider.backends.select import backend_for
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput

HEADS, KV, D, EPS, WIDE, CPU = 4, 2, 24, 1e-5, torch.float64, torch.device("cpu")


@pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("window", [0, 3, 7])
def test_rows_of_a_block_see_the_text_and_each_other(window: int, kind: torch.dtype) -> None:
    compiled, plain = backend_for(CPU, torch.float32), TorchBackend(CPU, torch.float32)
    if type(compiled) is type(plain):
        pytest.skip("no compiler")
    torch.manual_seed(2)
    table, end, block = array("i", random.Random(3).sample(range(64), 40)), 11, 4
    turn = torch.randn(64, D)
    heads = SimpleNamespace(
        heads=HEADS, kv_heads=KV, head_dim=D, q_norm=torch.rand(D), k_norm=torch.rand(D), eps=EPS
    )
    alone = SimpleNamespace(**{**vars(heads), "heads": 0})
    context, rows = torch.randn(end, 2 * KV * D), torch.randn(block, (HEADS + 2 * KV) * D)
    output = []
    for run in (compiled, plain):
        pool, before, here = Pool(1, KV, D, 64, kind, CPU), StepInput(), StepInput()
        before.chain(table, 0, [0] * end)
        assert run.rope_store(context, alone, turn, LayerKV(before.build(), pool, 0)).numel() == 0
        here.block(table, end, table[end : end + block], [0] * block)
        q = run.rope_store(rows, heads, turn, LayerKV(here.build(), pool, 0))
        assert [*here.positions] == [*range(end, end + block)]
        assert [*here.slot_mapping] == [*table[end : end + block]]
        out = run.attend(q, heads, LayerKV(here, pool, 0), Scores(D**-0.5, window))
        keys, values = pool.read(0, torch.tensor(table[: end + block]), WIDE)
        queries = q[..., :D].to(WIDE)
        for b in range(block):
            sees = [s for s in range(end + block) if not window or s > end + b - window]
            for h in range(HEADS):
                weights = (keys[sees, h // 2] @ queries[b, h] * D**-0.5).softmax(0)
                expected = weights @ values[sees, h // 2]
                assert torch.allclose(
                    out[b, h * D : (h + 1) * D].to(WIDE),
                    expected,
                    atol=1e-5 if kind == torch.float32 else 0.05,
                )
        output.append(out)
    assert torch.allclose(*output, atol=1e-5 if kind == torch.float32 else 0.05)
