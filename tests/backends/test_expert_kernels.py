"""A mixture of experts equals its definition, and a row has the same bits among any others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CPU, c_backend, near, needs_c, two_threads
from torch import Tensor

from outrider.backends.base import DecoderLayer, LayerExperts, LayerKV
from outrider.backends.cpu.backend import CpuBackend
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.checkpoints.quantize import quantize
from outrider.core.step_input import StepInput

H, INNER, EXPERTS, EPS = 96, 160, 11, 1e-6
BACKENDS = [pytest.param("c", marks=needs_c), "torch"]


def backend_of(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    return c_backend(dtype) if kind == "c" else TorchBackend(CPU, dtype)


class Layer:
    """A layer whose attention is skipped, and the dense weights of its experts."""

    def __init__(
        self,
        backend: Any,
        chosen: int,
        normalized: bool = True,
        bits: int | None = None,
        clamp: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """clamp: slope and limit of clamped gates; such a layer has biases, too."""
        torch.manual_seed(chosen)
        self.backend, self.chosen, self.normalized, self.clamp = backend, chosen, normalized, clamp
        self.router = torch.randn(EXPERTS, H)
        sizes = (EXPERTS, (EXPERTS, 2 * INNER), (EXPERTS, H))
        self.biases = [torch.randn(size) * (clamp[1] > 0) for size in sizes]
        self.gate_up = [torch.randn(2 * INNER, H) * H**-0.5 for _ in range(EXPERTS)]
        self.down = [torch.randn(H, INNER) * INNER**-0.5 for _ in range(EXPERTS)]

        def pack(weight: Tensor, bias: Tensor) -> Any:
            few = weight if bits is None else quantize(weight, bits)
            return backend.pack(few, bias if clamp[1] else None)

        experts = LayerExperts(
            backend.pack(self.router, self.biases[0] if clamp[1] else None),
            list(map(pack, self.gate_up, self.biases[1])),
            list(map(pack, self.down, self.biases[2])),
            chosen,
            normalized,
            *clamp,
        )
        names: Any = dict.fromkeys(("qkv", "o", "gate_up", "down", "norm_in", "q_norm", "k_norm"))
        sizes: Any = {"heads": 4, "kv_heads": 2, "head_dim": 16, "eps": EPS}
        self.norm = torch.rand(H) + 0.5
        layer = DecoderLayer(**names, **sizes, norm_post=self.norm, window=0, scale=0.25, experts=experts)
        shape: Any = SimpleNamespace(**sizes, hidden=H, inner=INNER)
        stack = backend.pack_layers(shape, [layer], torch.zeros(8, 16))
        self.stack = backend.skip_sublayers(stack, [1])

    def __call__(self, x: Tensor) -> Tensor:
        step, pool = StepInput.of_ids([0] * len(x)), Pool(1, 2, 16, len(x) + 1, torch.float32, CPU)
        found: Tensor = self.backend.run_layers(self.stack, x.clone(), LayerKV(step, pool))
        return found

    def expected(self, x: Tensor) -> Tensor:
        """The definition in float64, row by row."""
        out = x.double()
        for row, states in enumerate(F.rms_norm(x.double(), (H,), self.norm.double(), EPS)):
            probs = torch.softmax(self.router.double() @ states + self.biases[0], dim=0)
            weights, experts = probs.topk(self.chosen)
            for weight, e in zip(weights / weights.sum() if self.normalized else weights, experts):
                gate, up = (self.gate_up[e].double() @ states + self.biases[1][e]).chunk(2)
                inner = F.silu(gate) * up
                if limit := self.clamp[1]:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                    inner = gate * torch.sigmoid(self.clamp[0] * gate) * (up + 1)
                out[row] += weight * (self.down[e].double() @ inner + self.biases[2][e])
        return out


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    ("chosen", "normalized"), [(1, False), (1, True), (3, False), (3, True), (11, False)]
)
def test_experts_are_those_of_the_definition(kind: str, chosen: int, normalized: bool) -> None:
    layer, x = Layer(backend_of(kind), chosen, normalized), torch.randn(9, H)
    near(layer(x), layer.expected(x), 1e-4)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("limit", [0.7, 7.0])
def test_clamped_gates_and_biases_are_those_of_the_definition(kind: str, limit: float) -> None:
    layer, x = Layer(backend_of(kind), 3, clamp=(1.702, limit)), torch.randn(9, H)
    near(layer(x), layer.expected(x), 1e-4)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("clamp", [(0.0, 0.0), (1.7, 0.9)], ids=["silu", "clamped"])
@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 8), (torch.bfloat16, 4)],
)
def test_row_is_bit_identical_among_any_others(
    kind: str, dtype: torch.dtype, bits: int | None, clamp: tuple[float, float]
) -> None:
    backend = backend_of(kind, dtype)
    if not backend.exact:
        pytest.skip("promises nothing")
    layer, x = Layer(backend, 3, bits=bits, clamp=clamp), torch.randn(70, H).to(backend.activations)
    together = layer(x)
    order = torch.randperm(70)
    assert torch.equal(layer(x[order]), together[order])
    for rows in (1, 2, 3, 7, 19):
        for first in range(0, 70 - rows, 9):
            assert torch.equal(layer(x[first : first + rows]), together[first : first + rows])
    assert not torch.equal(together, x)


@needs_c
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_threads_change_no_bit(bits: int | None) -> None:
    layer, x = Layer(c_backend(torch.bfloat16), 3, bits=bits), torch.randn(33, H)
    one = [layer(x), layer(x[:1]), layer(x[:4])]
    with two_threads():
        assert all(torch.equal(a, layer(x[: len(a)])) for a in one)


@needs_c
def test_experts_of_equal_logits_are_chosen_by_number() -> None:
    layer, x = Layer(c_backend(), 3), torch.randn(4, H)
    equal = c_backend().pack(torch.zeros(EXPERTS, H))  # alive as long as the struct that points into it
    layer.stack.layers[0].router = equal.c
    states = F.rms_norm(x.double(), (H,), layer.norm.double(), EPS)
    expected = x.double()
    for gate_up, down in zip(layer.gate_up[:3], layer.down[:3]):
        gate, up = (states @ gate_up.double().T).chunk(2, dim=-1)
        expected += (F.silu(gate) * up) @ down.double().T / 3
    near(layer(x), expected, 1e-4)


@needs_c
@pytest.mark.parametrize("clamp", [(0.0, 0.0), (1.7, 0.9)], ids=["silu", "clamped"])
def test_a_row_without_numbers_has_experts_too(clamp: tuple[float, float]) -> None:
    layer, x = Layer(c_backend(), 3, clamp=clamp), torch.randn(4, H)
    x[2] = float("nan")
    found = layer(x)
    assert found[2].isnan().all() and torch.equal(found[:2], layer(x[:2])) and found[3].isfinite().all()


@needs_c
def test_no_rows_are_no_rows() -> None:
    assert isinstance(c_backend(), CpuBackend)
    assert Layer(c_backend(), 2)(torch.empty(0, H)).shape == (0, H)
