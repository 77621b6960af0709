"""Kernels of models that compute otherwise than Llama: GELU, soft caps, norms of what is added."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CPU, c_backend, near, needs_c, two_threads

from outrider.backends.torch.backend import TorchBackend


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    backend = c_backend()
    y = torch.empty(len(x), x.shape[1] // 2)
    backend.lib.gelu_mul(x.data_ptr(), len(x), y.shape[1], y.data_ptr())
    return y


@needs_c
@pytest.mark.parametrize("width", [1, 15, 64, 101])
def test_gelu_is_that_of_torch_and_each_row_its_own(width: int) -> None:
    x = torch.randn(9, 2 * width) * 4
    found = gelu_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    near(found, F.gelu(gate, approximate="tanh") * up)
    assert all(torch.equal(gelu_mul(x[r : r + 1].clone())[0], found[r]) for r in range(9))
    near(TorchBackend(CPU, torch.float32).gelu_mul(x), found)
    ends = torch.tensor([[-80.0, 90.0, 1.0, 1.0]])
    near(gelu_mul(ends), torch.tensor([[0.0, 90.0]]))


@needs_c
@pytest.mark.parametrize("width", [1, 15, 64, 101])
def test_clamped_gates_are_those_of_the_definition_and_each_row_its_own(width: int) -> None:
    def clamped(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(len(x), x.shape[1] // 2)
        c_backend().lib.clamped_mul(x.data_ptr(), len(x), y.shape[1], 1.702, 3.0, y.data_ptr())
        return y

    x = torch.randn(9, 2 * width) * 4
    found = clamped(x)
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=3), up.clamp(-3, 3)
    near(found, gate * torch.sigmoid(1.702 * gate) * (up + 1))
    assert all(torch.equal(clamped(x[r : r + 1].clone())[0], found[r]) for r in range(9))
    ends = torch.tensor([[-90.0, 90.0, 1.0, -50.0, 2.0, 2.0, 50.0, 2.0]])
    assert clamped(ends)[0, [0, 1]].tolist() == pytest.approx([0.0, 3 * 3 / (1 + 2.718281828**-5.106)])
    assert clamped(torch.full((1, 2), float("nan"))).isnan().all()


def test_no_rows() -> None:
    backend = TorchBackend(CPU, torch.float32)
    assert backend.gelu_mul(torch.empty(0, 8)).shape == (0, 4)
    assert backend.soft_cap(torch.empty(0, 8), 30.0).shape == (0, 8)


@needs_c
@pytest.mark.parametrize("width", [1, 63, 64, 300])
def test_a_soft_cap_is_the_scaled_tanh_with_maxima_of_blocks(width: int) -> None:
    backend, x, blocks = c_backend(), torch.randn(5, width) * 40, -(-width // 64)
    expected = 30 * torch.tanh(x.double() / 30)
    found, maxima = x.clone(), torch.empty(5, blocks + 2)
    backend.lib.soft_cap(found.data_ptr(), 5, width, 30.0, maxima.data_ptr(), blocks + 2)
    near(found, expected)
    for block in range(blocks):
        part = found[:, 64 * block : 64 * block + 64]
        assert torch.equal(maxima[:, block], part.max(dim=1).values)
    with two_threads():
        assert torch.equal(backend.soft_cap(x.clone(), 30.0), found)
    assert torch.equal(backend.soft_cap(x[3:4].clone(), 30.0)[0], found[3])
    near(TorchBackend(CPU, torch.float32).soft_cap(x, 30.0), found)
    far = torch.tensor([[1e9, -1e9, float("inf"), -float("inf")]])
    assert torch.equal(backend.soft_cap(far, 30.0), torch.tensor([[30.0, -30.0, 30.0, -30.0]]))


@needs_c
@pytest.mark.parametrize("width", [1, 15, 64, 101])
def test_what_is_added_is_normalized_first(width: int) -> None:
    backend, weight = c_backend(), torch.rand(width) + 0.5
    x, y = torch.randn(9, width), torch.randn(9, width)
    expected = x + backend.rms_norm(y, weight, 1e-6)
    sums, used = x.clone(), y.clone()
    backend.lib.add_normed(sums.data_ptr(), used.data_ptr(), weight.data_ptr(), 9, width, 1e-6)
    assert torch.equal(sums, expected)
