"""Weights and K/V in few bits: what the numbers mean, what they weigh, and that rows stay independent."""

from __future__ import annotations

import os
import random
from array import array
from typing import Any

import pytest
import torch
from kernel_cases import LAYOUTS, SLOTS, c_backend, heads_of, near, needs_c, pools, random_plan, two_threads
from torch import Tensor

from outrider.backends.base import LayerKV, Scores
from outrider.backends.cpu import bindings, build, structs, targets
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.quantize import quantize
from outrider.checkpoints.weights import Weights
from outrider.core.quantized import QuantizedWeight, join
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision

CPU = torch.device("cpu")
FORMS = [
    (8, False, 32),
    (8, True, 32),
    (4, False, 32),
    (4, True, 32),
    (8, False, 16),
    (4, True, 16),
    (4, True, 128),
    (8, False, 96),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some(outputs: int, inputs: int, bits: int = 8, offsets: bool = False, group: int = 32) -> QuantizedWeight:
    """Random values of the whole range, with scales and offsets that float16 holds, some negative."""
    least, groups = -(2 ** (bits - 1)), inputs // group
    values = torch.randint(least, -least, (outputs, inputs), dtype=torch.int8)
    scales = (torch.randn(outputs, groups) * 0.01).half().float()
    return QuantizedWeight(
        values, scales, torch.randn(outputs, groups).half().float() if offsets else None, bits, group
    )


def rounded(x: Tensor, group: int) -> Tensor:
    """Activations as the kernels round them: 8 bits, every row and group by itself."""
    parts = x.view(x.shape[0], -1, group)
    top = parts.abs().amax(-1, keepdim=True)
    return ((parts.double() * (127 / top).double()).round() * (top / 127).double()).flatten(1)


def ids_plan(ids: list[int]) -> StepInput:
    step_input = StepInput()
    step_input.chain(array("i", range(len(ids))), 0, ids)
    return step_input.build()


# ---- linear


@needs_c
@pytest.mark.parametrize(("bits", "offsets", "group"), FORMS)
@pytest.mark.parametrize("outputs", [1, 31, 32, 70])
def test_linear_equals_the_dense_product(outputs: int, bits: int, offsets: bool, group: int) -> None:
    backend, inputs = c_backend(torch.bfloat16), 3 * group
    weight, bias = some(outputs, inputs, bits, offsets, group), torch.randn(outputs)
    packed = backend.pack(weight, bias)
    for n in (1, 2, 5, 6, 7, 8, 13):
        x, base = torch.randn(n, inputs), torch.randn(n, outputs)
        exact = rounded(x, 32 if group % 32 == 0 else 16) @ weight.dense().double().T
        near(backend.linear(x, backend.pack(weight)), exact, 1e-4)
        added = base.clone()
        assert backend.linear(x, packed, add=added) is added
        near(added, base + exact + bias, 1e-4)


@needs_c
@pytest.mark.parametrize(("bits", "most"), [(8, 0.011), (4, 0.1)])
def test_rounding_activations_adds_little_error(bits: int, most: float) -> None:
    """Activations in 8 bits add about the error of weights in 8 bits, and hardly any to weights in 4."""
    weight, x = torch.randn(200, 384), torch.randn(32, 384)
    few, backend = quantize(weight, bits), c_backend(torch.float32)
    exact, kept = (
        x.double() @ weight.double().T,
        few.dense().double() if isinstance(few, QuantizedWeight) else weight,
    )
    got = backend.linear(x, backend.pack(few)).double()
    assert (got - exact).norm() < most * exact.norm()
    assert (got - x.double() @ kept.T).norm() < 0.008 * exact.norm()


@needs_c
def test_groups_that_the_vectors_cannot_follow_are_widened() -> None:
    weight, x = some(20, 60, 8, True, 12), torch.randn(3, 60)
    backend = c_backend(torch.float32)
    near(backend.linear(x, backend.pack(weight)), x @ weight.dense().T, 1e-4)


@needs_c
@pytest.mark.parametrize("size", [2.0**-100, 2.0**-30, 1.0, 2.0**30])
def test_scales_of_any_size(size: float) -> None:
    """Half precision alone would lose them below 1e-7 and above 65504."""
    weight, x = some(40, 64), torch.randn(3, 64)
    weight = QuantizedWeight(weight.values, weight.scales * size, None, 8, 32)
    backend = c_backend(torch.float32)
    near(
        backend.linear(x, backend.pack(weight)) / size,
        rounded(x, 32) @ (weight.dense().double() / size).T,
        1e-3,
    )


@needs_c
@pytest.mark.parametrize(("bits", "offsets", "group"), FORMS)
def test_quantized_embeddings_equal_the_dense_ones(bits: int, offsets: bool, group: int) -> None:
    weight, ids = some(70, 2 * group, bits, offsets, group), [0, 69, 33, 33, 5]
    expected = weight.dense()[ids]
    near(c_backend(torch.float32).embed(c_backend(torch.float32).pack(weight), ids_plan(ids)), expected, 1e-6)
    torch_backend = TorchBackend(CPU, torch.float32)
    near(torch_backend.embed(torch_backend.pack(weight), ids_plan(ids)), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "offsets", "group"), FORMS[:4])
def test_torch_linear_of_quantized_weights_equals_the_dense_product(
    bits: int, offsets: bool, group: int, dtype: torch.dtype
) -> None:
    backend, weight, bias = TorchBackend(CPU, dtype), some(40, 96, bits, offsets, group), torch.randn(40)
    x = torch.randn(5, 96).to(dtype)
    expected = x.double() @ weight.dense().to(dtype).double().T + bias
    near(backend.linear(x, backend.pack(weight, bias)), expected, 1e-4 if dtype == torch.float32 else 0.1)


@needs_c
@pytest.mark.parametrize(("bits", "offsets", "group"), FORMS)
def test_linear_rows_are_independent(bits: int, offsets: bool, group: int) -> None:
    backend, most = c_backend(torch.bfloat16), 128
    weight = backend.pack(some(70, 384, bits, offsets, group), torch.randn(70))
    x = torch.randn(most, 384)
    alone = torch.cat([backend.linear(x[i : i + 1], weight) for i in range(most)])
    for n in range(1, most + 1):
        assert torch.equal(backend.linear(x[:n], weight), alone[:n]), n
        assert torch.equal(backend.linear(x[most - n :], weight), alone[most - n :]), n
    with two_threads():
        for n in (1, 2, 5, 6, 7, 16, 40, most):
            assert torch.equal(backend.linear(x[:n], weight), alone[:n]), n


@needs_c
@pytest.mark.parametrize(("bits", "least", "most"), [(8, -128, 127), (4, -8, 7)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8])
def test_no_sum_of_products_overflows(rows: int, bits: int, least: int, most: int) -> None:
    """Weights and inputs of the largest magnitude, with every sign."""
    backend = c_backend(torch.float32)
    values = torch.full((8, 64), least, dtype=torch.int8)
    values[1::2] = most
    values[4:, ::2] = -most
    weight = QuantizedWeight(values, torch.ones(8, 2), None, bits, 32)
    x = torch.ones(rows, 64)
    x[1::2] = -1.0
    x[:, 1::2] *= 1 - 2 * (torch.arange(rows)[:, None] % 3 == 2).float()
    assert torch.equal(backend.linear(x, backend.pack(weight)), x @ values.float().T)


@needs_c
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_is_not_finite_stays_alone(bits: int) -> None:
    backend = c_backend(torch.float32)
    weight, x = backend.pack(some(33, 64, bits)), torch.randn(4, 64)
    whole = backend.linear(x, weight)
    for bad in (float("nan"), float("inf")):
        x[2, 40] = bad
        got = backend.linear(x, weight)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3]], whole[[0, 1, 3]])


@needs_c
@pytest.mark.parametrize("bits", [8, 4])
def test_magnitudes_without_a_finite_reciprocal_count_as_zero(bits: int) -> None:
    backend, values = c_backend(torch.float32), torch.full((33, 64), 7, dtype=torch.int8)
    weight = backend.pack(QuantizedWeight(values, torch.ones(33, 2), torch.ones(33, 2), bits, 32))
    for size in (1e-37, 1e-40):
        assert (backend.linear(torch.full((3, 64), size), weight) == 0).all()


@needs_c
@pytest.mark.parametrize("bits", [8, 4])
def test_linear_writes_nothing_past_its_outputs(bits: int) -> None:
    backend, memory = c_backend(torch.float32), torch.full((5 * 70 + 64,), 7.0)
    backend.linear(torch.randn(5, 64), backend.pack(some(70, 64, bits)), add=memory[: 5 * 70].view(5, 70))
    assert (memory[5 * 70 :] == 7).all()


@needs_c
@pytest.mark.full  # builds two libraries; scripts/check runs all of this file with each of them
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_other_instruction_sets_sum_the_same_integers(isa: str) -> None:
    """Without byte dot products, and without AVX: the same integers; floats differ by rounding only."""
    made = build.recipe({})
    if isa not in targets.available() or (other := build.recipe({"OUTRIDER_ISA": isa})) == made:
        pytest.skip("not another set of this processor")
    library = build.load(other, os.environ)  # kept, as all kernels are: the passes of other sets need it too
    assert library is not None
    ours = c_backend(torch.float32)
    theirs = type(ours)(bindings.declare(library), torch.float32)
    for bits in (8, 4):
        weight, x = ours.pack(some(70, 96, bits, True)), torch.randn(5, 96)
        near(theirs.linear(x, weight), ours.linear(x, weight), 1e-5)
    spec = heads_of(4, 2, 64)
    pool, _ = pools(spec, torch.int8)
    step_input = random_plan(random.Random(0))
    q = torch.randn(step_input.length, 4, 64)
    near(
        theirs.attend(q, spec, LayerKV(step_input, pool, 1), Scores(0.125, 0)),
        ours.attend(q, spec, LayerKV(step_input, pool, 1), Scores(0.125, 0)),
        1e-5,
    )


# ---- what they weigh


@needs_c
@pytest.mark.parametrize(
    ("bits", "offsets", "most"), [(8, False, 1.0625), (4, False, 0.5625), (4, True, 0.625), (8, True, 1.125)]
)
def test_memory_of_a_weight(bits: int, offsets: bool, most: float) -> None:
    packed = c_backend(torch.bfloat16).pack(some(768, 2048, bits, offsets))
    assert packed.data.nbytes == most * 768 * 2048


@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_memory_of_a_pool(head_dim: int) -> None:
    wide, few = (Pool(2, 4, head_dim, 100, dtype, CPU) for dtype in (torch.bfloat16, torch.int8))
    for pool in (wide, few):
        assert pool.data.nbytes == 100 * Pool.bytes_per_slot(2, 4, head_dim, pool.dtype)
    assert few.data.nbytes <= 0.54 * wide.data.nbytes


@needs_c
def test_quantized_models_take_less_memory(checkpoint: Any) -> None:
    def stored(quantization: str | None) -> int:
        folder = checkpoint(hidden_size=128, intermediate_size=256, vocab_size=320)
        decoder = Decoder(Checkpoint.open(str(folder)), Precision(torch.bfloat16, quantization), CPU, 64)
        layers: list[Any] = [getattr(layer, name) for layer in decoder.layers for name in structs.LINEARS]
        weights = filter(None, (*layers, decoder.embedding, decoder.lm_head))  # no layer has all linears
        return sum(weight.data.nbytes for weight in weights)

    outer, inner = 2 * 320 * 128, 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    assert stored(None) == 2 * (outer + inner)
    assert stored("int8") == 1.0625 * (outer + inner)
    assert stored("int4") == 1.0625 * outer + 0.5625 * inner


# ---- quantizing


@pytest.mark.parametrize(("bits", "error"), [(8, 0.007), (4, 0.1)])
def test_quantizing_keeps_rows_within_the_error(bits: int, error: float) -> None:
    weight = torch.randn(50, 128)
    weight[3, 32:64] = 0
    weight[5] *= 1e-6
    few = quantize(weight, bits)
    assert isinstance(few, QuantizedWeight) and (few.bits, few.group, few.offsets) == (bits, 32, None)
    assert few.values.int().abs().max() <= 2 ** (bits - 1)
    for row in (0, 3, 5):
        assert (few.dense()[row] - weight[row]).norm() < error * weight[row].norm()
    assert (few.dense()[3, 32:64] == 0).all()


def test_quantize_leaves_what_is_no_whole_groups() -> None:
    weight = torch.randn(5, 40)
    assert quantize(weight, 4) is weight


def test_join_changes_no_number() -> None:
    parts = [some(3, 64, 4, False, 32), some(5, 64, 8, True, 64), some(2, 64, 4, True, 16)]
    whole = join(parts, torch.float32)
    assert isinstance(whole, QuantizedWeight) and (whole.bits, whole.group) == (8, 16)
    assert torch.equal(whole.dense(), torch.cat([part.dense() for part in parts]))
    alike = join([some(3, 64, 4), some(5, 64, 4)], torch.float32)
    assert isinstance(alike, QuantizedWeight) and (alike.bits, alike.group, alike.offsets) == (4, 32, None)
    mixed = join([parts[0], torch.ones(2, 64)], torch.bfloat16)
    assert isinstance(mixed, Tensor) and mixed.dtype == torch.bfloat16 and mixed.shape == (5, 64)


def test_a_checkpoint_that_is_quantized_already(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A format needs only a reader of quantized weights.  Weights of few bits stay, others are reduced."""
    source = Checkpoint.open(str(checkpoint()))
    expected = Decoder(source, Precision(torch.float32, "int8"), CPU, 64)
    read = Weights.linear

    def few(self: Weights, name: str, outputs: int, inputs: int) -> Any:
        weight = read(self, name, outputs, inputs)
        return quantize(weight, 8)

    monkeypatch.setattr(Weights, "linear", few)
    decoder = Decoder(source, Precision(torch.float32), CPU, 64)
    step_input = ids_plan(list(range(5, 15)))
    x, y = (d.logits(d.forward(step_input, d.pool(16)), list(range(10))) for d in (decoder, expected))
    assert torch.equal(x, y)
    again, fewer = (Decoder(source, Precision(torch.float32, form), CPU, 64) for form in ("int8", "int4"))
    assert torch.equal(again.logits(again.forward(step_input, again.pool(16)), list(range(10))), y)
    assert fewer.layers[0].o.data.nbytes < again.layers[0].o.data.nbytes


# ---- K and V


@needs_c
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), LAYOUTS)
def test_rope_store_in_int8_equals_torch(heads: int, kv_heads: int, head_dim: int) -> None:
    spec = heads_of(heads, kv_heads, head_dim, True)
    ours, theirs = pools(spec, torch.int8)
    step_input, angle = random_plan(random.Random(head_dim)), torch.rand(64, head_dim // 2) * 6
    turn, qkv = (
        torch.cat([angle.cos(), angle.sin()], dim=-1).contiguous(),
        torch.randn(step_input.length, (heads + 2 * kv_heads) * head_dim),
    )
    TorchBackend(CPU, torch.float32).rope_store(qkv, spec, turn, LayerKV(step_input, theirs, 1))
    c_backend(torch.float32).rope_store(qkv, spec, turn, LayerKV(step_input, ours, 1))
    mine, reference = (
        pool.read(1, step_input.on(CPU).slot_mapping, torch.float32) for pool in (ours, theirs)
    )
    assert (mine - reference).abs().max() <= 1.01 / 127 * reference.abs().max(), "more than one step apart"
    assert (mine - reference).abs().mean() < 1e-4
    assert (ours.data[..., head_dim : ours.width] == 0).all()
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[step_input.on(CPU).slot_mapping] = False
    assert torch.equal(ours.data[:, :, untouched], theirs.data[:, :, untouched])
    assert torch.equal(ours.data[0], theirs.data[0]), "another layer was written to"


@needs_c
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), LAYOUTS)
@pytest.mark.parametrize("window", [0, 5, 16])
def test_int8_attention_equals_the_torch_reference(
    heads: int, kv_heads: int, head_dim: int, window: int
) -> None:
    """Against the reference, with queries rounded as in the kernel: each head by its largest value."""
    spec = heads_of(heads, kv_heads, head_dim)
    pool, _ = pools(spec, torch.int8)
    for seed in range(3):
        step_input = random_plan(random.Random(seed))
        q = torch.randn(step_input.length, heads, head_dim) * 2
        few = rounded(q.view(-1, head_dim), head_dim).view(q.shape).float()
        wide = torch.nn.functional.pad(q, (0, pool.width - head_dim)).contiguous()
        got = c_backend(torch.float32).attend(
            wide, spec, LayerKV(step_input, pool, 1), Scores(head_dim**-0.5, window)
        )
        near(
            got,
            TorchBackend(CPU, torch.float32).attend(
                few, spec, LayerKV(step_input, pool, 1), Scores(head_dim**-0.5, window)
            ),
            2e-5,
        )


def test_a_pool_gives_back_what_was_written() -> None:
    pool, slots = Pool(2, 3, 24, 20, torch.int8, CPU), torch.tensor([7, 3, 11])
    heads = torch.randn(3, 3, 24)
    heads[1, 2] = 0
    pool.write(1, 0, slots, heads)
    near(pool.read(1, slots, torch.float32)[0], heads, 0.02)
    pool.move([3, 7], [7, 4])
    near(pool.read(1, torch.tensor([4, 7]), torch.float32)[0], heads[:2], 0.02)
