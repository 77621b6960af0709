"""The grown target of the benchmarks computes what the small one does, with all the weights that it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, MLP, LAYERS, VOCABULARY = 32, 48, 2, 96


@pytest.fixture
def grow(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import grow

    return grow


@pytest.fixture
def small() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("layers", "mlp"), [(2, 80), (5, 48), (7, 100)])
def test_a_grown_model_says_the_same(grow: Any, small: Any, layers: int, mlp: int) -> None:
    large = grow.grown(small, layers, mlp)
    ids = torch.arange(40).reshape(2, 20)
    assert small(ids).logits.abs().max() > 0.1
    assert grow.difference(small, large, ids) < 1e-4
    heads = HIDDEN * (32 + 16 + 16 + 32)  # q, k, v, o
    assert grow.weights(large) == 2 * VOCABULARY * HIDDEN + layers * (heads + 3 * HIDDEN * mlp + 2 * HIDDEN) + HIDDEN


def test_what_is_added_computes(grow: Any, small: Any) -> None:
    """Only output projections are zero, and no two of them are the same tensor to a converter that looks for equal ones."""
    layers = grow.grown(small, 6, 64).model.layers
    added = [layer for i, layer in enumerate(layers) if i not in (0, 3)]
    for layer in added:
        for name, weight in layer.named_parameters():
            assert bool((weight == 0).all()) == name.endswith(("o_proj.weight", "down_proj.weight")), name
        assert layer.self_attn.q_proj.weight.std() > 0.01
    assert (layers[0].mlp.gate_proj.weight[MLP:] != 0).all()
    assert (layers[0].mlp.down_proj.weight[:, MLP:] == 0).all()
    signs = {tuple(layer.mlp.down_proj.weight.signbit().flatten().tolist()) for layer in added}
    assert len(signs) == len(added)


def test_a_smaller_one_is_refused(grow: Any, small: Any) -> None:
    with pytest.raises(SystemExit, match="at least"):
        grow.grown(small, 1, 48)
