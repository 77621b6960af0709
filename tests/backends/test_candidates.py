"""The candidates of a dynamic tree: the C kernels and their reference keep what sorting all of them keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.candidates import Candidates, Nodes, Plain, TopEntries
from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu.candidates import Compiled
from outrider.backends.torch.backend import TorchBackend
from outrider.core.params import DistributionParams
from outrider.drafting.trees.builder import RANK_CONFIDENCE

LEAST = 1e-30
TORCH = TorchBackend(torch.device("cpu"), torch.float32)


def kinds(k: int, wide: int, levels: int) -> list[Candidates]:
    library = cpu.library()
    return [
        Plain(TORCH.pick_rows, k, wide),
        *([] if library is None else [Compiled(library, k, wide, levels)]),
    ]


class Sorted:
    """The same by sorting whole levels."""

    def __init__(self, wide: int) -> None:
        self.wide, self.size = wide, 0
        self.kept: list[
            tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
        ] = []  # tokens, probs, scores [n, k], records of the n
        self.records, self.scores = np.full(1, -1), np.zeros((1, 1))

    def widen(self, found: TopEntries) -> tuple[list[int], list[int]]:
        entries, probs = found.entries.numpy(), found.probs.numpy()
        tokens = (
            entries
            if found.ids is None
            else np.where(entries < 0, -1, found.ids.numpy()[np.maximum(entries, 0)])
        )
        if found.by_rank is not None:
            probs = np.broadcast_to(found.by_rank.numpy()[: entries.shape[1]], entries.shape)
        logs = [
            math.log(prob) for prob in np.maximum(probs, LEAST, dtype=np.float64).ravel()
        ]  # numpy's own may differ in the last bit
        scores = np.array(logs).reshape(entries.shape) + self.scores
        scores[tokens < 0] = -np.inf
        self.kept.append((tokens, probs, scores, self.records))
        joint = scores.ravel()
        best = np.argsort(-joint, kind="stable")[: self.wide]
        best = best[joint[best] > -np.inf]
        self.records, self.scores = self.size + best, joint[best, None]
        self.size += scores.size
        return (best // tokens.shape[1]).tolist(), tokens.ravel()[best].tolist()

    def keep(self, nodes: int) -> Nodes:
        tokens, probs, scores = (np.concatenate([level[i].ravel() for level in self.kept]) for i in range(3))
        best = np.argsort(-scores, kind="stable")[:nodes]
        keep = np.sort(best[scores[best] > -np.inf])
        above = np.concatenate([np.repeat(records, tokens.shape[1]) for tokens, _, _, records in self.kept])
        place = np.full(len(tokens) + 1, -1)
        place[keep] = np.arange(len(keep))
        return tokens[keep].tolist(), place[above[keep]].tolist(), probs[keep].tolist()


@settings(max_examples=300, deadline=None)
@given(
    k=st.integers(1, 12),
    wide=st.integers(1, 12),
    levels=st.integers(1, 6),
    nodes=st.integers(1, 90),
    seed=st.integers(0, 1 << 30),
    ties=st.booleans(),
    ranked=st.booleans(),
    listed=st.booleans(),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_likeliest_are_kept(
    k: int,
    wide: int,
    levels: int,
    nodes: int,
    seed: int,
    ties: bool,
    ranked: bool,
    listed: bool,
    missing: float,
) -> None:
    """With ties, distributions that allow few tokens or none, confidence by rank, and a head's vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    trees = [Sorted(wide), *kinds(k, wide, levels)]
    rows = 1
    for _ in range(levels):
        entries = torch.randint(50, (rows, k), generator=rng, dtype=torch.int32)
        probs = torch.rand(rows, k, generator=rng).sort(descending=True).values
        if ties:
            probs = (probs * 4).ceil() / 4
        some = (
            int(torch.randint(k + 1, (1,), generator=rng))
            if float(torch.rand(1, generator=rng)) < missing
            else k
        )
        entries[:, some:], probs[:, some:] = -1, 0.0
        ids = torch.arange(100, 150, dtype=torch.int32) if listed else None
        found = TopEntries(entries, probs, ids, torch.tensor(RANK_CONFIDENCE) if ranked else None)
        first, *others = [tree.widen(found) for tree in trees]
        assert all(other == first for other in others)
        if not (rows := len(first[0])):
            break
    first_kept, *others_kept = [tree.keep(nodes) for tree in trees]
    assert min(first_kept[0], default=0) >= 0
    assert all(other == first_kept for other in others_kept)


@pytest.mark.parametrize("which", range(2))
def test_a_level_without_candidates_gives_an_empty_tree(which: int) -> None:
    trees = kinds(3, 2, 2)
    if which >= len(trees):
        pytest.skip("no C compiler here")
    tree = trees[which]
    assert tree.widen(TopEntries(torch.full((1, 3), -1, dtype=torch.int32), torch.zeros(1, 3))) == ([], [])
    assert tree.keep(4) == ([], [], [])


@settings(max_examples=100, deadline=None)
@given(
    k=st.integers(1, 12),
    wide=st.integers(1, 12),
    levels=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
    listed=st.booleans(),
    distribution=st.sampled_from(
        [
            DistributionParams(0.0),
            DistributionParams(0.7),
            DistributionParams(1.0, top_k=5),
            DistributionParams(0.8, top_p=0.6),
        ]
    ),
)
def test_growing_is_picking_and_widening(
    k: int, wide: int, levels: int, seed: int, listed: bool, distribution: DistributionParams
) -> None:
    """In one call and in two, in C and in torch."""
    rng = torch.Generator().manual_seed(seed)
    trees = kinds(k, wide, levels)
    apart = Sorted(wide)
    ids = torch.arange(100, 140, dtype=torch.int32) if listed else None
    ranked = torch.tensor(RANK_CONFIDENCE) if distribution.temperature else None
    rows = 1
    for level in range(levels):
        logits, key = torch.randn(rows, 40, generator=rng) * 3, seed + level
        found = TopEntries(*TORCH.pick_rows(logits, distribution, [key] * rows, k, ids), ids, ranked)
        expected = apart.widen(found)
        assert all(tree.grow(logits, distribution, key, ids, ranked) == expected for tree in trees)
        if not (rows := len(expected[0])):
            break
    tokens, parents, probs = apart.keep(10)
    for tree in trees:
        kept = tree.keep(10)
        assert kept[:2] == (tokens, parents)
        assert kept[2] == pytest.approx(probs, rel=1e-4)
