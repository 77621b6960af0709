"""P-EAGLE: the levels of one pass equal a naive EAGLE-3 pass over pairs and masks, and what was trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from eagle3_heads import INNER, KV, VD, D, H, naive, official
from torch import Tensor
from toys import HIDDEN, V, read, save_head, toy_target

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.core.tree import DraftTree
from outrider.draft import detect
from outrider.draft.peagle import Network, PEagle
from outrider.heads.sample import TargetWeights
from outrider.heads.tapped import TAPS

MASK, LEVELS, LAYERS = 7, 4, (2, 4, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=16)


def published(**config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Two layers, as speculators writes them."""
    layer, tensors = official()
    ordinary = {
        name: t for name, t in tensors.items() if name.startswith("midlayer.") and "hidden_" not in name
    }
    tensors |= {name.replace("midlayer", "layers.1"): t.flip(0).contiguous() for name, t in ordinary.items()}
    wide = {"q": (4 * D, H), "k": (KV * D, H), "v": (KV * D, H)}
    for name, shape in wide.items():
        tensors[f"layers.1.self_attn.{name}_proj.weight"] = torch.randn(shape) * 0.15
    stored = {name.replace("midlayer", "layers.0"): t for name, t in tensors.items()}
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": LEVELS}]}
    own = {"speculators_model_type": "peagle", "mask_token_id": MASK, TAPS: list(LAYERS)}
    own |= {"speculators_config": proposal, "transformer_layer_config": layer, **config}
    assert stored["layers.1.mlp.up_proj.weight"].shape == (INNER, H)
    return own, {**stored, "mask_hidden": torch.randn(1, 1, 3 * HIDDEN)}


class Drafted(NamedTuple):
    """The text that was known, the logits [levels, Vd] and the tree of one row in one step."""

    known: list[int]
    logits: Tensor
    tree: DraftTree


@contextmanager
def recorded(drafter: Any) -> Iterator[list[Drafted]]:
    found, grow = list[Drafted](), drafter._grow

    def listening(forwards: Any, trees: Any) -> None:
        grow(forwards, trees)
        for reading in forwards.readings:
            if (tree := reading.tree) is not None:
                found.append(Drafted(list(reading.row.tokens), tree.logits.clone(), tree.draft_tree))

    drafter._grow = listening
    yield found


def states_of(llm: LLM, known: list[int]) -> Tensor:
    states = read(llm.engine.decoder, known[:-1], LAYERS).states
    return torch.cat([states[tap] for tap in LAYERS], dim=-1)


def test_every_level_equals_a_naive_pass(toy: LLM, tmp_path: Path) -> None:
    """In the engine: prompts in chunks, rows of different lengths in a batch, full passes and short ones."""
    config, stored = published()
    folder = save_head(tmp_path, config, stored)
    assert detect(folder) == "peagle"
    llm, embedding = toy.variant({"model": folder}), TargetWeights.of(toy.engine.decoder).embedding
    assert llm.engine.drafter.depth == LEVELS
    prompts = [{"prompt_token_ids": [(7 * i + n) % V for i in range(n)]} for n in (3, 18)]
    with recorded(llm.engine.drafter) as found:
        llm.generate(prompts, GREEDY)
    assert {len(one.logits) for one in found} == {*range(1, LEVELS + 1)}
    layer = config["transformer_layer_config"]
    named = {name.replace("layers.0.", "midlayer."): t for name, t in stored.items()}
    hidden = named.pop("mask_hidden").reshape(1, -1)
    for known, logits, _ in [found[0], found[-1], next(one for one in found if len(one.known) > 19)]:
        states = states_of(toy, known)
        for level, row in enumerate(logits):
            text = [*known, *[MASK] * level]
            wide = torch.cat([states, hidden.expand(level, -1)])
            expected = naive(layer, named, wide, embedding, text, len(wide))[-1]
            torch.testing.assert_close(row.double(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("nodes", [None, 8])
def test_what_is_trained_is_what_drafts(toy: LLM, tmp_path: Path, nodes: int | None) -> None:
    torch.manual_seed(2)
    network = Network.like(toy.engine.target, layers=2, mask=MASK)
    folder = save_head(tmp_path, network.config(), network.state_dict())
    llm, outer, full = toy.variant({"model": folder, "nodes": nodes}), TargetWeights.of(toy.engine.decoder), 0
    with recorded(llm.engine.drafter) as found:
        llm.generate({"prompt_token_ids": [5, 9, 77, 3]}, GREEDY)
    for known, logits, tree in found:
        pairs = len(known) - 1
        anchors = torch.tensor([*range(pairs), *[pairs - 1] * (len(logits) - 1)])
        depth = torch.tensor([*[0] * pairs, *range(1, len(logits))])
        with torch.no_grad():
            states, tokens = states_of(toy, known), torch.tensor(known)
            expected = network(states, tokens, outer.embedding, anchors, depth)[pairs - 1 :]
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
        best = network.ids[expected.argmax(-1)].tolist()
        path, node = list[int](), -1
        while node in tree.parents:
            node = tree.parents.index(node)  # the first child
            path.append(tree.tokens[node])
        assert path == best[: len(path)]
        full += nodes is not None and len(tree.tokens) > len(set(tree.parents))
    assert len(found) > 4 and (nodes is None or full > 2), "a tree branches"


def test_rows_of_other_anchors_change_nothing(toy: LLM) -> None:
    """A chain in the loss sees the text up to its anchor and itself."""
    torch.manual_seed(3)
    network, outer = Network.like(toy.engine.target), TargetWeights.of(toy.engine.decoder)
    text = [(11 * i) % V for i in range(20)]
    one = read(toy.engine.decoder, text, network.taps)
    anchors, depth = network.rows(one)
    assert int(depth.max()) == 3 and int((anchors + depth).max()) == 18
    counts = torch.bincount(depth).tolist()
    assert counts[0] == 19 > counts[1] > counts[2] >= counts[3] > 0
    states = torch.cat([one.states[tap] for tap in network.taps], dim=-1)[:-1]
    with torch.no_grad():
        whole = network(states, one.tokens, outer.embedding, anchors, depth)
        deepest = int(anchors[depth == 3][0])
        alone = (depth == 0) | (anchors == deepest)
        part = network(states, one.tokens, outer.embedding, anchors[alone], depth[alone])
        torch.testing.assert_close(part, whole[alone])
        other = one.tokens.clone()
        other[deepest + 2 :] = 1
        later = network(states, other, outer.embedding, anchors, depth)
    mine = (anchors == deepest) & (depth > 0)
    torch.testing.assert_close(later[mine], whole[mine])
    assert not torch.allclose(later[:19], whole[:19])


def test_what_does_not_fit_is_refused(toy: LLM, tmp_path: Path) -> None:
    config, stored = published()
    wrong = [
        ({**config, "mask_token_id": V}, stored, f"mask_token_id .* in 0 … {V - 1}"),
        ({**config, "mask_token_id": None}, stored, "mask_token_id .* whole number"),
        (
            config,
            {**stored, "mask_hidden": torch.zeros(2 * HIDDEN)},
            f"has {2 * HIDDEN} values, and {3 * HIDDEN}",
        ),
        (config, {**stored, "lm_head.weight": torch.zeros(VD + 1, H)}, "an lm_head of 129 tokens"),
        (config, {n: t for n, t in stored.items() if n != "mask_hidden"}, "has no tensor 'mask_hidden'"),
    ]
    for i, (changed, tensors, message) in enumerate(wrong):
        folder = save_head(tmp_path / str(i), changed, tensors)
        with pytest.raises(ModelError, match=message):
            PEagle(PEagle.Options(model=folder), toy.engine.target)
    with pytest.raises(ConfigError, match="leave one of them out"):
        PEagle.Options(tap_offset=1, eagle_aux_hidden_state_layer_ids=(2,))
    with pytest.raises(ConfigError, match="'top_k'"):
        toy.variant({"method": "peagle", "top_k": 3})
    old = {key: value for key, value in config.items() if key != "mask_token_id"}
    folder = save_head(tmp_path / "old", {**old, "ptd_token_id": MASK}, stored)
    assert PEagle(PEagle.Options(model=folder), toy.engine.target).net.mask == MASK
