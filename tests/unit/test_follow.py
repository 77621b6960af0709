"""`match` over a tree in one call of the C kernels."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import NEVER, c_kernels, make_row, needs_c

from outrider import ModelError
from outrider.sampling.noise import MASK
from outrider.sampling.params import Law
from outrider.sampling.sampler import Sampler
from outrider.types import Guesses
from outrider.verify.match import Match


@needs_c
@settings(max_examples=200, deadline=None)
@given(
    law=st.sampled_from([Law(0.0), Law(0.8), Law(1.0, top_k=4), Law(0.7, top_p=0.6)]), seed=st.integers(0, MASK), index=st.integers(0, 3),
    above=st.lists(st.integers(0, 100), max_size=14), probes=st.integers(0, 4), length=st.integers(1, 50), bad=st.booleans(),
)  # fmt: skip
def test_following_a_tree_is_picking_node_by_node(
    law: Law, seed: int, index: int, above: list[int], probes: int, length: int, bad: bool
) -> None:
    """In one call and in many; where no token can be said behind some node, the many say why."""
    dice = torch.Generator().manual_seed(seed % (1 << 60))
    parents = [place % (i + 1) - 1 for i, place in enumerate(above)]
    logits = torch.randn(len(above) + 3, 6, generator=dice)[:, :5] * 2  # rows are further apart than they are long
    tokens = torch.randint(5, (len(above),), generator=dice).tolist()
    if bad and above:
        logits[1 + int(torch.randint(len(above), (1,), generator=dice)) + 1] = NEVER
    row = make_row([1] * length, law, seed, index)
    sampler, tree = Sampler(c_kernels()), Guesses(tokens, parents, [0.5] * len(tokens), probes=min(probes, len(tokens)))

    class Asked:
        follow = staticmethod(lambda: None)
        pick = staticmethod(lambda node, path: sampler.pick(row, path, logits, 2 + node))

    trees = sampler.kernels.trees()
    for key in (4, 0, 9):
        sampler.ask(trees, key, row, tree, 1)
    sampler.kernels.follow(logits, trees)
    found = trees.read()
    try:
        expected = Match().walk(tree, Asked)  # type: ignore[arg-type]
    except ModelError:
        assert found == {4: None, 0: None, 9: None}
    else:
        assert found == {4: expected, 0: expected, 9: expected}
