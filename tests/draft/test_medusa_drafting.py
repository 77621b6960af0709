"""Positions, noise and distributions of Medusa's drafts; the trees that they fill; training."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_heads import CONFIG, PT, Beside, drafter_of, listened, parts_of, reference
from torch import Tensor
from toys import HIDDEN, V, acceptance, samples, save_head, teach

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import Head
from outrider.config import SpeculativeOptions
from outrider.core.noise import gumbel, key_of
from outrider.core.row import Row
from outrider.core.step import FINAL, Batch, RowStep
from outrider.core.tree import EMPTY_TREE, ROOT, Draft, DraftTree
from outrider.draft.medusa import Medusa, MedusaHeads, Network
from outrider.draft.union import Union
from outrider.drafting.base import Drafter
from outrider.heads.ranks import MEDUSA, RankAccuracy, paths
from outrider.heads.sample import Sample, TargetWeights
from outrider.train.methods.medusa import Medusa as Trained


@pytest.fixture
def chained(toy: LLM, tmp_path: Path) -> tuple[LLM, Beside]:
    parts = parts_of(4)
    folder = save_head(tmp_path, CONFIG, reference(parts), PT)
    return toy.variant({"model": folder, "tree": "chain"}), Beside(toy, parts)


def test_each_head_drafts_for_its_own_position(chained: tuple[LLM, Beside]) -> None:
    llm, beside = chained
    heard = listened(llm, [5, 6, 7])
    assert len(heard) > 10
    for tokens, tree in heard:
        assert tree.parents == list(range(-1, len(tree.tokens) - 1))
        assert tree.tokens == beside(tokens).argmax(-1).tolist()[: len(tree.tokens)]
    assert max(len(tree.tokens) for _, tree in heard) == 4


def test_drafts_use_the_noise_of_their_position(chained: tuple[LLM, Beside]) -> None:
    llm, beside = chained
    heard, differ = listened(llm, [5, 6, 7], temperature=0.9, seed=11), 0
    for tokens, tree in heard:
        noise = torch.stack([gumbel(key_of(11, 0, len(tokens) + i), V) for i in range(len(tree.tokens))])
        logits = beside(tokens)[: len(tree.tokens)]
        assert tree.tokens == (logits / 0.9 + noise).argmax(-1).tolist()
        differ += tree.tokens != logits.argmax(-1).tolist()
    assert len(heard) > 10 and differ > 5


def test_processors_see_the_positions_of_drafts(chained: tuple[LLM, Beside]) -> None:
    """A token that ends the text is masked until min_tokens; processors see the draft path."""
    llm, beside = chained
    favourite = int(beside([5, 6, 7, 9])[1].argmax())
    wanted = {"logit_bias": {favourite: 100.0}}
    heard = listened(llm, [5, 6, 7], stop_token_ids=[favourite], min_tokens=12, **wanted)
    output = [(len(tokens) - 3 + i, token) for tokens, tree in heard for i, token in enumerate(tree.tokens)]
    assert len(output) > 20 and max(at for at, _ in output) >= 12
    assert all((token == favourite) == (at >= 12) for at, token in output)

    def never_twice(ids: list[int], logits: Tensor) -> Tensor:
        out = logits.clone()
        out[ids[-1:]] = float("-inf")
        return out

    heard = listened(llm, [5, 6, 7], logits_processors=[never_twice], **wanted)
    assert sum(len(tree.tokens) for _, tree in heard) > 20
    for tokens, tree in heard:
        assert all(one != other for one, other in itertools.pairwise([tokens[-1], *tree.tokens]))
        assert favourite in [tokens[-1], *tree.tokens][:2]


def test_a_level_has_one_distribution(toy: LLM, tmp_path: Path) -> None:
    """Sampled nodes keep their q: the distribution of the level's head, under any parent."""
    parts = parts_of(3)
    folder = save_head(tmp_path, CONFIG, reference(parts), PT)
    llm, beside = toy.variant({"model": folder, "nodes": 30, "verification": "rejection"}), Beside(toy, parts)
    heard = listened(llm, [5, 6, 7], temperature=1.0, max_tokens=12)
    assert len(heard) > 5
    for tokens, tree in heard:
        distributions, level = beside(tokens).softmax(-1), {ROOT: -1}
        for node, parent in enumerate(tree.parents):
            level[node] = level[parent] + 1
            distribution = tree.distribution(node)
            assert distribution is not None and distribution is tree.distributions[level[node]]
            assert torch.allclose(distribution, distributions[level[node]], atol=1e-5)
    assert max(len(Counter(tree.parents)) for _, tree in heard) > 3
    first = [tree.tokens[0] for _, tree in heard]
    assert first != [int(beside(tokens)[0].argmax()) for tokens, _ in heard], "drawn, not chosen"


def test_sampled_drafts_follow_their_distribution(toy: LLM, tmp_path: Path) -> None:
    """Over many seeds a sampled token follows its distribution, independently of the next level."""
    parts = [(blocks, lm_head * 0.3) for blocks, lm_head in parts_of(2) if lm_head is not None]
    llm = toy.variant(
        {
            "model": save_head(tmp_path, CONFIG, reference(parts), PT),
            "tree": [[0], [0, 0]],
            "verification": "rejection",
        }
    )
    heard: dict[tuple[int, ...], list[DraftTree]] = {}
    for seed in range(300):
        tokens, tree = listened(llm, [5, 6], temperature=0.7, top_k=2, seed=seed, max_tokens=4)[0]
        heard.setdefault(tuple(tokens), []).append(tree)
    trees = max(heard.values(), key=len)
    first, second = trees[0].distributions
    a, b = int(first.argmax()), int(second.argmax())
    p, q = float(first[a]), float(second[b])
    assert (
        len(trees) > 100
        and max(p, q) < 0.95
        and [int((distribution > 0).sum()) for distribution in (first, second)] == [2, 2]
    )
    drawn = [(tree.tokens[0] == a, tree.tokens[1] == b) for tree in trees]
    for share, distribution in (
        (sum(x for x, _ in drawn), p),
        (sum(y for _, y in drawn), q),
        (sum(x and y for x, y in drawn), p * q),
    ):
        assert (
            abs(share / len(trees) - distribution)
            < 4 * (distribution * (1 - distribution) / len(trees)) ** 0.5
        )


# ---- trees


@pytest.mark.parametrize("name", MEDUSA)
def test_published_trees_are_drafted_completely(name: str, toy: LLM, tmp_path: Path) -> None:
    parts = parts_of(5)
    folder = save_head(tmp_path, CONFIG, reference(parts), PT)
    llm = toy.variant({"model": folder, "tree": name})
    tokens, tree = listened(llm, [5, 6, 7], max_tokens=8)[0]
    ranked = Beside(toy, parts)(tokens).topk(10).indices.tolist()
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        found[node] = (*found[parent], ranked[len(found[parent])].index(token))
    assert sorted(found.values())[1:] == sorted(paths(MEDUSA[name])) and len(tree.tokens) == 63


def test_a_smaller_budget_takes_the_most_accurate_paths(toy: LLM, tmp_path: Path) -> None:
    drafter = drafter_of(
        toy, save_head(tmp_path, CONFIG, reference(parts_of(3)), PT), tree="mc_sim_7b_63", nodes=5
    )
    assert [drafter.size(depth) for depth in range(4)] == [0, 5, 5, 5] and drafter.depth == 3
    for level, worth in enumerate(drafter.memory.accuracy):
        worth[:] = [0.1 if level == 0 else 0.01] * len(worth)
    assert drafter.memory.best_paths(5, 3, drafter.paths) == [(i,) for i in range(5)]


def test_own_tree_follows_accuracy(toy: LLM, tmp_path: Path) -> None:
    """With heads whose best token is always right the tree grows deep; useless ranks lose their share."""
    drafter = drafter_of(toy, save_head(tmp_path, CONFIG, reference(parts_of(3)), PT), nodes=8)
    chain = [(0,), (0, 0), (0, 0, 0)]
    assert drafter.memory.best_paths(8, 3, None)[:3] != chain
    for _ in range(150):
        order = drafter.memory.best_paths(8, 3, None)
        tree = DraftTree(
            list(range(len(order))),
            [order.index(p[:-1]) if len(p) > 1 else ROOT for p in order],
            [0.5] * len(order),
        )
        right = [order.index(path) for path in chain if path in order]
        drafter.memory.update(tree, [tree.tokens[node] for node in right])
    assert drafter.memory.best_paths(8, 3, None)[:3] == chain
    assert all(drafter.memory.accuracy[level][0] > 0.9 for level in range(3))
    assert drafter.memory.accuracy[0][1] < 0.05


def test_grown_trees_are_the_best() -> None:
    """Of all trees of so many nodes, by brute force over what ranks and levels there are."""
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05]]
    every = [path for level in (1, 2) for path in itertools.product(range(3), repeat=level)]
    worth = {
        path: float(
            torch.tensor([accuracies[i][rank] for i, rank in enumerate(path)], dtype=torch.float64).prod()
        )
        for path in every
    }

    def closed(tree: tuple[Any, ...]) -> bool:
        return all(len(path) == 1 or path[:-1] in tree for path in tree)

    for nodes in (1, 3, 5):
        best = max(
            sum(worth[path] for path in tree) for tree in itertools.combinations(every, nodes) if closed(tree)
        )
        made = RankAccuracy(accuracies).best_paths(nodes, len(accuracies))
        assert len(set(made)) == nodes and closed(tuple(made))
        assert sum(worth[path] for path in made) == pytest.approx(best)
        Medusa.Options(tree=made)  # it is what the option takes


# ---- learning


def test_the_loss_is_the_published_one(toy: LLM) -> None:
    torch.manual_seed(1)
    network = Network(HIDDEN, V, heads=3)
    tokens, states = torch.randint(V, (7,)), torch.randn(7, HIDDEN)
    outer = TargetWeights.of(toy.engine.decoder)
    with torch.no_grad():
        loss = network.loss(Sample(tokens, {FINAL: states}, torch.empty(0)), outer)
        expected = 0.0
        for i, head in enumerate(network):
            right = [-head(states[t]).log_softmax(-1)[tokens[t + 2 + i]] for t in range(7 - 2 - i)]
            expected += 0.8**i * float(torch.stack(right).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    begun = Network.beside(outer, heads=2, blocks=2, own=False)
    assert torch.allclose(begun.logits(1, states, outer), states @ outer.lm_head.T)
    assert torch.allclose(Network.beside(outer, heads=2).logits(0, states, outer), states @ outer.lm_head.T)
    assert float(network.loss(Sample(tokens[:2], {FINAL: states[:2]}, torch.empty(0)), outer)) == 0, (
        "too short a text says nothing"
    )


@pytest.fixture(scope="module")
def taught(toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Trained heads in vLLM's layout."""
    data, outer = samples(toy, (FINAL,)), TargetWeights.of(toy.engine.decoder)
    torch.manual_seed(0)
    network = Network.beside(outer, heads=2)
    teach(network, network.loss, data, outer, steps=50)
    return save_head(
        tmp_path_factory.mktemp("taught"), *Trained.export(network.config(), network.state_dict(), "vllm")
    )


def test_a_trained_head_is_mostly_right(toy: LLM, taught: str) -> None:
    """Chance is 1/512.  In sampled texts every draft token depends on a sampled one."""
    target = toy.engine.options.model
    assert acceptance(target, {"model": taught, "tree": "chain", "num_speculative_tokens": 1}) > 0.5
    assert acceptance(target, {"model": taught, "tree": "chain"}) > 0.4
    assert acceptance(target, {"model": taught, "nodes": 4}) > 0.2


def test_a_shift_is_caught(toy: LLM, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first level asks the second head."""
    whole = MedusaHeads.__call__
    monkeypatch.setattr(
        MedusaHeads, "__call__", lambda self, states, levels: whole(self, states, 2).flip(1)[:, :levels]
    )
    assert (
        acceptance(toy.engine.options.model, {"model": taught, "tree": "chain", "num_speculative_tokens": 1})
        < 0.1
    )


def test_a_row_without_a_state_gets_no_drafts(toy: LLM, tmp_path: Path) -> None:
    """Neither in the step that reads its prompt nor when it asked for none; and nothing of it is kept."""
    folder = save_head(tmp_path, CONFIG, reference(parts_of(3)), PT)
    llm = toy.variant({"model": folder})
    asked: list[Row] = []
    ready = llm.engine.drafter.ready  # type: ignore[attr-defined]
    llm.engine.drafter.ready = lambda batch: [asked.append(batch.rows[r]) or r for r in ready(batch)]
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}]
    params = [SamplingParams(temperature=0, max_tokens=9, speculate=i == 0) for i in range(2)]
    out = llm.generate(prompts, params)
    assert out[0].speculation.drafted > 0 and out[1].speculation.drafted == 0
    assert {row.prompt for row in asked} == {3} and all(len(row.tokens) > 3 for row in asked)
    assert not llm.engine.drafter.last_states  # type: ignore[attr-defined]


def test_a_union_updates_the_accuracy_of_the_right_rank(toy: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is always right, and the only one of the head's that the merged tree keeps."""
    prompt, params = (
        {"prompt_token_ids": [1, 2, 3]},
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    )
    truth = [1, 2, 3, *toy.generate(prompt, params)[0].outputs[0].token_ids, 0, 0, 0]

    class Hopeful(Drafter):
        """Knows the text, and is sure of it."""

        depth = 2

        def propose(self, batch: Batch) -> Draft:
            return Draft([self._tree(step) for step in batch])

        def _tree(self, step: RowStep) -> DraftTree:
            end = len(step.row.tokens)
            return DraftTree.chain(truth[end : end + 2], [1.0] * 2) if step.budget.nodes > 1 else EMPTY_TREE

    target = toy.engine.target
    network = Network(HIDDEN, V, heads=1, blocks=1)
    medusa = Medusa(Medusa.Options(nodes=2), target, Head.of("one", network.config(), network.state_dict()))
    draft_token, end = medusa.propose, 0

    def propose(batch: Batch) -> Draft:
        nonlocal end
        end = len(batch.rows[0].tokens)
        return draft_token(batch)

    def heads(*_: Any) -> Tensor:
        logits = torch.zeros(1, 1, V)
        logits[..., truth[end]], logits[..., (truth[end] + 1) % V] = 5.0, 9.0
        return logits

    medusa.propose = propose  # type: ignore[method-assign]
    monkeypatch.setattr(type(medusa.heads), "__call__", heads)
    before = [list(level) for level in medusa.memory.accuracy]
    llm = toy.variant(None)
    union = Union(Union.Options(nodes=2), target, [lambda _: medusa, lambda target: Hopeful(None, target)])
    llm.engine.use(union, SpeculativeOptions.of({"method": "union", "drafters": [{"method": "ngram"}]}))
    out = llm.generate(prompt, params)[0].outputs[0]
    assert out.token_ids == truth[3:-3] and out.speculation.accepted > 10
    assert medusa.memory.accuracy[0][0] < before[0][0] and medusa.memory.accuracy[0][1] > before[0][1]
