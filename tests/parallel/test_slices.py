"""Slices of weights: together they are the whole, and each rank holds its part only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import token_prompts

from outrider import LLM, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.quantize import quantize
from outrider.checkpoints.spec import Spec
from outrider.core.quantized import QuantizedWeight
from outrider.models.decoder import rotations
from outrider.models.placement import Precision
from outrider.parallel.layout import Layout, Share, split
from outrider.parallel.slices import SlicedSource, columns, rows
from outrider.parallel.stage import ModelOptions, Stage
from outrider.testing import check_idle, random_prompts, use_example, visible_parts

LINEARS = {
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
}


def spec_of(folder: str) -> Spec:
    spec = Checkpoint.open(folder).spec
    assert isinstance(spec, Spec)
    return spec


@pytest.mark.parametrize("parts", [2, 4])
def test_slices_of_a_checkpoint_are_its_tensors(model: str, parts: int) -> None:
    spec, whole = spec_of(model), Checkpoint.open(model).tensors()
    shares = [Share.of(spec, parts, i) for i in range(parts)]
    sources = [SlicedSource(whole, spec, share) for share in shares]
    for block, names in LINEARS.items():
        for name in names:
            at = f"model.layers.1.{block}.{name}"
            full = torch.as_tensor(whole.get(f"{at}.weight", *shape_of(spec, name)))
            own = [s.linear(at, *shape_of(share.spec, name)) for s, share in zip(sources, shares)]
            if name in ("k_proj", "v_proj") and parts > spec.kv_heads:
                own = own[:: parts // spec.kv_heads]  # neighbours hold the same head
            joined = torch.cat(
                [torch.as_tensor(part) for part in own], dim=1 if name in ("o_proj", "down_proj") else 0
            )
            assert torch.equal(joined, full)
    embedding = [
        s.linear("model.embed_tokens", share.spec.vocabulary, spec.hidden)
        for s, share in zip(sources, shares)
    ]
    assert torch.equal(
        torch.cat([torch.as_tensor(e) for e in embedding]), whole.get("model.embed_tokens.weight", 300, 64)
    )


def shape_of(spec: Spec, name: str) -> tuple[int, int]:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {"q": (q, spec.hidden), "k": (kv, spec.hidden), "v": (kv, spec.hidden), "o": (spec.hidden, q)}
    mlp = {
        "gate": (spec.inner, spec.hidden),
        "up": (spec.inner, spec.hidden),
        "down": (spec.hidden, spec.inner),
    }
    return {**shapes, **mlp}[name.removesuffix("_proj")]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("border", [32, 48])
def test_slices_of_a_quantized_weight_are_exact(bits: int, border: int) -> None:
    """Also where a border is inside a group."""
    weight = quantize(torch.randn(6, 96, generator=torch.Generator().manual_seed(0)), bits)
    assert isinstance(weight, QuantizedWeight)
    for cut, size, dim in ((columns, 96, 1), (rows, 6, 0)):
        ranges = [range(border), range(border, 96)] if dim else [range(2), range(2, size)]
        parts = [cut(weight, part) for part in ranges]
        assert all(isinstance(part, QuantizedWeight) for part in parts)
        joined = torch.cat([part.dense() for part in parts if isinstance(part, QuantizedWeight)], dim=dim)
        assert torch.equal(joined, weight.dense())


def test_splits_are_even_and_whole_groups_where_possible() -> None:
    assert split(96, 2, 32) == [range(32), range(32, 96)]
    assert split(96, 4, 32) == [range(24), range(24, 48), range(48, 72), range(72, 96)]
    assert split(7, 3) == [range(2), range(2, 4), range(4, 7)]


def test_each_rank_has_its_part_of_weights_and_kv(model: str) -> None:
    spec = spec_of(model)
    for parts in (2, 4):
        shares = [Share.of(spec, parts, i).spec for i in range(parts)]
        assert [s.heads for s in shares] == [4 // parts] * parts
        assert [s.kv_heads for s in shares] == [max(1, 2 // parts)] * parts
        assert sum(s.inner for s in shares) == spec.inner
        assert sum(s.vocabulary for s in shares) == spec.vocabulary


@pytest.mark.parametrize(("layout", "most"), [(Layout(2), 1.2), (Layout(4), 1.4), (Layout(1, 2), 1.4)])
def test_a_rank_packs_its_part_of_the_weights_only(
    model: str, layout: Layout, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many times an equal part: K/V heads may be shared, and the first stage has the embedding."""
    checkpoint, taken, real = Checkpoint.open(model), [0], SlicedSource.linear

    def counted(self: SlicedSource, name: str, outputs: int, inputs: int) -> Any:
        taken[-1] += (weight := torch.as_tensor(real(self, name, outputs, inputs))).numel()
        return weight

    monkeypatch.setattr(SlicedSource, "linear", counted)

    def numbers(layout: Layout) -> list[int]:
        """Of the weights of each rank, without norms."""
        spec, table = spec_of(model), rotations(checkpoint.config, 64, 32)
        options = ModelOptions(spec, layout, "cpu", Precision(torch.float32), table)
        taken.clear()
        for rank in range(layout.size):
            taken.append(0)
            Stage(checkpoint.tensors(), options, rank, torch.device("cpu"))
        return list(taken)

    (whole,) = numbers(Layout())
    parts = numbers(layout)
    assert whole <= sum(parts) <= most * whole and max(parts) <= most * whole / layout.size


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int4", "kv_cache_dtype": "int8"},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.full),
        pytest.param({}, marks=pytest.mark.full, id="torch"),
        pytest.param({"quantization": "int8"}, marks=pytest.mark.full),
    ],
)
def test_formats_keep_every_token(
    model: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch" if not options else "c")
    llm = LLM(model, tensor_parallel_size=2, max_num_seqs=4, max_model_len=64, **options)
    prompts = token_prompts(random_prompts(3, seed=6, longest=30))
    params = [SamplingParams(temperature=t, seed=3, max_tokens=16, ignore_eos=True) for t in (0.0, 0.0, 0.8)]
    assert llm.engine.exact
    plain = [visible_parts(output.outputs) for output in llm.generate(prompts, params)]
    use_example(llm, "draft_model")
    outputs = llm.generate(prompts, params)
    assert [visible_parts(output.outputs) for output in outputs] == plain
    assert sum(output.speculation.accepted for output in outputs) > 0
    check_idle(llm)
