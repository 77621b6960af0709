"""The C kernels compute what torch computes, and every row the same bits in any batch."""

from __future__ import annotations

import random
from array import array
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import attended_slots, requests_of
from kernel_cases import (
    CPU,
    DTYPES,
    LAYOUTS,
    SLOTS,
    c_backend,
    heads_of,
    near,
    needs_c,
    pools,
    random_plan,
    two_threads,
)
from torch import Tensor

from outrider.backends.base import LayerKV, ScoreModifier, Scores
from outrider.backends.torch.backend import TorchBackend
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# ---- linear and the small ones

SHAPES = [
    (1, 1),
    (3, 5),
    (64, 64),
    (65, 63),
    (130, 200),
    (33, 129),
    (7, 300),
    (257, 65),
    (96, 128),
]  # (inputs K, outputs O)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_linear_equals_the_definition_in_float64(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    backend = c_backend(dtype)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    for n in (1, 2, 5, 6, 7, 8, 13):
        x, base = torch.randn(n, inputs), torch.randn(n, outputs)
        exact = x.double() @ weight.to(dtype).double().T
        near(backend.linear(x, backend.pack(weight)), exact, 1e-4)
        near(backend.linear(x, backend.pack(weight, bias)), exact + bias, 1e-4)
        added = base.clone()
        assert backend.linear(x, backend.pack(weight, bias), add=added) is added
        near(added, base + exact + bias, 1e-4)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_writes_nothing_past_its_outputs(dtype: torch.dtype) -> None:
    """The last panel of odd shapes is computed in full and stored in part."""
    backend = c_backend(dtype)
    weight = backend.pack(torch.randn(70, 9))
    memory = torch.full((5 * 70 + 64,), 7.0)
    backend.linear(torch.randn(5, 9), weight, add=memory[: 5 * 70].view(5, 70))
    assert (memory[5 * 70 :] == 7).all()


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_embed_reads_rows_of_a_packed_weight(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    backend, weight = c_backend(dtype), torch.randn(outputs, inputs)
    ids = torch.randint(outputs, (11,))
    step_input = StepInput.of_chain(array("i", range(11)), 0, ids.tolist())
    assert torch.equal(backend.embed(backend.pack(weight), step_input), weight.to(dtype).float()[ids])


@needs_c
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 100, 384])
@pytest.mark.parametrize("n", [1, 3, 12])
def test_norm_and_activation_equal_torch(n: int, width: int) -> None:
    backend, torch_backend = c_backend(torch.float32), TorchBackend(CPU, torch.float32)
    x, weight, both = torch.randn(n, width) * 3, torch.randn(width), torch.randn(n, 2 * width) * 8
    near(backend.rms_norm(x, weight, 1e-6), torch_backend.rms_norm(x, weight, 1e-6))
    near(backend.silu_mul(both), torch_backend.silu_mul(both))
    far = torch.tensor([[-200.0, 200.0, -88.0, 0.0] * width])[:, : 2 * width]
    near(backend.silu_mul(far.contiguous()), torch_backend.silu_mul(far))


# ---- attention


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), LAYOUTS)
@pytest.mark.parametrize("norms", [False, True])
def test_rope_store_equals_the_torch_reference(
    heads: int, kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    spec = heads_of(heads, kv_heads, head_dim, norms)
    ours, theirs = pools(spec, dtype)
    step_input = random_plan(random.Random(head_dim))
    angle = torch.rand(64, head_dim // 2) * 6
    turn = torch.cat([angle.cos(), angle.sin()], dim=-1).contiguous()
    qkv = torch.randn(step_input.length, (heads + 2 * kv_heads) * head_dim)
    expected = TorchBackend(CPU, torch.float32).rope_store(qkv, spec, turn, LayerKV(step_input, theirs, 1))
    got = c_backend(dtype).rope_store(qkv, spec, turn, LayerKV(step_input, ours, 1))
    near(got[..., :head_dim], expected)
    assert (got[..., head_dim:] == 0).all() and (ours.data[..., head_dim:] == 0).all()
    near(ours.data.float(), theirs.data.float(), 1e-5 if dtype == torch.float32 else 1e-2)
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[step_input.on(CPU).slot_mapping] = False
    assert torch.equal(ours.data[:, :, untouched], theirs.data[:, :, untouched])
    assert torch.equal(ours.data[0], theirs.data[0]), "another layer was written to"


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), LAYOUTS)
@pytest.mark.parametrize("window", [0, 1, 5, 16])
def test_attention_equals_the_torch_reference(
    heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    spec = heads_of(heads, kv_heads, head_dim)
    pool, _ = pools(spec, dtype)
    for seed in range(3):
        step_input = random_plan(random.Random(seed))
        q = torch.randn(step_input.length, heads, head_dim) * 2
        wide = torch.nn.functional.pad(q, (0, pool.width - head_dim)).contiguous()
        expected = TorchBackend(CPU, torch.float32).attend(
            q, spec, LayerKV(step_input, pool, 1), Scores(head_dim**-0.5, window)
        )
        near(
            c_backend(dtype).attend(wide, spec, LayerKV(step_input, pool, 1), Scores(head_dim**-0.5, window)),
            expected,
        )


def modifiers() -> list[ScoreModifier]:
    slopes, sinks = torch.rand(4), torch.randn(4)
    return [
        ScoreModifier(cap=3.0),
        ScoreModifier(slopes=slopes),
        ScoreModifier(sinks=sinks),
        ScoreModifier(2.0, slopes, sinks),
    ]


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("window", [0, 5])
def test_attend_with_modified_scores(which: int, window: int, dtype: torch.dtype) -> None:
    spec, modifier = heads_of(4, 2, 24), modifiers()[which]
    pool, _ = pools(spec, dtype)
    for seed in range(3):
        step_input = random_plan(random.Random(seed))
        q = torch.randn(step_input.length, 4, 24) * 2
        wide = torch.nn.functional.pad(q, (0, pool.width - 24)).contiguous()
        expected = TorchBackend(CPU, torch.float32).attend(
            q, spec, LayerKV(step_input, pool, 1), Scores(0.5, window, modifier)
        )
        near(
            c_backend(dtype).attend(wide, spec, LayerKV(step_input, pool, 1), Scores(0.5, window, modifier)),
            expected,
        )


@pytest.mark.parametrize("which", range(5))
def test_the_reference_attention_is_the_definition(which: int) -> None:
    """Row by row, keys in the order of their positions; without a modifier of scores, and with each."""
    spec, window, given = heads_of(4, 2, 16), 6, [None, *modifiers()][which]
    modifier = given or ScoreModifier()
    pool, _ = pools(spec, torch.float32)
    step_input = random_plan(random.Random(5))
    q = torch.randn(step_input.length, 4, 16)
    got = (
        TorchBackend(CPU, torch.float32)
        .attend(q, spec, LayerKV(step_input, pool, 0), Scores(0.25, window, given))
        .view(step_input.length, 4, 16)
    )
    for table, first, count in requests_of(step_input):
        for row in range(first, first + count):
            keys = attended_slots(step_input, table, row)[-window:]
            for head in range(4):
                k, v = pool.data[0, 0, keys, head // 2, :16], pool.data[0, 1, keys, head // 2, :16]
                scores = (k @ q[row, head]) * 0.25
                if modifier.cap:
                    scores = (scores / modifier.cap).tanh() * modifier.cap
                if modifier.slopes is not None:
                    scores = scores - modifier.slopes[head] * torch.arange(len(keys) - 1, -1, -1)
                weight, extra = scores.exp(), 0.0 if modifier.sinks is None else modifier.sinks[head].exp()
                near(got[row, head], weight @ v / (weight.sum() + extra))


# ---- bit for bit: a row alone, and in any company, with one thread and with two


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(65, 63), (384, 200), (1100, 130)])
def test_linear_rows_are_independent(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    backend = c_backend(dtype)
    weight = backend.pack(torch.randn(outputs, inputs), torch.randn(outputs))
    most = 101
    x = torch.randn(most, inputs)
    alone = torch.cat([backend.linear(x[i : i + 1], weight) for i in range(most)])
    counts = [*range(1, 41), 48, 49, 53, 97, most]
    for n in counts:
        assert torch.equal(backend.linear(x[:n], weight), alone[:n]), n
        assert torch.equal(backend.linear(x[most - n :], weight), alone[most - n :]), n
    with two_threads():
        for n in counts:
            assert torch.equal(backend.linear(x[:n], weight), alone[:n]), n


@needs_c
def test_small_kernels_rows_are_independent() -> None:
    backend = c_backend(torch.float32)
    x, weight = torch.randn(40, 390), torch.randn(390)
    norms = torch.cat([backend.rms_norm(x[i : i + 1], weight, 1e-6) for i in range(40)])
    gates = torch.cat([backend.silu_mul(x[i : i + 1]) for i in range(40)])
    for threads in (nullcontext(), two_threads()):
        with threads:
            for n in range(1, 41):
                assert torch.equal(backend.rms_norm(x[:n], weight, 1e-6), norms[:n])
                assert torch.equal(backend.silu_mul(x[:n]), gates[:n])


def forward(decoder: Decoder, pool: Pool, table: array[int], start: int, tokens: list[int]) -> Tensor:
    return decoder.forward(StepInput.of_chain(table, start, tokens), pool)


@needs_c
@pytest.mark.parametrize(
    "form",
    [
        (torch.float32,),
        (torch.bfloat16,),
        (torch.bfloat16, None, "auto", "bfloat16"),
        (torch.bfloat16, "int8", "auto"),
        (torch.float32, "int4", "int8"),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_a_whole_decoder_gives_the_same_bits_one_by_one_in_chunks_and_in_a_tree(
    family: str, form: Any, checkpoint: Any
) -> None:
    """Forty tokens of one text: one by one, in chunks, over scattered slots, and as the path of a tree."""
    folder = (
        checkpoint(family, hidden_size=96, sliding_window=13)
        if family == "Mistral"
        else checkpoint(family, head_dim=24)
    )
    decoder = Decoder(Checkpoint.open(str(folder)), Precision(*form), CPU, 64)
    rng = random.Random(0)
    tokens = [rng.randrange(300) for _ in range(40)]
    plain, pool = array("i", range(128)), decoder.pool(128)
    expected = torch.cat([forward(decoder, pool, plain, i, tokens[i : i + 1]) for i in range(40)])

    def in_chunks(n: int) -> None:
        table, other = array("i", rng.sample(range(128), 128)), decoder.pool(128)
        got = torch.cat([forward(decoder, other, table, i, tokens[i : i + n]) for i in range(0, 40, n)])
        assert torch.equal(got, expected), n
        assert torch.equal(other.data[:, :, table[:40].tolist()], pool.data[:, :, :40])

    for n in range(1, 41):
        in_chunks(n)
    for known in (1, 16, 30):
        check_tree(decoder, tokens, known, expected, rng)
    with two_threads():
        for n in (8, 23, 40):
            in_chunks(n)
        check_tree(decoder, tokens, 16, expected, rng)


def check_tree(decoder: Decoder, tokens: list[int], known: int, expected: Tensor, rng: random.Random) -> None:
    table = array("i", rng.sample(range(128), 128))
    step_input, pool, at = StepInput(), decoder.pool(128), list(range(known))
    step_input.chain(table, 0, tokens[:known])
    path: list[int] = []
    free = [int(s) for s in table[known:]]
    for token in tokens[known:]:
        for _ in range(rng.randint(0, 2)):  # siblings that are wrong
            step_input.node(table, known, [*path, free.pop()], rng.randrange(300))
        path = [*path, free.pop()]
        at.append(step_input.length)
        step_input.node(table, known, path, token)
    assert torch.equal(decoder.forward(step_input.build(), pool)[at], expected)


@needs_c
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_requests_in_one_forward_do_not_touch_each_other(dtype: torch.dtype, checkpoint: Any) -> None:
    decoder = Decoder(Checkpoint.open(str(checkpoint())), Precision(dtype), CPU, 64)
    rng = random.Random(1)
    texts = [[rng.randrange(300) for _ in range(length)] for length in (1, 7, 20, 3)]
    slots = rng.sample(range(160), 160)
    tables = [array("i", [slots.pop() for _ in range(32)]) for _ in texts]
    step_input, pool = StepInput(), decoder.pool(160)
    for table, text in zip(tables, texts):
        step_input.chain(table, 0, text)
    together = decoder.forward(step_input.build(), pool)
    alone = [forward(decoder, decoder.pool(160), table, 0, text) for table, text in zip(tables, texts)]
    assert torch.equal(together, torch.cat(alone))
