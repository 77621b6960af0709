"""Quantized weights in the torch kernels."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import near

from outrider.backends.torch import backend as torch_kernels
from outrider.backends.torch.backend import TorchBackend
from outrider.checkpoints.quantize import quantize
from outrider.core.quantized import QuantizedWeight


@pytest.mark.parametrize(
    ("most", "kept"), [(torch_kernels.MOST_WIDENED, [0, 1]), (70 * 64 * 4, [0]), (0, [])]
)
def test_torch_widens_weights_once_while_there_is_room(
    most: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_kernels, "MOST_WIDENED", most)
    backend, x = TorchBackend(torch.device("cpu"), torch.float32), torch.randn(3, 64)
    few = [quantize(torch.randn(70, 64), bits) for bits in (8, 4)]
    weights = [backend.pack(each) for each in few]
    for _ in range(2):
        for each, weight in zip(few, weights):
            assert isinstance(each, QuantizedWeight)
            near(backend.linear(x, weight), x @ each.dense().T, 1e-4)
    assert [i for i, weight in enumerate(weights) if weight.packed is not None] == kept


def test_the_room_of_a_widened_weight_comes_back_with_its_end() -> None:
    backend = TorchBackend(torch.device("cpu"), torch.float32)
    few = quantize(torch.randn(70, 64), 8)
    weight = backend.pack(few)
    backend.linear(torch.randn(2, 64), weight)
    assert backend.widened == 70 * 64 * 4
    del weight
    assert backend.widened == 0
