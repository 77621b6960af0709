"""The kernels of sampling distributions and verification rules, beside their references in torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import c_backend, needs_c, sampled_row, two_threads
from rule_cases import NEVER, PARAMS, drafted, of_reference, random_logits

from outrider.backends.cpu.rules import TreeQueries
from outrider.backends.torch import sampling as reference
from outrider.core.noise import MASK
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree
from outrider.sampling import random_streams
from outrider.sampling.sampler import Sampler

pytestmark = needs_c


def distributions() -> Any:
    ops = c_backend().distributions
    assert ops is not None
    return ops


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


def both(name: str, row: Row, logits: torch.Tensor, root: int, tree: DraftTree) -> tuple[Any, Any]:
    """What the kernels and the reference make of a tree; None if a node has no distribution."""
    verifier = c_backend().verifier
    assert verifier is not None
    queries = verifier.queries(name)
    queries.add(5, row, tree, root)
    verifier.verify(logits, queries)
    return dict(queries.read())[5], of_reference(name, row, logits, root, tree)


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
