"""The rules that compare p with q, in Triton kernels, beside `verify`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from kernel_cases import sampled_row
from rule_cases import NEVER, PARAMS, drafted, of_reference, random_logits
from syncs import Syncs

from outrider.backends.torch import sampling as reference
from outrider.core.noise import MASK
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree
from outrider.sampling.random_streams import index

pytest.importorskip("triton", reason="triton is not installed")

from outrider.backends.triton import distributions, sampling
from outrider.backends.triton.verifier import TreeVerifier

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
RULES = ["rejection", "block", "traversal"]
Case = tuple[Row, int, DraftTree]


def answers(name: str, logits: torch.Tensor, cases: list[Case]) -> Any:
    verifier = TreeVerifier(DEVICE)
    queries = verifier.queries(name)
    for key, (row, root, tree) in enumerate(cases):
        queries.add(key, row, tree, root)
    verifier.verify(logits.to(DEVICE), queries)
    return dict(queries.read())


@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    name=st.sampled_from(RULES),
    params=st.lists(PARAMS, min_size=3, max_size=3),
    seed=st.integers(0, MASK),
    vocabulary=st.sampled_from([4, 6, 70, 300]),
    above=st.lists(st.lists(st.integers(0, 100), max_size=9), min_size=3, max_size=3),
    chain=st.booleans(),
    kinds=st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=9, max_size=9),
    repeats=st.booleans(),
    near=st.booleans(),
    probes=st.integers(0, 3),
    bad=st.integers(0, 60),
)
def test_rules_are_those_of_the_reference(
    name: str,
    params: list[DistributionParams],
    seed: int,
    vocabulary: int,
    above: list[list[int]],
    chain: bool,
    kinds: list[int],
    repeats: bool,
    near: bool,
    probes: int,
    bad: int,
) -> None:
    """Ragged trees of three rows; rows of logits without a tree, and one that is not finite."""
    generator = torch.Generator().manual_seed(seed % (1 << 60))
    logits = random_logits(generator, sum(map(len, above)) + 7, vocabulary + 3, 0.1)[:, :vocabulary]
    cases, root = list[Case](), 1
    for i, (own, places) in enumerate(zip(params, above)):
        row = sampled_row([1] * (7 + i), own, seed, i)
        places = [*range(len(places))] if chain else places
        tree = drafted(row, logits[root:], places, kinds, repeats, near)
        cases.append((row, root, tree._replace(probes=min(probes, len(places)))))
        root += len(places) + 2
    if bad < len(logits):
        logits[bad] = NEVER
    expected = {key: of_reference(name, row, logits, at, tree) for key, (row, at, tree) in enumerate(cases)}
    assert answers(name, logits, cases) == expected


@pytest.mark.parametrize("name", RULES)
def test_most_trees_are_accepted_in_part(name: str) -> None:
    """The comparison above means something: paths of several lengths occur.  Only the answers are read."""
    lengths = set()
    for seed in range(3):
        cases, logits = list[Case](), random_logits(torch.Generator().manual_seed(seed), 20, 2500)
        for i in range(4):
            row = sampled_row([1, 2], DistributionParams(0.8, top_p=0.95 if i % 2 else 1.0), seed, i)
            cases.append((row, 5 * i, drafted(row, logits[5 * i :], [0, 1, 2, 3], [1] * 4, False, True)))
        with Syncs() as seen:
            found = answers(name, logits, cases)
        assert seen.seen == ["tolist"]
        assert found == {
            i: of_reference(name, row, logits, at, tree) for i, (row, at, tree) in enumerate(cases)
        }
        lengths |= {len(accepted) for accepted, _ in found.values()}
    assert {0, 4} < lengths, lengths


@pytest.mark.parametrize("name", RULES)
def test_a_large_vocabulary_is_summed_in_parts(name: str) -> None:
    """A flat distribution that the draft is far from: most tokens are emitted from residuals."""
    vocabulary, tokens = 2 * sampling.PART + 100, set()
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(3)) / 2
    for seed in range(2):
        row = sampled_row([1, 2, 3], DistributionParams(1.0), seed)
        tree = drafted(row, logits, [0, 0, 1, 2], [1] * 4, False, False)
        found = answers(name, logits, [(row, 0, tree)])[0]
        assert found == of_reference(name, row, logits, 0, tree)
        tokens.add(found[1][-1] // distributions.BLOCK.value)
    assert len(tokens) == 2


@pytest.mark.parametrize("name", RULES)
def test_no_tree_and_distributions_of_another_size(name: str) -> None:
    assert answers(name, torch.randn(3, 9), []) == {}
    tree = DraftTree([2], [-1], [0.5], [torch.ones(8).double() / 8], [0])
    with pytest.raises(ValueError, match=r"shape \(8,\), not \(9,\)"):
        answers(name, torch.randn(3, 9), [(sampled_row([1], DistributionParams(1.0)), 0, tree)])


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(params=PARAMS, seed=st.integers(0, MASK), vocabulary=st.sampled_from([1, 70, 300, 5000]))
def test_samples_of_drafts_are_those_of_the_reference(
    params: DistributionParams, seed: int, vocabulary: int
) -> None:
    """And so are the distributions that are kept, padded with 0; rows that keep none have their tokens."""
    generator = torch.Generator().manual_seed(seed % (1 << 60))
    logits, uniforms = (
        random_logits(generator, 4, vocabulary, 0.1),
        torch.rand(4, generator=generator).double(),
    )
    logits[2] = NEVER
    kept = torch.full((4, vocabulary + 9), 7.0, dtype=torch.float64, device=DEVICE)
    places = torch.tensor([0, *(row.data_ptr() for row in kept[1:])])
    samples = torch.stack([places, uniforms.view(torch.int64)], 1).to(DEVICE)
    tokens = torch.tensor([5, 5, -1, 5], device=DEVICE)
    numbers = torch.tensor([sampling.params_of(params, vocabulary)], dtype=torch.float64, device=DEVICE)
    owners = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    distributions.sample(logits.to(DEVICE), owners, numbers, samples, tokens, vocabulary + 9)
    assert [int(token) for token in tokens[::2]] == [5, -1] and bool((kept[::2] == 7).all())
    for row in (1, 3):
        q = reference.probabilities(logits[row], params)
        assert q is not None
        found = kept[row].cpu()
        torch.testing.assert_close(found[:vocabulary], q, rtol=1e-12, atol=0)
        assert not found[vocabulary:].any()
        assert int(tokens[row]) == index(q, float(uniforms[row]))


@pytest.mark.parametrize("params", [DistributionParams(1.0), DistributionParams(0.7, 0.01, 40, 0.9)])
def test_drafts_from_the_targets_logits_are_accepted(params: DistributionParams) -> None:
    """p and q have the same bits: no rounding error lets block verification reject."""
    rng = torch.Generator().manual_seed(9)
    numbers = torch.tensor([sampling.params_of(params, 3000)], dtype=torch.float64, device=DEVICE)
    logits, uniforms = torch.randn(4, 3000, generator=rng) * 3, torch.rand(4, generator=rng).double()
    kept = torch.empty(4, 3000, dtype=torch.float64, device=DEVICE)
    places, tokens = torch.tensor([row.data_ptr() for row in kept]), torch.zeros(4, dtype=torch.int64)
    samples = torch.stack([places, uniforms.view(torch.int64)], 1).to(DEVICE)
    owners, tokens = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE), tokens.to(DEVICE)
    distributions.sample(logits.to(DEVICE), owners, numbers, samples, tokens, 3000)
    tree = DraftTree.chain(tokens[:3].tolist(), [0.5] * 3)
    tree = tree._replace(distributions=[*kept[:3]], probs_of=range(3))
    for name in RULES:
        cases = [(sampled_row([1], params, seed), 0, tree) for seed in range(3)]
        found = [answers(name, logits, [case])[0] for case in cases]
        assert all(accepted == [0, 1, 2] for accepted, _ in found), name


def test_only_distributions_of_nodes_are_moved() -> None:
    """A tree that was cut keeps those of all its nodes, and probes are never accepted."""
    row, logits = sampled_row([1, 2], DistributionParams(0.8), 1), random_logits(torch.Generator(), 6, 40)
    whole = drafted(row, logits, [0, 1, 2, 3, 4], [1] * 5, False, True)
    assert len(whole.distributions) == 5
    for tree in (whole.only([0, 1]), whole._replace(probes=3)):
        queries = TreeVerifier(DEVICE).queries("rejection")
        queries.add(0, row, tree, 0)
        assert len(queries.probs) == 2
    assert answers("rejection", logits, [(row, 0, whole.only([0, 1]))]) == {
        0: of_reference("rejection", row, logits, 0, whole.only([0, 1]))
    }
