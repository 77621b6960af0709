"""The recurrences: bit for bit the same for chunks, single tokens and trees, and those of transformers."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import near, needs_c, two_threads
from recurrent_cases import (
    BACKENDS,
    Case,
    conv_case,
    delta_case,
    path_of,
    random_path,
    recurrence_of,
    scan_case,
)
from torch import Tensor
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from outrider.backends.recurrence import Path
from outrider.backends.torch.recurrence import TorchRecurrence

KINDS = ["conv", "conv without bias", "delta", "delta by dimension", "scan", "scan by dimension", "channels"]


def case_of(kind: str, rows: int, rng: random.Random) -> Case:
    torch.manual_seed(rng.randint(0, 1 << 30))
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16])
    if kind.startswith("conv"):
        taps = rng.choice([2, 3, 4, 4, 5])
        return conv_case(rows, rng.choice([1, 16, 37, 130]), taps, kind == "conv", rng.random() < 0.7, dtype)
    if kind == "channels":  # Mamba's: heads of one dimension, and more than a slice of them
        return scan_case(rows, rng.choice([3, 40, 300]), 1, (1, rng.choice([5, 16])), True, dtype)
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


@needs_c
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_c_is_the_reference_and_the_same_on_two_threads(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    path = random_path(rng, longest=90, most_nodes=30)
    case = case_of(kind, len(path), rng)
    outputs, memory = case.run(recurrence_of("C"), path)
    expected, expected_memory = case.run(TorchRecurrence(), path)
    near(outputs, expected, 3e-5 if outputs.dtype == torch.float32 else 1e-2)
    near(memory, expected_memory, 3e-5)
    with two_threads():
        again, again_memory = case.run(recurrence_of("C"), path)
    assert torch.equal(outputs, again) and torch.equal(memory, again_memory)


@needs_c
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_chunks_is_the_text_at_once(kind: str) -> None:
    """Each chunk with a tree behind it that is dropped."""
    for seed in range(6):
        rng, recurrence, length = random.Random(seed), recurrence_of("C"), 150
        case = case_of(kind, length, rng)
        outputs, memory = case.run(recurrence, chain(length))
        found, own, at = [], case.memory.clone(), 0
        while at < length:
            count = min(rng.choice([1, 2, 15, 16, 17, 40]), length - at)
            nodes = rng.randint(0, 5)
            rows = [*range(at, at + count), *[rng.randrange(length) for _ in range(nodes)]]
            parents = [*range(-1, count - 1), *[rng.randrange(count - 1, count + i) for i in range(nodes)]]
            path = Path(parents, [3] * len(rows), [row == count - 1 for row in range(len(rows))])
            found.append(case.call(recurrence, [x[rows] for x in case.inputs], path, own)[:count])
            at += count
        assert torch.equal(torch.cat(found), outputs) and torch.equal(own, memory)


def chain(length: int) -> Path:
    return Path(range(-1, length - 1), [3] * length, [row == length - 1 for row in range(length)])


def test_paths_that_no_forest_has_are_refused() -> None:
    for parent, slot in (([0], [1]), ([-1, 1], [0, 0]), ([-2], [0]), ([-1, 0], [0, 1]), ([-1], [-1])):
        with pytest.raises(ValueError, match="cannot follow row"):
            Path(parent, slot, [0] * len(parent))
    with pytest.raises(ValueError, match="saved twice"):
        Path([-1, 0], [0, 0], [1, 1])
    for copies in ({0: 0}, {1: 5, 0: 5}, {0: -1}):
        with pytest.raises(ValueError, match="of a copy is that of a row, or of another copy"):
            Path([-1, 0], [0, 0], [0, 1], (), copies)
    with pytest.raises(ValueError, match="one entry per row"):
        Path([-1], [0], [])


@needs_c
def test_c_refuses_what_it_cannot_read() -> None:
    recurrence, path, x = recurrence_of("C"), chain(2), torch.randn(2, 2, 4)
    gates, states = torch.rand(2, 2), torch.zeros(4, 2, 4, 4)
    with pytest.raises(ValueError, match="no slot 3 among 3"):
        recurrence.gated_delta(x, x, x, gates, gates, path, states[:3])
    with pytest.raises(ValueError, match=r"beta has shape \(1, 2\), not \(2, 2\)"):
        recurrence.gated_delta(x, x, x, gates, gates[:1], path, states)
    with pytest.raises(ValueError, match="states must be contiguous and float32"):
        recurrence.gated_delta(x, x, x, gates, gates, path, states.double())
    with pytest.raises(ValueError, match="must be a multiple of those of the keys"):
        wide = torch.randn(2, 3, 4)
        recurrence.gated_delta(wide, wide, x, gates, gates, path, states)
    with pytest.raises(ValueError, match="a state has 1 to 512 dimensions"):
        long = torch.randn(2, 2, 513)
        recurrence.gated_delta(long, long, x, gates, gates, path, torch.zeros(4, 2, 4, 513))
    with pytest.raises(ValueError, match="tails has shape"):
        recurrence.short_conv(x[:, 0], torch.rand(4, 4), None, None, path, torch.zeros(4, 2, 4))


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
