"""Noise, filters and match of the Triton kernels, beside their definitions on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE
from kernel_cases import sampled_row

from outrider import verify
from outrider.backends.torch import sampling as reference
from outrider.backends.torch.backend import TorchBackend
from outrider.core import stop_rule
from outrider.core.noise import MASK, gumbel, key_of
from outrider.core.params import COLDEST, HOTTEST, DistributionParams
from outrider.core.tree import DraftTree
from outrider.sampling.sampler import Sampler
from outrider.verify.base import RowPicker

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from outrider.backends.triton import features, sampling
from outrider.backends.triton.backend import TritonBackend
from outrider.backends.triton.picking import pick_next
from outrider.backends.triton.verifier import TreeVerifier

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
quickly = settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
PARAMS = st.builds(
    DistributionParams,
    temperature=st.sampled_from([0.0, COLDEST, 0.003, 0.1, 0.8, 1.0, 1.7, HOTTEST]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    top_k=st.sampled_from([0, 0, 1, 5, 70, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
)


class Asked:
    """The target as the reference asks for it, node by node."""

    def __init__(self, row: Any, logits: torch.Tensor, root: int) -> None:
        self.row, self.logits, self.root = row, logits, root
        self.sampler = Sampler(TorchBackend(torch.device("cpu"), torch.float32))

    def pick(self, row: int, node: int, path: Any) -> int:
        return self.sampler.pick(self.row, path, self.logits, self.root + 1 + node)


def expected(row: Any, logits: torch.Tensor, root: int, tree: DraftTree) -> Any:
    asked: Any = Asked(row, logits, root)
    return verify.rule("match")().walk(tree, RowPicker(asked, 0))


def answers(logits: torch.Tensor, trees: list[tuple[Any, int, DraftTree]]) -> Any:
    verifier = TreeVerifier(DEVICE)
    queries = verifier.queries("match")
    for key, (row, root, tree) in enumerate(trees):
        queries.add(key, row, tree, root)
    verifier.verify(logits.to(DEVICE), queries)
    return dict(queries.read())


def likely_tree(row: Any, logits: torch.Tensor, root: int, wrong: list[bool]) -> DraftTree:
    """A chain of the target's own picks, as long as `wrong`, with a wrong sibling before the marked."""
    sampler = Sampler(TorchBackend(torch.device("cpu"), torch.float32))
    tokens, parents, path, parent = list[int](), list[int](), list[int](), -1
    for beside in wrong:
        token = sampler.pick(row, path, logits, root + 1 + parent)
        if beside:
            tokens.append((token + 1) % logits.shape[1])
            parents.append(parent)
        tokens.append(token)
        parents.append(parent)
        parent = len(tokens) - 1
        path.append(token)
    return DraftTree(tokens, parents, [0.5] * len(tokens))


@triton.jit
def _all_noise(out, key, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    bits = sampling._noise_bits(key.to(tl.uint64), i)
    tl.store(out + i, sampling._gumbel(bits))


@triton.jit
def _noise_and_bound(noise, bound, first, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    bits = (first + i).to(tl.int32)
    tl.store(noise + i, sampling._gumbel(bits))
    tl.store(bound + i, sampling._noise_bound(bits))


@pytest.mark.parametrize("first", [0, 1 << 23, (1 << 24) - 4096])
def test_noise_is_within_its_bound(first: int) -> None:
    noise, bound = torch.zeros(2, 4096, device=DEVICE)
    _noise_and_bound[(1,)](noise, bound, first, COUNT=4096)
    assert bool((noise <= bound).all())


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_noise_is_the_same_bits_as_on_the_host(seed: int) -> None:
    key, out = key_of(seed, 3, 1000), torch.zeros(4096, device=DEVICE)
    _all_noise[(1,)](out, key - (key >> 63 << 64), COUNT=4096)
    differing = int((out.cpu() != gumbel(key, 4096)).sum())
    assert differing == 0 if DEVICE.type == "cpu" else differing <= 1, (
        "a float64 logarithm may round otherwise"
    )


@quickly
@given(
    params=PARAMS,
    seed=st.integers(0, MASK),
    vocabulary=st.sampled_from([4, 70, 1030, 9000]),
    wrong=st.lists(st.booleans(), max_size=4),
)
def test_match_takes_the_path_of_the_reference(
    params: DistributionParams, seed: int, vocabulary: int, wrong: list[bool]
) -> None:
    generator = torch.Generator().manual_seed(seed % (1 << 32))
    logits = torch.randn(12, vocabulary, generator=generator) * 3
    row = sampled_row([1] * 9, params, seed)
    tree = likely_tree(row, logits, 2, wrong)
    assert answers(logits, [(row, 2, tree)])[0] == expected(row, logits, 2, tree)
    assert len(expected(row, logits, 2, tree)[0]) == len(wrong)


def test_trees_of_several_requests_in_one_call() -> None:
    """Roots, positions and streams of their own; rows of the logits that no tree asks for."""
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(0)) * 2
    trees = []
    for i, root in enumerate((1, 8, 20)):
        row = sampled_row([1] * (5 + i), DistributionParams(0.9), i, i)
        trees.append((row, root, likely_tree(row, logits, root, [False, True, True][: i + 1])))
    trees.append((sampled_row([1], DistributionParams(0.0)), 29, DraftTree([], [], [])))
    assert answers(logits, trees) == {
        key: expected(*tree[:1], logits, *tree[1:]) for key, tree in enumerate(trees)
    }


def test_equal_scores_go_to_the_first_token() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [3000, 8500]] = 1.0
    row = sampled_row([1], DistributionParams(0.0))
    assert answers(logits, [(row, 0, DraftTree([], [], []))])[0] == ([], [3000])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_path_with_a_row_that_is_not_finite_has_no_answer(bad: float) -> None:
    logits = torch.zeros(3, 20)
    logits[0, 7], logits[1] = 1.0, bad
    row, tree = sampled_row([1], DistributionParams(0.0)), DraftTree([7], [-1], [0.5])
    assert answers(logits, [(row, 0, tree)])[0] is None
    assert answers(logits, [(row, 0, DraftTree([8], [-1], [0.5]))])[0] == ([], [7])


@quickly
@given(params=PARAMS, seed=st.integers(0, MASK))
def test_a_single_pick_is_that_of_the_reference(params: DistributionParams, seed: int) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(seed % (1 << 32))) * 3
    backend = TritonBackend(DEVICE, torch.float32)
    for row in (logits[2], logits):
        found = backend.pick(row.to(DEVICE), params, seed, 1, False, 2)[0]
        assert found == reference.pick(logits[2], params, seed, 1)[0]
    assert backend.pick(torch.full((9,), float("-inf"), device=DEVICE), params, seed, 1, False)[0] == []


@quickly
@given(params=PARAMS, seed=st.integers(0, MASK - 3), k=st.sampled_from([1, 5, 64]), mapped=st.booleans())
def test_rows_are_picked_as_by_the_reference(
    params: DistributionParams, seed: int, k: int, mapped: bool
) -> None:
    """Several tokens a row with their probabilities; columns of other tokens; a row of NaN."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed % (1 << 32))) * 3
    logits[1, 5] = float("nan")
    keys, ids = [seed, seed + 1, seed + 2], torch.arange(90, 50, -1, dtype=torch.int32) if mapped else None
    found = TritonBackend(DEVICE, torch.float32).pick_rows(logits.to(DEVICE), params, keys, k, ids)
    expected = TorchBackend(torch.device("cpu"), torch.float32).pick_rows(logits, params, keys, k, ids)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_of_several_requests_are_picked_as_each_alone(mapped: bool) -> None:
    """Equal logits too, of which the first is the best; and a row without a finite one."""
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(2)).round() * 2
    logits[3] = float("-inf")
    asked = [DistributionParams(t, top_k=k) for t, k in ((0.0, 0), (0.8, 3), (1.2, 0), (0.0, 0))]
    keys, ids = [5, 6, 7, 8], torch.arange(90, 0, -1, dtype=torch.int32) if mapped else None
    top_next = TritonBackend(DEVICE, torch.float32).top_next
    assert top_next is not None
    moved = None if ids is None else ids.to(DEVICE)
    words, alone = top_next.asked(asked, keys, 90).on(DEVICE), reference.TopNext()
    entries, shares = (part.cpu() for part in top_next(logits.to(DEVICE), words, 5, moved))
    entries_alone, shares_alone = alone(logits, alone.asked(asked, keys, 90), 5, ids)
    assert torch.equal(entries, entries_alone) and (entries[3] < 0).all()
    torch.testing.assert_close(shares, shares_alone, rtol=1e-5, atol=1e-6)
    for row, (params, key) in enumerate(zip(asked, keys)):
        tokens, own = reference.pick(logits[row], params, key, 5, ids)
        assert entries_alone[row].tolist() == tokens + [-1] * (5 - len(tokens))
        assert shares_alone[row, : len(own)].tolist() == pytest.approx(own)
    first = [part.cpu() for part in top_next(logits.to(DEVICE), words, 1, moved)]
    assert torch.equal(first[0], entries[:, :1]) and torch.equal(first[1], shares[:, :1])


def test_noise_wins_in_any_block() -> None:
    """Flat logits: the noise decides, and most blocks have a token that could win."""
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(1)) / 4
    keys = [key_of(3, 0, position) for position in range(6)]
    expected = [reference.pick(row, DistributionParams(), key, 1)[0][0] for row, key in zip(logits, keys)]
    assert pick_next(logits.to(DEVICE), [DistributionParams()], keys).tolist() == expected
    assert len({token // sampling.BLOCK for token in expected}) > 2


FILTERS = [
    *(DistributionParams(0.8, top_k=top_k) for top_k in (1, 5, 70, 299)),
    *(DistributionParams(1.7, top_p=top_p) for top_p in (0.01, 0.5, 0.95)),
    DistributionParams(1.0, min_p=0.05),
    DistributionParams(1.0, 0.01, 20, 0.9),
    DistributionParams(0.5),
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("params", FILTERS)
def test_the_cut_leaves_the_tokens_of_the_reference(params: DistributionParams, ties: bool) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 3
    logits = logits.round() if ties else logits
    owners = torch.tensor([[0, 0]], device=DEVICE)
    numbers = torch.tensor([sampling.params_of(params, 300)], dtype=torch.float64, device=DEVICE)
    cuts = sampling.cuts_of(sampling.Rows(logits.to(DEVICE), logits.amax(-1).to(DEVICE), owners, numbers))
    low = (logits[0] - logits.max()) * torch.tensor(params.temperature).reciprocal()
    assert torch.equal(low < cuts.cpu(), reference.below(logits[0], params) == float("-inf"))


@pytest.mark.parametrize("vocabulary", [3, 300, 5000])
def test_features_of_draft_tokens_are_those_of_the_reference(vocabulary: int) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    logits[1] = logits[1].round()  # equal ones
    logits[2, 0] = float("-inf")
    temperatures, tokens = torch.tensor([1.0, 0.3, 2.0]).double(), torch.tensor([0, 2, 1])
    expected = stop_rule.features_of(logits, temperatures, tokens)
    wide = torch.nn.functional.pad(logits, (0, 7)).to(DEVICE)[:, :vocabulary]
    found = features.features_of(wide, temperatures.to(DEVICE), tokens.to(DEVICE))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)
