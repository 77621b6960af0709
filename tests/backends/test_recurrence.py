"""The recurrences: bit for bit the same for chunks, single tokens and trees, and those of transformers."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import c_backend, near
from recurrent_cases import Case, conv_case, delta_case, path_of, random_path, scan_case
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from outrider.backends.cpu import backend as cpu
from outrider.backends.recurrence import Path, Recurrence
from outrider.backends.torch.recurrence import TorchRecurrence

BACKENDS = ["torch"] + ["C"] * (cpu.library() is not None)
KINDS = ["conv", "conv without bias", "delta", "delta by dimension", "scan", "scan by dimension"]


def recurrence_of(name: str) -> Recurrence:
    return TorchRecurrence() if name == "torch" else c_backend().recurrence


def case_of(kind: str, rows: int, rng: random.Random) -> Case:
    torch.manual_seed(rng.randint(0, 1 << 30))
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    if kind.startswith("conv"):
        taps = rng.choice([2, 3, 4, 4, 5])
        return conv_case(rows, rng.choice([1, 16, 37, 130]), taps, kind == "conv", rng.random() < 0.7, dtype)
    groups, repeats, by_dim = rng.randint(1, 3), rng.randint(1, 3), "by dimension" in kind
    sizes = rng.choice([(16, 8), (20, 13), (64, 64), (128, 128), (96, 21), (5, 1)])
    if kind.startswith("delta"):
        return delta_case(rows, (groups, groups * repeats), sizes, by_dim, dtype)
    return scan_case(rows, groups * repeats, groups, sizes[::-1], by_dim, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_rows_of_a_forest_are_those_of_calls_with_one_row(backend: str, kind: str, seed: int) -> None:
    rng, recurrence = random.Random(seed), recurrence_of(backend)
    path = random_path(rng)
    case = case_of(kind, len(path), rng)
    outputs, memory = case.run(recurrence, path)
    expected, expected_memory = case.alone(recurrence, path)
    assert torch.equal(outputs, expected) and torch.equal(memory, expected_memory)


def each_path(case: Case, path: Path) -> list[tuple[int, list[int], Tensor]]:
    """Of every row: its path, and the memory that the path begins with, zeros if its slot is fresh."""
    found = []
    for row in range(len(path)):
        stored = case.memory[path.slot[row]]
        found.append((row, path_of(path, row), stored * 0 if path.slot[row] in path.fresh else stored))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_delta_rule_is_that_of_transformers(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    path = random_path(rng)
    case = case_of("delta", len(path), rng)
    outputs, memory = case.run(recurrence_of(backend), path)
    for row, rows, stored in each_path(case, path):
        q, k, v, g, beta = (x[rows][None] for x in case.inputs)
        expected, state = qwen.torch_recurrent_gated_delta_rule(
            q, k, v, g, beta, stored.mT[None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        near(outputs[row], expected[0, -1], 1e-5 if q.dtype == torch.float32 else 1e-2)
        if path.save[row]:
            near(memory[path.slot[row]], state[0].mT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(4))
def test_scan_is_that_of_transformers(backend: str, seed: int) -> None:
    rng = random.Random(seed)
    path = random_path(rng)
    torch.manual_seed(seed)
    case = scan_case(len(path), heads := 6, 3, dims := (20, 37))
    outputs, memory = case.run(recurrence_of(backend), path)
    a, d = case.constants
    rates, skips = a[:, None, None].expand(heads, *dims), d[:, None].expand(heads, dims[0])
    for row, rows, stored in each_path(case, path):
        state = stored[None].clone()
        for at in rows:
            x, dt, b, c = (part[at : at + 1] for part in case.inputs)
            steps = dt[..., None].expand(1, heads, dims[0])
            expected = granite.mamba2_selective_state_update(state, x, steps, rates, b, c, skips)
        near(outputs[row], expected[0])
        if path.save[row]:
            near(memory[path.slot[row]], state[0])
