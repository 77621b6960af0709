"""What tokens before a position add to a block's logits: DSpark's tables and Domino, naively and trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import BLOCK, IDS, MASK, TAPS, WIDE, BlockOutput, drafted, speculators, tensors, zlab
from torch import Tensor
from toys import HIDDEN, V, read, save_head, toy_target

from outrider import LLM
from outrider.draft import detect, dflash, dflash2, domino, dspark
from outrider.drafting.trees.builder import SAMPLE_CONFIDENCE
from outrider.errors import ModelError
from outrider.heads.sample import TargetWeights


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=40)


CORRECTIONS: dict[str, dict[str, Any]] = {  # of DSpark's network, if not of others
    "none": {},
    "vanilla": {"markov": 6},
    "gated": {"markov": 6, "kind": "gated", "confidence": True},
    "rnn": {"markov": 6, "kind": "rnn"},
    "domino": {"width": 8},
    "dflash2": {"rank": 6, "top_k": V},
    "confidence": {"confidence": True},
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_training_network_equals_the_drafter(name: str, toy: LLM, tmp_path: Path) -> None:
    """The plain torch that is trained, on the text with the draft behind it, and what runs in the engine."""
    torch.manual_seed(6)
    ids = () if name in ("domino", "dflash2") else tuple(IDS)
    given = {"taps": TAPS, "block": BLOCK, "mask": MASK, "ids": ids, **CORRECTIONS[name]}
    others = {"none": dflash.Network, "domino": domino.Network, "dflash2": dflash2.Network}
    network = others.get(name, dspark.Network).like(toy.engine.target, **given)
    for at, weight in network.named_parameters():
        if "markov_w2" in at or "embed_proj" in at or "codebook" in at:
            torch.nn.init.normal_(weight)
        if "_conv" in at:
            torch.nn.init.normal_(weight, 0.5, 0.1)
    folder = save_head(tmp_path, network.config(), network.state_dict())
    llm, outer, full = toy.variant({"model": folder}), TargetWeights.of(toy.engine.decoder), 0
    for (known, logits, _), tree in drafted(llm):
        if len(logits) < BLOCK - 1:  # a cut block: its rows attend to fewer
            continue
        states = read(toy.engine.decoder, known, TAPS).states
        taps, text = torch.cat([states[tap] for tap in TAPS], -1), torch.tensor(known + tree.tokens)
        with torch.no_grad():
            expected, confidence = network(taps, text, torch.tensor([len(known) - 1]), outer)
        rows, full = expected[0, 1:], full + 1
        chosen = torch.tensor([ids.index(token) for token in tree.tokens] if ids else tree.tokens)
        assert bool((rows[range(len(rows)), chosen] > rows.max(-1).values - 0.02).all())
        if name in ("none", "confidence"):
            assert torch.allclose(logits, rows, atol=2e-4)
        if confidence is not None:
            assert tree.confidence == pytest.approx(confidence[0, 1:].sigmoid().tolist(), abs=1e-4)
    assert full > 2


def corrected(
    kind: str, w: dict[str, Tensor], block: BlockOutput, draft: Sequence[int], outer: Any
) -> list[Tensor]:
    """Logits of every level as the publications define them, position by position."""
    w = {name: tensor.to(WIDE) for name, tensor in w.items()}
    e, state, made = outer.embedding.to(WIDE), torch.zeros(5, dtype=WIDE), list[Tensor]()
    for base, x, before in zip(block.logits.to(WIDE), block.states.to(WIDE), [block.known[-1], *draft]):
        if kind == "domino":
            mine, old = w["prefix_gru.weight_ih_l0"] @ e[before], w["prefix_gru.weight_hh_l0"] @ state
            r, z = (mine[:5] + old[:5]).sigmoid(), (mine[5:10] + old[5:10]).sigmoid()
            state = (1 - z) * (mine[10:] + r * old[10:]).tanh() + z * state
            narrow = w["embed_proj.0.weight"] @ torch.cat([x, state])
            pure = len(made) < 2
            made.append(base if pure else base + w["embed_proj.2.weight"] @ (narrow / (1 + (-narrow).exp())))
            continue
        y = w["markov_head.markov_w1.weight"][before]
        if kind == "gated":
            wide = torch.cat([x, y])
            y = (w["markov_head.gate_proj.weight"] @ wide + w["markov_head.gate_proj.bias"]).sigmoid() * y
        if kind == "rnn":
            wide = torch.cat([state, y, x])
            g, c, o = (w["markov_head.joint_proj.weight"] @ wide + w["markov_head.joint_proj.bias"]).split(5)
            state, y = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()
        made.append(base + w["markov_head.markov_w2.weight"] @ y)
    return made


def published(kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config of a file, and the tensors that a plain block does not have."""
    torch.manual_seed(8)
    more = {f"markov_head.markov_w{i}.weight": torch.randn(V, 5) for i in (1, 2)}
    wide = HIDDEN + 10 if kind == "rnn" else HIDDEN + 5
    at, rows = ("joint_proj", 15) if kind == "rnn" else ("gate_proj", 5)
    if kind in ("gated", "rnn"):
        more |= {
            f"markov_head.{at}.weight": torch.randn(rows, wide),
            f"markov_head.{at}.bias": torch.randn(rows),
        }
    more |= {
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + 5) * 0.1,
        "confidence_head.proj.bias": torch.ones(1),
    }
    config = speculators(speculators_model_type="dspark", markov_head_type=kind)
    if kind == "domino":
        more = {
            "prefix_gru.weight_ih_l0": torch.randn(15, HIDDEN),
            "prefix_gru.weight_hh_l0": torch.randn(15, 5),
        }
        more |= {"embed_proj.0.weight": torch.randn(7, HIDDEN + 5), "embed_proj.2.weight": torch.randn(V, 7)}
        config = zlab({"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 2})
    return config, more


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", "domino"])
def test_published_corrections_equal_naive_ones(kind: str, toy: LLM, tmp_path: Path) -> None:
    """Every token is the best of its level given those before it, and confident as predicted."""
    config, more = published(kind)
    folder = save_head(tmp_path, config, {**tensors(), **more})
    assert detect(folder) == ("domino" if kind == "domino" else "dspark")
    llm, outer = toy.variant({"model": folder}), TargetWeights.of(toy.engine.decoder)
    assert llm.engine.drafter.depth == BLOCK
    found = drafted(llm)
    assert len(found) > 4 and {len(tree.tokens) for _, tree in found} >= {BLOCK}
    for block, tree in found:
        for logits, token in zip(corrected(kind, more, block, tree.tokens, outer), tree.tokens):
            assert logits[token] > logits.max() - 0.02
        if kind != "domino":
            e = more["markov_head.markov_w1.weight"][[block.known[-1], *tree.tokens[:-1]]]
            known = torch.cat([block.states[: len(e)], e], dim=-1)
            predicted = (known @ more["confidence_head.proj.weight"][0] + 1).sigmoid()
            assert tree.confidence == pytest.approx(predicted.tolist(), abs=1e-3)


@pytest.mark.parametrize("rows", [(V, V + 64), (V + 64, V), (V + 64, V + 64), (V - 64, V)], ids=str)
@pytest.mark.parametrize("kind", ["vanilla", "domino"])
def test_lm_head_and_correction_may_be_padded_differently(
    kind: str, rows: tuple[int, int], toy: LLM, tmp_path: Path
) -> None:
    """rows: of the two.  Those that only one of them has get the highest logits, and are not drafted."""
    config, more = published(kind)
    common, name = (
        min(V, *rows),
        "embed_proj.2.weight" if kind == "domino" else "markov_head.markov_w2.weight",
    )
    lm_head, correction = torch.randn(rows[0], HIDDEN), torch.randn(rows[1], more[name].shape[1])
    lm_head[common:] *= 50
    correction[common:] *= 50
    stored = {**tensors(), **more, "lm_head.weight": lm_head, name: correction}
    llm = toy.variant({"model": save_head(tmp_path, config, stored)})
    outer, found = TargetWeights.of(toy.engine.decoder), drafted(llm)
    assert len(found) > 4
    for block, tree in found:
        cut = block._replace(logits=block.logits[:, :common])
        expected = corrected(kind, {**more, name: correction[:common]}, cut, tree.tokens, outer)
        for logits, token in zip(expected, tree.tokens, strict=True):
            assert token < common and logits[token] > logits.max() - 0.02


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("vanilla", "markov_head.markov_w1.weight"),
        ("vanilla", "markov_head.markov_w2.weight"),
        ("vanilla", "confidence_head.proj.weight"),
        ("domino", "prefix_gru.weight_hh_l0"),
        ("domino", "embed_proj.0.weight"),
        ("domino", "embed_proj.2.weight"),
    ],
)
def test_a_vector_in_place_of_a_matrix_is_refused(kind: str, name: str, toy: LLM, tmp_path: Path) -> None:
    config, more = published(kind)
    folder = save_head(tmp_path, config, {**tensors(), **more, name: torch.zeros(V)})
    with pytest.raises(ModelError, match=rf"its {name} is \({V},\), and .* needed"):
        toy.variant({"model": folder})


def test_a_predicted_acceptance_replaces_the_estimates(toy: LLM, tmp_path: Path) -> None:
    """With shared noise the two tokens are equal with a / (2 - a) at least; of siblings the rest is left."""
    more = {
        "confidence_head.proj.weight": torch.zeros(1, HIDDEN),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    folder = save_head(tmp_path, speculators(), {**tensors(), **more})
    chain = drafted(toy.variant({"model": folder}), temperature=0.8, seed=1)
    assert {round(share, 6) for _, tree in chain for share in tree.confidence} == {round(1 / 3, 6)}
    sampled = drafted(toy.variant({"model": folder, "verification": "block"}), temperature=0.8, seed=1)
    assert {tree.confidence[0] for _, tree in sampled if tree.size} == {0.5}
    deeper = {share for _, tree in sampled for share in tree.confidence[1:]}
    assert deeper == {SAMPLE_CONFIDENCE[0]}, "they must not depend on the sampled tokens"
    for _, tree in drafted(toy.variant({"model": folder, "nodes": 8})):
        first = [i for i, parent in enumerate(tree.parents) if parent == -1]
        assert tree.confidence[first[0]] == 0.5 and sum(tree.confidence[i] for i in first[1:]) <= 0.5 + 1e-6


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_confidence_head_that_is_not_finite_is_refused(wrong: float, toy: LLM, tmp_path: Path) -> None:
    more = {
        "confidence_head.proj.weight": torch.full((1, HIDDEN), wrong),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    folder = save_head(tmp_path, speculators(), {**tensors(), **more})
    with pytest.raises(ModelError, match="not finite"):
        toy.variant({"model": folder})
