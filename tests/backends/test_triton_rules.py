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

from outrider.core.noise import MASK
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree

pytest.importorskip("triton", reason="triton is not installed")

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


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
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
