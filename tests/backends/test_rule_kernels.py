"""The kernels of sampling distributions and verification rules, beside their references in torch."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_cases import c_backend, needs_c, sampled_row, two_threads

from outrider import verify
from outrider.backends.cpu.rules import TreeQueries
from outrider.backends.torch import sampling as reference
from outrider.backends.torch.backend import TorchBackend
from outrider.core.noise import MASK
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree
from outrider.errors import ModelError
from outrider.sampling import random_streams
from outrider.sampling.sampler import Sampler
from outrider.verify.base import RowPicker

pytestmark = needs_c
NEVER = float("-inf")
PARAMS = st.builds(
    DistributionParams,
    temperature=st.sampled_from([0.0, 0.1, 0.8, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    top_k=st.sampled_from([0, 0, 1, 5, 70, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
)


def distributions() -> Any:
    ops = c_backend().distributions
    assert ops is not None
    return ops


def random_logits(
    generator: torch.Generator, rows: int, vocabulary: int, masked: float = 0.0
) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    holes = torch.rand(rows, vocabulary, generator=generator) < masked
    holes[:, 0] = False
    return logits.masked_fill(holes, NEVER)


# ---- distributions


@settings(max_examples=150, deadline=None)
@given(
    params=PARAMS,
    seed=st.integers(0, 1 << 32),
    vocabulary=st.sampled_from([1, 5, 63, 64, 65, 1000, 4133]),
    masked=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_probabilities_are_those_of_the_reference(
    params: DistributionParams, seed: int, vocabulary: int, masked: float
) -> None:
    logits = random_logits(torch.Generator().manual_seed(seed), 3, vocabulary + 3, masked)[:, :vocabulary]
    expected = reference.probabilities(logits[1], params)
    found = distributions().probabilities(logits, params, 1)
    assert expected is not None and found is not None
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_long_row_has_the_same_probabilities_on_two_threads() -> None:
    logits, params = torch.randn(50_000, generator=torch.Generator().manual_seed(0)), DistributionParams(0.9)
    once = distributions().probabilities(logits, params)
    with two_threads():
        assert torch.equal(distributions().probabilities(logits, params), once)
    torch.testing.assert_close(once, reference.probabilities(logits, params), rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [NEVER, math.nan, math.inf])
def test_no_probabilities_without_a_finite_maximum(bad: float) -> None:
    logits = torch.full((70,), bad)
    for params in (DistributionParams(), DistributionParams(0.0)):
        assert distributions().probabilities(logits, params) is None
        assert reference.probabilities(logits, params) is None


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    vocabulary=st.sampled_from([1, 3, 64, 500, 4133]),
    count=st.integers(1, 6),
    first=st.integers(0, 3000),
    repeats=st.booleans(),
    peaked=st.booleans(),
)
def test_children_are_those_of_the_reference(
    seed: int, vocabulary: int, count: int, first: int, repeats: bool, peaked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row, params = (
        sampled_row([1] * 9, DistributionParams(0.8), seed),
        DistributionParams(0.2 if peaked else 1.0),
    )
    q = distributions().probabilities(random_logits(generator, 1, vocabulary, 0.3)[0], params)
    nodes = range(first, first + count)
    expected = random_streams.children(row, q, nodes, repeats)
    assert Sampler(c_backend()).children(row, q, nodes, repeats) == expected


# ---- rules


class Asked:
    """The target as the reference asks for it, node by node."""

    def __init__(self, row: Row, logits: torch.Tensor, root: int) -> None:
        self.row, self.logits, self.root = row, logits, root
        self.sampler = Sampler(TorchBackend(torch.device("cpu"), torch.float32))

    def pick(self, row: int, node: int, path: Any) -> int:
        return self.sampler.pick(self.row, path, self.logits, self.root + 1 + node)

    def p(self, row: int, node: int, path: Any) -> torch.Tensor:
        return self.sampler.distribution(self.row, path, self.logits, self.root + 1 + node)

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.row, node, probability)

    def draw(self, row: int, node: int, distribution: torch.Tensor) -> int:
        return random_streams.emit(self.row, node, distribution)


def drafted(
    row: Row, logits: torch.Tensor, above: list[int], kinds: list[int], repeats: bool, near: bool
) -> DraftTree:
    """A tree of sampled and chosen nodes.  kinds: 0 chosen, 1 or 2 sampled from that q of the parent."""
    generator = torch.Generator().manual_seed(7)
    parents, tokens = [place % (i + 1) - 1 for i, place in enumerate(above)], list[int]()
    probs: list[torch.Tensor] = []
    left: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    probs_of: list[int] = []
    for node, (parent, kind) in enumerate(zip(parents, kinds)):
        if kind == 0:
            same = {tokens[i] for i in range(node) if parents[i] == parent and probs_of[i] < 0}
            free = [token for token in range(logits.shape[1]) if token not in same]
            assume(free)
            tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
            probs_of.append(-1)
            continue
        if (parent, kind) not in left:
            own = logits[1 + parent] + torch.randn(logits.shape[1], generator=generator) * (
                0.3 if near else 3
            )
            q = reference.probabilities(own, row.distribution)
            assert q is not None
            left[parent, kind] = len(probs), q
            probs.append(q)
        which, q = left[parent, kind]
        drawn = random_streams.children(row, q, range(node, node + 1))
        if not drawn:  # q has run out of tokens
            tokens.append(0)
            probs_of.append(-1)
            continue
        if not repeats:
            left[parent, kind] = which, random_streams.without(q, drawn[0])
        tokens += drawn
        probs_of.append(which)
    return DraftTree(tokens, parents, [0.5] * len(tokens), probs, probs_of, repeats)


def both(name: str, row: Row, logits: torch.Tensor, root: int, tree: DraftTree) -> tuple[Any, Any]:
    """What the kernels and the reference make of a tree; None if a node has no distribution."""
    verifier = c_backend().verifier
    assert verifier is not None
    queries = verifier.queries(name)
    queries.add(5, row, tree, root)
    verifier.verify(logits, queries)
    picker, expected = RowPicker(Asked(row, logits, root), 0), None
    with contextlib.suppress(ModelError):
        expected = verify.rule(name)().walk(tree, picker)
    return dict(queries.read())[5], None if picker.unknown else expected


def test_answers_are_read_from_the_buffer_that_was_prepared() -> None:
    """Reading an attribute of the queries allocates nothing: C has the address of that buffer."""
    queries = TreeQueries()
    queries.numbers += [0] * 100
    _, count, address = queries.prepare()
    for name in dir(queries):
        getattr(queries, name)
    assert (count, address) == (0, queries.data.buffer_info()[0])


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(["rejection", "block", "traversal"]),
    params=PARAMS,
    seed=st.integers(0, MASK),
    vocabulary=st.sampled_from([4, 6, 70, 300]),
    above=st.lists(st.integers(0, 100), max_size=12),
    chain=st.booleans(),
    kinds=st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=12, max_size=12),
    repeats=st.booleans(),
    near=st.booleans(),
    probes=st.integers(0, 3),
    bad=st.integers(0, 40),
)
def test_rules_are_those_of_the_reference(
    name: str,
    params: DistributionParams,
    seed: int,
    vocabulary: int,
    above: list[int],
    chain: bool,
    kinds: list[int],
    repeats: bool,
    near: bool,
    probes: int,
    bad: int,
) -> None:
    above = [*range(len(above))] if chain else above
    row = sampled_row([1] * 7, params, seed, 2)
    logits = random_logits(
        torch.Generator().manual_seed(seed % (1 << 60)), len(above) + 2, vocabulary + 3, 0.1
    )
    logits = logits[:, :vocabulary]
    tree = drafted(row, logits[1:], above, kinds, repeats, near)
    tree = tree._replace(probes=min(probes, len(tree.tokens)))
    if bad < len(logits):
        logits[bad] = NEVER
    found, expected = both(name, row, logits, 1, tree)
    assert found == expected


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_most_trees_are_accepted_in_part(name: str) -> None:
    """The comparison above means something: paths of all lengths occur, and kernels and reference agree."""
    lengths, params = set(), DistributionParams(0.8, top_p=0.95)
    for seed in range(60):
        row, generator = sampled_row([1, 2], params, seed), torch.Generator().manual_seed(seed)
        logits = random_logits(generator, 5, 2000)
        tree = drafted(row, logits, [0, 1, 2, 3], [1] * 4, False, True)
        assert tree.parents == [ROOT, 0, 1, 2]
        found, expected = both(name, row, logits, 0, tree)
        assert found == expected
        lengths.add(len(expected[0]))
    assert lengths == {0, 1, 2, 3, 4}
