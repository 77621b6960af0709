"""Kangaroo: published files load, drafts are those of a naive adapter, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import HIDDEN, LAYERS, V, acceptance, samples, save_head, teach

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import Head
from outrider.core.step import Batch
from outrider.core.tree import Draft, Resume
from outrider.draft import detect
from outrider.draft.kangaroo import Kangaroo, Network, published_exit
from outrider.errors import ConfigError, ModelError
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights, read_states
from outrider.inspect.heads import head_card
from outrider.testing import random_prompts, tiny_checkpoint

HEADS, KV, D, EPS, THETA = 4, 2, 16, 1e-5, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "rope_theta": 500000.0,  # which the reference does not read
    "vocab_size": V,
}


def tensors(scale: float = 0.2) -> dict[str, Tensor]:
    """The published names and shapes."""
    torch.manual_seed(3)
    rows = {"q": HEADS * D, "k": KV * D, "v": KV * D, "o": HIDDEN}
    shapes: dict[str, tuple[int, ...]] = {
        f"layers.0.self_attn.{name}_proj.weight": (size, HIDDEN) for name, size in rows.items()
    }
    shapes |= {"layers.0.input_layernorm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    return {name: torch.randn(shape) * scale + (len(shape) == 1) for name, shape in shapes.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, t: int) -> Tensor:
    """One head [D] at position t, halves paired."""
    half = D // 2
    angle = torch.tensor([t / THETA ** (2 * i / D) for i in range(half)], dtype=torch.float64)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def naive(stored: dict[str, Tensor], states: Tensor) -> Tensor:
    """o [hidden] of the last of the states x [T, hidden], key by key and head by head, in float64."""
    w, x = {name: tensor.double() for name, tensor in stored.items()}, states.double()
    u = norm(x, w["layers.0.input_layernorm.weight"])
    q, k, v = (u @ w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    last, parts = len(x) - 1, []
    for h in range(HEADS):
        columns = slice(h // (HEADS // KV) * D, (h // (HEADS // KV) + 1) * D)
        query = turned(q[last, h * D : (h + 1) * D], last)
        keys = [turned(k[s, columns], s) for s in range(last + 1)]
        scores = torch.stack([query @ key / math.sqrt(D) for key in keys])
        parts.append(scores.softmax(0) @ v[:, columns])
    return norm(x[last] + torch.cat(parts) @ w["layers.0.self_attn.o_proj.weight"].T, w["norm.weight"])


def published(folder: Path, **config: Any) -> str:
    """A file as the authors save it, with a buffer of rotations."""
    stored = {**tensors(), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(D // 2)}
    return save_head(folder, {**CONFIG, **config}, stored, "pytorch_model.bin")


# ---- files


def test_a_published_file_is_recognised_and_described(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert detect(folder) == "kangaroo"
    card = head_card(folder)
    assert card is not None and card.refused is None
    assert (card.method, card.layout, card.hidden, card.levels) == ("kangaroo", "reference", HIDDEN, None)


def test_a_layer_with_an_mlp_is_no_adapter(tmp_path: Path) -> None:
    stored = {**tensors(), "layers.0.mlp.gate_proj.weight": torch.zeros(96, HIDDEN)}
    folder = save_head(tmp_path, CONFIG, stored)
    assert detect(folder) != "kangaroo"
    with pytest.raises(ModelError, match="no such head"):
        Kangaroo.check(Head.open(folder))


def test_the_network_has_the_size_of_the_publication() -> None:
    """67 million for Vicuna 7B; the config of what is trained fits the reference's class."""
    with torch.device("meta"):
        network = Network(Sizes(4096, 11008, 32, 32, 128), 32000, 2)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6) == 67
    assert set(network.state_dict()) == set(tensors())
    assert network.config()["num_hidden_layers"] == 1 and network.config()["early_exit"] == 2


def test_the_exit_is_the_options_the_files_or_the_published_one(toy: LLM, tmp_path: Path) -> None:
    target = toy.engine.target
    bare, named = published(tmp_path / "bare"), published(tmp_path / "named", early_exit=5)
    assert [published_exit(layers) for layers in (2, 8, 32, 40, 80)] == [1, 2, 2, 3, 3]
    assert Kangaroo(Kangaroo.Options(model=bare), target).needs.states == (2,)
    assert Kangaroo(Kangaroo.Options(model=named), target).needs.states == (5,)
    assert Kangaroo(Kangaroo.Options(model=named, early_exit=3), target).needs.states == (3,)
    with pytest.raises(ConfigError, match=rf"early_exit must be in 1 … {LAYERS - 1}"):
        Kangaroo(Kangaroo.Options(model=named, early_exit=LAYERS), target)
    with pytest.raises(ConfigError, match=rf"early_exit must be in 1 … {LAYERS - 1}.*got 'two'"):
        Kangaroo(Kangaroo.Options(model=published(tmp_path / "odd", early_exit="two")), target)
    with pytest.raises(ConfigError, match=rf"early_exit must be in 1 … {LAYERS - 1}.*got 0"):
        Kangaroo(Kangaroo.Options(model=published(tmp_path / "zero", early_exit=0)), target)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exit_threshold": 1.5}, "exit_threshold"),
        ({"early_exit": 0}, "early_exit"),
        ({"tree": "wide"}, "tree"),
        ({"nodes": 4}, "nodes = 4 has no effect without a tree"),
        ({"exit_layer": 2}, "exit_layer"),
    ],
)
def test_bad_options_are_refused_by_name(given: dict[str, Any], message: str, toy: LLM) -> None:
    with pytest.raises(ConfigError, match=message):
        toy.variant({"method": "kangaroo", "model": "a head", **given})


def test_a_target_in_transformers_own_code_is_refused(tmp_path: Path) -> None:
    other = LLM(tiny_checkpoint(tmp_path, "GPTNeoX"), dtype="float32")
    with pytest.raises(ConfigError, match=r"GPTNeoX.* runs in transformers' own code, which computes all"):
        Kangaroo.example(other.engine.target)


# ---- drafts


@dataclass
class Seen:
    """A draft of the engine: the text before it, its tokens, and the states that verification got."""

    text: list[int]
    drafted: list[int]
    states: list[Tensor]


def watched(llm: LLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """The drafts of some greedy requests."""
    seen, propose = list[Seen](), Kangaroo.propose

    def listening(self: Kangaroo, batch: Batch) -> Draft:
        draft, first = propose(self, batch), 0
        resume = draft.resume or Resume(0, torch.empty(0), [[] for _ in batch])
        for step, tree, nodes in zip(batch, draft.trees, resume.nodes, strict=True):
            states = [*resume.states[first : first + len(nodes)]]
            first += len(nodes)
            assert nodes == list(range(-1, len(nodes) - 1))
            if tree.tokens:
                seen.append(Seen(list(step.row.tokens), list(tree.tokens), states))
        return draft

    with monkeypatch.context() as patch:
        patch.setattr(Kangaroo, "propose", listening)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return seen


def expected_draft(llm: LLM, stored: dict[str, Tensor], seen: Seen, threshold: float) -> list[int]:
    """The chain of a naive adapter, at most as long as the engine's; every state is computed anew."""
    outer, drafted = TargetWeights.of(llm.engine.decoder), list[int]()
    while len(drafted) < len(seen.drafted):
        states = read_states(llm.engine.decoder, [[*seen.text, *drafted]], (2,))[2]
        torch.testing.assert_close(states[-1], seen.states[len(drafted)], rtol=1e-4, atol=1e-4)
        logits = naive(stored, states) @ outer.lm_head.double().T
        drafted.append(int(logits.argmax()))
        if float(logits.softmax(-1).max()) < threshold:
            break
    return drafted


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_drafts_are_those_of_a_naive_adapter(
    threshold: float, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch with chunked prompts, then again on cached prefixes."""
    folder = published(tmp_path)
    given = {"method": "kangaroo", "model": folder, "num_speculative_tokens": 4, "exit_threshold": threshold}
    llm = LLM(target, dtype="float32", max_num_batched_tokens=24, speculative_config=given)
    prompts = random_prompts(3, seed=5, longest=45)
    lengths = set()
    for _ in range(2):
        drafts = watched(llm, prompts, monkeypatch)
        for seen in drafts:
            lengths.add(len(seen.drafted))
            assert seen.drafted == expected_draft(llm, tensors(), seen, threshold)
        assert len(drafts) > 20
    assert (len(lengths) > 2) if threshold else (4 in lengths)


def test_no_threshold_drafts_to_the_full_depth(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"method": "kangaroo", "model": published(tmp_path), "num_speculative_tokens": 3}
    for threshold, length in ((None, 3), (1.0, 1)):
        llm = LLM(target, dtype="float32", speculative_config={**given, "exit_threshold": threshold})
        drafts = watched(llm, [[5, 6, 7]], monkeypatch)
        assert drafts[0].drafted and {len(seen.drafted) for seen in drafts[:-3]} == {length}


def test_a_taught_adapter_is_accepted(llm: LLM, target: str, tmp_path: Path) -> None:
    """More often than at random weights."""
    torch.manual_seed(1)
    network = Network.like(llm.engine.target)
    data, outer = samples(llm, (network.early_exit,)), TargetWeights.of(llm.engine.decoder)
    given = {"tree": "chain", "num_speculative_tokens": 3, "exit_threshold": None}
    found = []
    for step in range(2):
        folder = save_head(tmp_path / str(step), network.config(), dict(network.state_dict()))
        found.append(acceptance(target, {"model": folder, **given}))
        teach(network, network.loss, data, outer, steps=60)
    assert found[1] > max(0.5, found[0] + 0.1)
