"""Gates and norms of recurrent layers: the formulas, and the same bits for a row alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import near
from recurrent_cases import BACKENDS, recurrence_of
from torch import Tensor

Rows = Callable[[Tensor, Tensor], Tensor]


def check(expected: Tensor, function: Rows, x: Tensor, z: Tensor) -> None:
    got = function(x, z)
    near(got, expected, 3e-6)
    alone = [function(x[row : row + 1], z[row : row + 1]) for row in range(len(x))]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("width", [1, 48, 75])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gates(backend: str, width: int) -> None:
    torch.manual_seed(width)
    recurrence, bias = recurrence_of(backend), torch.randn(width)
    x, z = (part[:, :width] for part in (torch.randn(2, 21, 80) * 6).unbind())
    check(x.sigmoid(), lambda x, z: recurrence.sigmoid(x), x, z)
    check(F.softplus(x + bias), lambda x, z: recurrence.softplus(x, bias), x, z)
    clamped = F.softplus(x + bias).clamp(0.1, 2.0)
    check(clamped, lambda x, z: recurrence.softplus(x, bias, 0.1, 2.0), x, z)
    check(x * z.sigmoid(), lambda x, z: recurrence.gate(x, z, "sigmoid"), x, z)
    check(x * F.silu(z), lambda x, z: recurrence.gate(x, z, "silu"), x, z)


@pytest.mark.parametrize("width", [1, 48, 75])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_norms(backend: str, width: int) -> None:
    torch.manual_seed(width)
    recurrence, weight = recurrence_of(backend), torch.rand(width)
    x, z = (part[:, :width] for part in (torch.randn(2, 21, 80) * 6).unbind())
    normed = F.rms_norm(x, (width,), weight, 1e-6)
    check(normed * F.silu(z), lambda x, z: recurrence.gated_norm(x, z, weight, 1e-6), x, z)
    group = width // 3 or 1
    normed = F.rms_norm((x * z.sigmoid()).view(-1, width // group, group), (group,), None, 1e-5)
    check(
        normed.view(-1, width) * weight,
        lambda x, z: recurrence.gated_norm(x, z, weight, 1e-5, "sigmoid", group, gate_first=True),
        x,
        z,
    )
    heads = torch.randn(2, 5, 3, width).unbind()
    by_head = recurrence.gated_norm(*heads, weight, 1e-6)
    near(by_head, F.rms_norm(heads[0], (width,), weight, 1e-6) * F.silu(heads[1]), 3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softplus_far_below_and_above_zero(backend: str) -> None:
    x = torch.tensor([[-80.0, -30.0, -1e-3, 0.0, 19.0, 21.0, 1000.0]])
    got = recurrence_of(backend).softplus(x, torch.zeros(7))
    torch.testing.assert_close(got.double(), F.softplus(x.double()), rtol=3e-6, atol=0)
