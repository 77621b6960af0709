"""GRIFFIN's published files load, its network equals a naive one in float64, and what its loss counts."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eagle_heads import CONFIG, EPS, HEADS, INNER, KV, D, norm, turned
from torch import Tensor
from toys import HIDDEN, V, save_head

from outrider import LLM
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft import detect
from outrider.draft.griffin import Griffin, Network
from outrider.errors import ConfigError, ModelError
from outrider.heads.layer import Sizes
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.tapped_parts import Rows

T, SIZES = 12, Sizes(32, 48, 4, 2, 8)
AT = "layers.0"


def tensors() -> dict[str, Tensor]:
    """The reference's names and shapes."""
    torch.manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (V, HIDDEN),
        "fc.fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.fc.bias": (HIDDEN,),
        "fc.mlp.input_layernorm.weight": (HIDDEN,),
        "fc.mlp.up_proj.weight": (INNER + 8, 2 * HIDDEN),
        "fc.mlp.down_proj.weight": (HIDDEN, INNER + 8),
        "fc.post_attention_layernorm.weight": (HIDDEN,),
        f"{AT}.self_attn.q_proj.weight": (HEADS * D, HIDDEN),
        f"{AT}.self_attn.k_proj.weight": (KV * D, HIDDEN),
        f"{AT}.self_attn.v_proj.weight": (KV * D, HIDDEN),
        f"{AT}.self_attn.o_proj.weight": (HIDDEN, HEADS * D),
        f"{AT}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{AT}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{AT}.mlp.down_proj.weight": (2 * HIDDEN, INNER),
        f"{AT}.post_attention_layernorm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape) * 0.2 + float("norm" in name) for name, shape in shapes.items()}


def naive(w: dict[str, Tensor], embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Both outputs [T, hidden] for pairs of embeddings and states, head by head in float64."""
    w = {name: tensor.double() for name, tensor in w.items()}
    e, theta = embedded.double(), CONFIG["rope_theta"]
    x = torch.cat([e, states.double()], dim=-1) @ w["fc.fc.weight"].T + w["fc.fc.bias"]
    both = w["fc.mlp.input_layernorm.weight"]
    inner = torch.cat([norm(norm(x, w["fc.post_attention_layernorm.weight"]), both), norm(e, both)], dim=-1)
    x = x + F.silu(inner @ w["fc.mlp.up_proj.weight"].T) @ w["fc.mlp.down_proj.weight"].T
    q, k, v = (x @ w[f"{AT}.self_attn.{name}_proj.weight"].T for name in "qkv")
    attended = []
    for t in range(len(x)):
        heads = []
        for h in range(HEADS):
            own = slice(h // (HEADS // KV) * D, (h // (HEADS // KV) + 1) * D)
            query = turned(q[t, h * D : (h + 1) * D], t, theta)
            keys = torch.stack([turned(k[s, own], s, theta) for s in range(t + 1)])
            heads.append((keys @ query / D**0.5).softmax(0) @ v[: t + 1, own])
        attended.append(torch.cat(heads))
    x = x + torch.stack(attended) @ w[f"{AT}.self_attn.o_proj.weight"].T
    y = norm(x, w[f"{AT}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{AT}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    out = (F.silu(gate) * up) @ w[f"{AT}.mlp.down_proj.weight"].T
    return x + out[:, :HIDDEN], x + out[:, HIDDEN:]


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_published_file_is_the_naive_network(toy: LLM, tmp_path: Path, file: str) -> None:
    w, ids, states = tensors(), [5, 9, 400, 3, 77], torch.randn(5, HIDDEN)
    folder = save_head(tmp_path, {**CONFIG, "num_hidden_layers": 1}, w, file)
    assert CONFIG["rms_norm_eps"] == EPS and detect(folder) == "griffin"
    drafter = Griffin(Griffin.Options(model=folder), toy.engine.target)
    drafter.allocate(64, drafter.net.stack.pool(1))
    step_input = StepInput.of_chain(array("i", range(1, 40)), 0, ids)
    out = drafter.net.forward(step_input, drafter.pool, drafter.net.from_states(states))
    outer = TargetWeights.of(toy.engine.decoder)
    predicted, continued = naive(w, outer.embedding[ids], states)
    torch.testing.assert_close(drafter.net.from_output(out).double(), continued, atol=1e-4, rtol=1e-4)
    expected = predicted @ outer.lm_head.double().T
    torch.testing.assert_close(drafter.net.logits(out).double(), expected, atol=1e-3, rtol=1e-3)


def test_the_training_network_is_the_packed_one(toy: LLM) -> None:
    torch.manual_seed(4)
    drafter = Griffin.example(toy.engine.target)
    assert isinstance(drafter, Griffin)
    network = Network.like(toy.engine.target)
    network.load_state_dict(
        {name: drafter.head.get(name, *drafter.head.shape(name)) for name in drafter.head}
    )
    drafter.allocate(64, drafter.net.stack.pool(1))
    ids, states = [5, 9, 400, 3], torch.randn(4, HIDDEN)
    out = drafter.net.forward(StepInput.of_chain(array("i", range(1, 40)), 0, ids), drafter.pool, states)
    outer = TargetWeights.of(toy.engine.decoder)
    (layer,) = network.layers
    expected = layer.over_texts(network.fc(outer.embedding[ids], states))
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_other_heads_are_refused(toy: LLM, tmp_path: Path) -> None:
    w = {**tensors(), "layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    folder = save_head(tmp_path, CONFIG, w)
    with pytest.raises(ModelError, match="only heads with one layer are supported"):
        Griffin(Griffin.Options(model=folder), toy.engine.target)
    with pytest.raises(ConfigError, match="one rank runs a head of this kind"):
        Griffin.Options(model=folder, draft_tensor_parallel_size=2)


# ---- training


def batch() -> tuple[Sample, TargetWeights]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(40, (T,), generator=generator)
    states, lm_head = torch.randn(T, 32, generator=generator), torch.randn(40, 32, generator=generator)
    sample = Sample(tokens, {FINAL: states}, states @ lm_head.T, torch.arange(T) >= 4)
    return sample, TargetWeights(torch.randn(40, 32, generator=generator), lm_head)


def terms(network: Network, sample: Sample, outer: TargetWeights, step: int) -> tuple[Tensor, Tensor]:
    """Of every place that a step predicts from: its loss, and the ranks of the token after it."""
    tokens, rows = F.pad(sample.tokens, (0, step + 1)), Rows.of(torch.arange(T), [T], torch.device("cpu"))
    given = sample.states[FINAL], tokens, outer.embedding, step + 1
    *_, (out, continued) = network.outputs(*given, rows)
    origins = torch.arange(T - 1 - step)
    target = sample.states[FINAL][origins + step + 1]
    logits = out[origins] @ outer.lm_head.T
    soft = -((target @ outer.lm_head.T).softmax(-1) * logits.log_softmax(-1)).sum(-1)
    features = F.smooth_l1_loss(continued[origins], target, reduction="none").mean(-1)
    following = tokens[origins + step + 2]
    ranks = (logits > logits.gather(1, following[:, None])).sum(-1)
    return features + 0.1 * soft, ranks


def test_the_first_step_has_the_loss_of_its_authors_trainer() -> None:
    """vloss of the second output, 1.0, and ploss of the first, 0.1, over the places that count."""
    torch.manual_seed(1)
    network = Network(SIZES, 40, steps=1)
    sample, outer = batch()
    losses, _ = terms(network, sample, outer, 0)
    counted = torch.arange(T - 1) >= 3
    torch.testing.assert_close(network.loss(sample, outer), losses[counted].mean(), rtol=1e-5, atol=1e-5)


def test_only_paths_that_would_be_drafted_count_in_later_steps() -> None:
    torch.manual_seed(1)
    network = Network(SIZES, 40, steps=2)
    sample, outer = batch()
    first, ranks = terms(network, sample, outer, 0)
    second, _ = terms(network, sample, outer, 1)
    counted = torch.arange(T - 2) >= 2
    # the token that step 1 reads at place t is predicted by step 0 from there, if that place counts
    drafted = (ranks[: T - 2] < 3) | (torch.arange(T - 2) + 1 < 4)
    used = counted & drafted
    assert 0 < used.sum() < counted.sum()
    expected = first[torch.arange(T - 1) >= 3].mean() + second[used].mean()
    torch.testing.assert_close(network.loss(sample, outer), expected, rtol=1e-5, atol=1e-5)
    everything = replace(sample, mask=None)
    assert network.loss(everything, outer) != network.loss(sample, outer)
