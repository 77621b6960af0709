"""Weights in 4 bits whose values are looked up: the same bits as in 8 bits, in half the memory."""

from __future__ import annotations

import os

import pytest
import torch
from kernel_cases import c_backend, near, needs_c, two_threads
from torch import Tensor

from outrider.backends.cpu import bindings, build, targets
from outrider.backends.torch.backend import TorchBackend
from outrider.core.quantized import QuantizedWeight, join
from outrider.core.step_input import StepInput

CPU = torch.device("cpu")
E2M1 = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)
WIDE = (-128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some(
    outputs: int, inputs: int, levels: tuple[int, ...] = E2M1, group: int = 32, offsets: Tensor | None = None
) -> QuantizedWeight:
    values = torch.tensor(levels, dtype=torch.int8)[torch.randint(0, len(levels), (outputs, inputs))]
    scales = 2.0 ** torch.randint(-9, 3, (outputs, inputs // group)).float()
    return QuantizedWeight(values, scales, offsets, 4, group, levels)


def in_bytes(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.values, weight.scales, weight.offsets, 8, weight.group)


@needs_c
@pytest.mark.parametrize("levels", [E2M1, WIDE, (-5, 9)], ids=["e2m1", "wide", "two"])
@pytest.mark.parametrize("outputs", [1, 31, 32, 70])
def test_products_have_the_bits_of_those_in_8_bits(outputs: int, levels: tuple[int, ...]) -> None:
    backend, inputs = c_backend(torch.bfloat16), 1216
    weight, bias = some(outputs, inputs, levels), torch.randn(outputs)
    few, wide = backend.pack(weight, bias), backend.pack(in_bytes(weight), bias)
    for n in (*range(1, 18), 40, 70):
        x = torch.randn(n, inputs)
        expected = backend.linear(x, wide)
        assert torch.equal(backend.linear(x, few), expected), n
        with two_threads():
            assert torch.equal(backend.linear(x, few), expected), n
    assert few.data.nbytes == -(-outputs // 32) * 32 * inputs * 9 // 16
    assert few.data.nbytes / wide.data.nbytes == 4.5 / 8.5


@needs_c
def test_products_are_those_of_the_dense_weight() -> None:
    backend, weight = c_backend(torch.float32), some(70, 96)
    x = torch.randint(-127, 128, (9, 96)).float()  # the kernels round no such input
    x[:, ::32] = 127.0
    assert torch.equal(backend.linear(x, backend.pack(weight)), x @ weight.dense().T)


@needs_c
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_no_sum_of_products_overflows(rows: int) -> None:
    """Values and inputs of the largest magnitude, with every sign."""
    backend, values = c_backend(torch.float32), torch.full((8, 64), -128, dtype=torch.int8)
    values[1::2] = 127
    values[4:, ::2] = 1
    x = torch.ones(rows, 64)
    x[1::2] = -1.0
    weight = QuantizedWeight(values, torch.ones(8, 2), None, 4, 32, WIDE)
    assert torch.equal(backend.linear(x, backend.pack(weight)), x @ values.float().T)


@needs_c
def test_embeddings_are_those_of_the_dense_weight() -> None:
    weight, ids = some(70, 64), [0, 69, 33, 33, 5]
    for backend in (c_backend(torch.float32), TorchBackend(CPU, torch.float32)):
        found = backend.embed(backend.pack(weight), StepInput.of_ids(ids))
        assert torch.equal(found, weight.dense()[ids])


@needs_c
@pytest.mark.parametrize(
    ("group", "offsets"), [(16, None), (64, None), (32, torch.ones(40, 6))], ids=["16", "64", "offsets"]
)
def test_other_groups_and_offsets_are_right_too(group: int, offsets: Tensor | None) -> None:
    backend, weight = c_backend(torch.float32), some(40, 192, E2M1, group, offsets)
    x = torch.randn(5, 192)
    expected = backend.linear(x, backend.pack(in_bytes(weight)))
    packed = backend.pack(weight)
    assert torch.equal(backend.linear(x, packed), expected)
    assert (packed.levels is None) == (group != 64)


def test_joined_weights_keep_their_levels_where_all_have_the_same() -> None:
    parts = [
        some(3, 64),
        some(5, 64),
        some(2, 64, WIDE),
        QuantizedWeight(torch.ones(2, 64).to(torch.int8), torch.ones(2, 2), None, 4, 32),
    ]
    for count, bits in ((1, 4), (2, 4), (3, 8)):
        whole = join(parts[:count], torch.float32)
        assert isinstance(whole, QuantizedWeight) and whole.bits == bits
        assert whole.levels == (E2M1 if bits == 4 else ())
        assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts[:count]]))
    mixed = join(parts[::3], torch.float32)
    assert isinstance(mixed, QuantizedWeight) and mixed.bits == 8


@needs_c
@pytest.mark.full  # builds two libraries; scripts/check runs all of this file with each of them
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_look_up_the_same_values(isa: str) -> None:
    made = build.recipe({})
    if isa not in targets.available() or (other := build.recipe({"OUTRIDER_ISA": isa})) == made:
        pytest.skip("not another set of this processor")
    library = build.load(other, os.environ)
    assert library is not None
    ours = c_backend(torch.float32)
    theirs = type(ours)(bindings.declare(library), torch.float32)
    for levels in (E2M1, WIDE):
        weight, x = ours.pack(some(70, 96, levels)), torch.randn(9, 96)
        near(theirs.linear(x, weight), ours.linear(x, weight), 1e-5)
