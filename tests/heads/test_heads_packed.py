"""Heads whose files are in few bits draft what they draft when they are quantized while loading."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_files import Pack, awq, floats, gptq, scaled
from torch import Tensor
from toys import HIDDEN, V, save_head

from outrider import LLM, ModelError, SamplingParams, draft
from outrider.checkpoints.heads import Head, builtin
from outrider.checkpoints.packed import PackedWeights
from outrider.config import SpeculativeOptions
from outrider.core.quantized import QuantizedWeight
from outrider.core.step import Batch
from outrider.core.tree import Budget, Draft, DraftTree
from outrider.draft.hydra import Hydra, Network
from outrider.drafting.base import Drafter
from outrider.heads import base
from outrider.heads.base import HeadDrafter
from outrider.inspect.heads import head_card
from outrider.models.export import packed, scheme

HEADS = [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]
for name in ("domino", "dflash2"):  # files keep a GRU and codebooks whole, which are not named "weight"
    HEADS.remove(name)
PROMPTS = [{"prompt_token_ids": [3, 1, 4, 1, 5 + i]} for i in range(3)]


def proposed(llm: LLM, drafter: Drafter) -> list[list[DraftTree]]:
    """The trees of every step of some texts."""
    llm.engine.use(drafter, SpeculativeOptions.of({"method": "off"}))
    drafter, trees, propose = llm.engine.drafter, list[list[DraftTree]](), drafter.propose
    depth = drafter.depth
    llm.engine.controller.budget = lambda batch: [  # type: ignore[method-assign]
        Budget(min(depth, step.row.remaining - 1) * step.emits, drafter.size(depth)) for step in batch
    ]

    def listening(batch: Batch) -> Draft:
        found = propose(batch)
        trees.append(list(found.trees))
        return found

    drafter.propose = listening  # type: ignore[method-assign]
    llm.generate(
        PROMPTS,
        [SamplingParams(temperature=0.7 * i, seed=i, max_tokens=12, ignore_eos=True) for i in range(3)],
    )
    assert sum(len(tree.tokens) for step in trees for tree in step) > 10
    return trees


@pytest.mark.parametrize("method", HEADS)
def test_a_packed_file_drafts_what_weights_quantized_while_loading_do(
    method: str, toy: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, of, few = draft.method(method), Head.of, list[bool]()
    with monkeypatch.context() as patched:
        patched.setattr(base, "bits_of", lambda *given: 8)
        expected = proposed(toy, kind.example(toy.engine.target))
    plain = proposed(toy, kind.example(toy.engine.target))

    def stored(name: str, config: Mapping[str, Any], tensors: Any) -> Head:
        if few:  # a layout that makes another head of the first
            return of(name, config, tensors)
        few.append(True)
        once = {name: tensor.clone() for name, tensor in tensors.items()}
        folder = save_head(tmp_path, {**config, "quantization_config": scheme(8)}, packed(once.items(), 8))
        found = Head.open(folder)
        kind.check(found)
        assert any(isinstance(found.tensors.weight(name), QuantizedWeight) for name in found)
        assert {name: found.shape(name) for name in found} == {
            name: tuple(t.shape) for name, t in once.items()
        }
        assert (tmp_path / "model.safetensors").stat().st_size < 0.45 * sum(t.nbytes for t in once.values())
        return found

    monkeypatch.setattr(Head, "of", staticmethod(stored))
    assert proposed(toy, kind.example(toy.engine.target)) == expected != plain


def test_heads_packed_in_four_bits_load(toy: LLM, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network(HIDDEN, V, heads=2, layers=2)
    folder = save_head(
        tmp_path,
        {**network.config(), "quantization_config": scheme(4)},
        packed(network.state_dict().items(), 4),
    )
    head = Head.open(folder)
    weight = head.linear("hydra_mlp.0.0.res_connection", HIDDEN, 2 * HIDDEN)
    assert isinstance(weight, QuantizedWeight) and weight.bits == 4
    whole = network.state_dict()["hydra_mlp.0.0.res_connection.weight"]
    assert (weight.dense() - whole).abs().max() < 0.15 * whole.abs().max()
    assert torch.equal(head.raw("hydra_mlp.0.0.res_connection.weight"), weight.dense())
    with pytest.raises(ModelError, match="does not fit the target"):
        head.linear("hydra_mlp.0.0.res_connection", HIDDEN, HIDDEN)
    assert proposed(toy, Hydra(Hydra.Options(model=folder), toy.engine.target))


QUANTIZED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    {"quant_method": "fp8"},
]


@pytest.mark.parametrize("copied", QUANTIZED, ids=str)
def test_a_dense_head_with_its_targets_config_stays_dense(
    copied: dict[str, Any], toy: LLM, tmp_path: Path
) -> None:
    network = Network(HIDDEN, V, heads=2, layers=1)
    config = {**network.config(), "quantization_config": copied}
    head = Head.open(folder := save_head(tmp_path, config, network.state_dict()))
    assert not isinstance(head.tensors, PackedWeights)
    drafter = Hydra(Hydra.Options(model=folder), toy.engine.target)
    drafter.adopt(network.state_dict())
    assert drafter.options.quantization is None and drafter.reader.bits is None


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_head_keeps_its_bits_when_it_adopts_weights(bits: int, toy: LLM, tmp_path: Path) -> None:
    network = Network(HIDDEN, V, heads=2, layers=1)
    config = {**network.config(), "quantization_config": scheme(bits)}
    folder = save_head(tmp_path, config, packed(network.state_dict().items(), bits))
    drafter = Hydra(Hydra.Options(model=folder), toy.engine.target)
    for _ in range(2):
        drafter.adopt(network.state_dict())
        assert drafter.options.quantization == f"int{bits}" and drafter.reader.bits == bits


@pytest.mark.parametrize(("method", "pack"), [("awq", awq(32)), ("gptq", gptq(4, 32)), ("gptq", gptq(8, 32))])
def test_gptq_and_awq_are_read_too(toy: LLM, tmp_path: Path, method: str, pack: Pack) -> None:
    """Layers are packed by rules written a second time; another process reads them, too."""
    torch.manual_seed(0)
    network, rng, dense = Network(HIDDEN, V, heads=2, layers=2), random.Random(1), dict[str, Tensor]()
    stored: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if tensor.dim() == 2:
            layer, dense[name] = pack(*tensor.shape, rng)
            at = name.removesuffix(".weight")
            stored |= {f"{at}.{part}": value for part, value in layer.items()}
        else:
            stored[name] = tensor
    bits = 32 * len(stored["hydra_mlp.0.0.linear.qweight"]) // HIDDEN // 2 if method == "gptq" else 4
    quantization = {"quant_method": method, "bits": bits, "group_size": 32, "version": "gemm"}
    folder = save_head(tmp_path, {**network.config(), "quantization_config": quantization}, stored)
    head: Head = pickle.loads(pickle.dumps(Head.open(folder)))
    assert {name: head.shape(name) for name in head} == {
        n: tuple(t.shape) for n, t in network.state_dict().items()
    }
    for name, expected in dense.items():
        weight = head.linear(name.removesuffix(".weight"), *expected.shape)
        assert isinstance(weight, QuantizedWeight) and weight.bits == bits
        torch.testing.assert_close(weight.dense(), expected)
    assert proposed(toy, Hydra(Hydra.Options(model=folder), toy.engine.target))


def test_hydra_without_an_lm_head_uses_the_targets(toy: LLM) -> None:
    """As if the file held a copy of it."""
    torch.manual_seed(1)
    bare = Network(HIDDEN, V, heads=2, layers=1, own=False)
    full = Network(HIDDEN, V, heads=2, layers=1)
    full.hydra_mlp.load_state_dict(bare.hydra_mlp.state_dict())
    model = toy.engine.decoder
    lm_head = model.head_logits(torch.eye(HIDDEN)).T
    for out in full.hydra_lm_head:
        out.weight.data.copy_(lm_head)  # type: ignore[union-attr, operator]
        out.bias.data.zero_()  # type: ignore[union-attr, operator]
    trees = [
        proposed(
            toy, Hydra(Hydra.Options(), toy.engine.target, Head.of("head", net.config(), net.state_dict()))
        )
        for net in (bare, full)
    ]
    assert [[tree.tokens for tree in step] for step in trees[0]] == [
        [tree.tokens for tree in step] for step in trees[1]
    ]


@pytest.mark.parametrize("name", builtin())
def test_what_is_built_in_is_in_eight_bits(name: str) -> None:
    card = head_card(name)
    assert card is not None and card.refused is None
    assert card.stored_as["compressed-tensors"] > 0.99 * card.parameters


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
def test_weights_beside_scales_are_read_too(kind: torch.dtype, toy: LLM, tmp_path: Path) -> None:
    network, rng = Network(HIDDEN, V, heads=2, layers=1), random.Random(1)
    stored, dense = dict[str, Tensor](network.state_dict()), dict[str, Tensor]()
    for name in [name for name, tensor in stored.items() if tensor.dim() == 2]:
        layer, dense[name] = scaled(kind, (1, 0))(*stored.pop(name).shape, rng)
        stored |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in layer.items()}
    settings = floats() if kind.is_floating_point else floats() | {"format": "int-quantized"}
    settings["config_groups"]["group_0"]["weights"]["type"] = "float" if kind.is_floating_point else "int"
    folder = save_head(tmp_path, {**network.config(), "quantization_config": settings}, stored)
    head: Head = pickle.loads(pickle.dumps(Head.open(folder)))
    assert {*head} == {*network.state_dict()}
    for name, expected in dense.items():
        torch.testing.assert_close(head.raw(name), expected)
    drafter = Hydra(Hydra.Options(model=folder), toy.engine.target)
    drafter.adopt(network.state_dict())
    assert drafter.reader.bits == (None if kind.is_floating_point else 8)
