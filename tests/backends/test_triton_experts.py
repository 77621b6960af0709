"""A mixture of experts by the Triton kernels, beside its definition and among any other rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from launches import Launches
from syncs import Syncs
from torch import Tensor

from outrider.backends.layer import LayerExperts
from outrider.backends.torch.backend import TorchBackend
from outrider.checkpoints.quantize import quantize
from outrider.core.quantized import QuantizedWeight

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton import experts as kernels
from outrider.backends.triton.backend import TritonBackend
from outrider.backends.triton.elementwise import clamped_mul
from outrider.backends.triton.linear import FEW, MANY, TritonWeight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of masked lanes
H, INNER, COUNT = 40, 32, 7
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


class Mixture:
    """Random experts, dense and packed."""

    def __init__(
        self, dtype: torch.dtype, chosen: int = 3, normalized: bool = True, bits: tuple[int, ...] = (16,)
    ) -> None:
        """bits: of the experts in turn."""
        torch.manual_seed(chosen)
        self.backend = TritonBackend(DEVICE, dtype)
        self.chosen, self.normalized = chosen, normalized
        self.router = torch.randn(COUNT, H).to(dtype)
        weights = list[tuple[Tensor, Tensor]]()
        for _ in range(COUNT):
            weights.append((torch.randn(2 * INNER, H) / H**0.5, torch.randn(H, INNER) / INNER**0.5))
        few = [[_few(part, bits[i % len(bits)]) for part in pair] for i, pair in enumerate(weights)]
        self.dense = [[_dense(part).to(dtype).double() for part in pair] for pair in few]
        gate_up, down = ([self.backend.pack(pair[part]) for pair in few] for part in (0, 1))
        router = self.backend.pack(self.router)
        self.packed = self.backend.pack_experts(LayerExperts(router, gate_up, down, chosen, normalized))

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        own = x.clone()
        found = self.backend.add_mixture(own, u, self.packed)
        assert found is own
        return found

    def expected(self, x: Tensor, u: Tensor) -> Tensor:
        """The definition in float64, with the choice that logits in the dtype of the backend make."""
        out = x.double().cpu()
        for row, states in enumerate(u.cpu()):
            logits = (self.router.double() @ states.double()).to(u.dtype).float()
            weights, experts = torch.softmax(logits, 0).topk(self.chosen)
            for weight, e in zip(weights / weights.sum() if self.normalized else weights, experts):
                gate, up = (self.dense[e][0] @ states.double()).chunk(2)
                out[row] += weight * (self.dense[e][1] @ (F.silu(gate) * up))
        return out


def _few(weight: Tensor, bits: int) -> Tensor | QuantizedWeight:
    return weight if bits == 16 else quantize(weight, bits)


def _dense(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def rows_of(n: int, dtype: torch.dtype) -> Tensor:
    """Residual stream and inputs of n rows, [2, n, H]."""
    return torch.randn(2, n, H).to(DEVICE, dtype)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@each_dtype
@pytest.mark.parametrize(("chosen", "normalized"), [(1, False), (1, True), (3, True), (7, False)])
def test_experts_are_those_of_the_definition(chosen: int, normalized: bool, dtype: torch.dtype) -> None:
    mixture, (x, u) = Mixture(dtype, chosen, normalized), rows_of(5, dtype)
    near(mixture(x, u), mixture.expected(x, u), dtype)


@pytest.mark.parametrize("bits", [(8,), (4,), (16, 4, 8)], ids=str)
def test_experts_of_few_bits_keep_them(bits: tuple[int, ...]) -> None:
    """Those of several kinds in a layer are widened."""
    mixture, (x, u) = Mixture(torch.float32, bits=bits), rows_of(4, torch.float32)
    near(mixture(x, u), mixture.expected(x, u), torch.float32)
    assert (mixture.packed.down.scales is None) == (len(bits) > 1)
    assert mixture.packed.down.values.shape == (COUNT * H, INNER // 2 if bits == (4,) else INNER)


def test_biases_of_experts_are_added() -> None:
    mixture, (x, u) = Mixture(torch.float32, chosen=COUNT), rows_of(2, torch.float32)
    without, bias = mixture(x, u), torch.randn(COUNT * H, device=DEVICE)
    mixture.packed.down.bias = bias
    shares = torch.softmax(u.float() @ mixture.router.T.to(DEVICE), dim=-1)
    torch.testing.assert_close(mixture(x, u), without + shares @ bias.view(COUNT, H), rtol=1e-5, atol=1e-5)


@each_dtype
@pytest.mark.parametrize("bits", [16, 4])
def test_a_row_has_the_same_bits_among_any_others(bits: int, dtype: torch.dtype) -> None:
    """From one row to as many as make tiles of another shape."""
    mixture, (x, u) = Mixture(dtype, bits=(bits,)), rows_of(60, dtype)
    together, order = mixture(x, u), torch.randperm(60, device=DEVICE)
    assert 60 * mixture.chosen > FEW.rows * COUNT >= 19 * mixture.chosen
    assert torch.equal(mixture(x[order], u[order]), together[order])
    for first, rows in ((0, 1), (59, 1), (3, 2), (20, 7), (41, 19)):
        part = slice(first, first + rows)
        assert torch.equal(mixture(x[part], u[part]), together[part]), (first, rows)
    assert not torch.equal(together, x)


@each_dtype
def test_what_enters_down_is_clamped(dtype: torch.dtype) -> None:
    """As gpt-oss has it."""
    x = (torch.randn(3, 2 * 33) * 3).to(DEVICE, dtype)
    gate, up = x.double().cpu().chunk(2, dim=-1)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    near(clamped_mul(x, 1.702, 1.5), gate * torch.sigmoid(1.702 * gate) * (up + 1), dtype)
    mixture, (x, u) = Mixture(torch.float32), rows_of(2, torch.float32)
    before, mixture.packed = mixture(x, u), replace(mixture.packed, gate_slope=1.702, gate_limit=1.5)
    assert not torch.equal(mixture(x, u), before)


def test_experts_of_equal_logits_are_chosen_by_number() -> None:
    mixture, (x, u) = Mixture(torch.float32), rows_of(3, torch.float32)
    mixture.packed.router = mixture.backend.pack(torch.zeros(COUNT, H))
    expected = x.double().cpu()
    for gate_up, down in mixture.dense[:3]:
        gate, up = (u.double().cpu() @ gate_up.T).chunk(2, dim=-1)
        expected += (F.silu(gate) * up) @ down.T / 3
    near(mixture(x, u), expected, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_numbers_has_none_and_changes_no_other(value: float) -> None:
    mixture, (x, u) = Mixture(torch.float32), rows_of(4, torch.float32)
    expected = mixture(x, u)
    u[2] = value
    found = mixture(x, u)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


def test_no_number_is_read_and_the_launches_do_not_depend_on_the_choice() -> None:
    """So a graph can hold them.  And the reference, which reads, is seen to."""
    mixture, (x, u) = Mixture(torch.float32), rows_of(9, torch.float32)
    seen, kinds = Syncs(), []
    for inputs in (u, torch.zeros_like(u), -u):
        with seen, Launches() as launches:
            mixture(x, inputs)
        kinds.append(launches.seen)
    assert not seen.seen
    assert kinds[0] == kinds[1] == kinds[2]
    reference = TorchBackend(DEVICE, torch.float32)
    parts: Any = [[reference.pack(pair[part].float()) for pair in mixture.dense] for part in (0, 1)]
    given = LayerExperts(reference.pack(mixture.router), *parts, 3, True)
    with seen:
        expected = reference.add_mixture(x.clone(), u, given)
    assert seen.seen
    torch.testing.assert_close(mixture(x, u), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 9),
    rows=st.sampled_from([2, 4]),
    chunk=st.sampled_from([2, 16]),
    data=st.data(),
)
def test_pairs_are_sorted_into_tiles(count: int, rows: int, chunk: int, data: st.DataObject) -> None:
    """Each pair that has an expert is in one tile of it, in order."""
    numbers = data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CHUNK", chunk)
        given = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        order, tiles, _ = kernels._sorted(given, count, FEW._replace(rows=rows))
    found = defaultdict(list)
    for expert, first, pairs in tiles.tolist():
        assert 0 <= pairs <= rows
        if pairs:
            found[expert] += order[first : first + pairs].tolist()
    expected = defaultdict(list)
    for pair, expert in enumerate(numbers):
        if expert >= 0:
            expected[expert].append(pair)
    assert dict(found) == dict(expected)


@each_dtype
def test_tiles_have_the_sums_of_a_linear(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.same_as_linear(DEVICE, dtype)
    assert FEW.rows < MANY.rows
    multiply = kernels._multiply

    for packed in (False, True):  # weights of either kind are tried

        def shifted(x: Tensor, weight: TritonWeight, *rest: Any, packed: bool = packed) -> None:
            multiply(x + 1e-3 if weight.packed == packed else x, weight, *rest)

        monkeypatch.setattr(kernels, "_multiply", shifted)
        assert not kernels.same_as_linear.__wrapped__(DEVICE, dtype)
