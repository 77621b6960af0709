"""The sampler: C equals torch, picks follow the distribution, and the distribution its parameters."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import c_backend, needs_c, sampled_row, two_threads
from syncs import Syncs
from torch import Tensor

from outrider import ModelError
from outrider.backends.torch import sampling as reference
from outrider.backends.torch.backend import TorchBackend
from outrider.core.noise import MASK, key_of
from outrider.core.params import COLDEST, HOTTEST, DistributionParams
from outrider.sampling.processors import min_tokens
from outrider.sampling.sampler import Sampler, _best_by_topk

NEVER = float("-inf")


# ---- C against torch


def random_logits(rng: random.Random, vocabulary: int) -> Tensor:
    """Of several kinds: smooth, peaked, full of ties, all equal, with tokens forbidden."""
    torch.manual_seed(rng.randrange(10**9))
    logits = torch.randn(vocabulary) * rng.choice((0.1, 1.0, 4.0, 15.0))
    match rng.randrange(4):
        case 0:
            logits = (logits * 2).round() / 2  # ties
        case 1:
            logits = logits.round().clamp(-1, 1)  # hardly anything else
    if rng.random() < 0.4:
        logits[torch.rand(vocabulary) < rng.choice((0.1, 0.9))] = NEVER
    if logits.max() == NEVER:
        logits[rng.randrange(vocabulary)] = 1.5
    return logits


def random_distribution(rng: random.Random, vocabulary: int) -> DistributionParams:
    return DistributionParams(
        temperature=rng.choice((0.0, COLDEST, 1e-7, 0.003, 0.01, 0.3, 0.8, 1.0, 1.7, 20.0, HOTTEST)),
        min_p=rng.choice((0.0, 0.0, 0.001, 0.05, 0.5, 1.0)),
        top_k=rng.choice((0, 0, 1, 2, 5, 50, vocabulary - 1, vocabulary, vocabulary + 7)),
        top_p=rng.choice((1.0, 1.0, 0.999, 0.9, 0.5, 0.05, 1e-6)),
    )


@needs_c
@pytest.mark.parametrize(("vocabulary", "trials"), [(1, 100), (5, 600), (100, 600), (8192, 150), (50000, 40)])
def test_c_and_torch_pick_the_same_tokens(vocabulary: int, trials: int) -> None:
    rng, backend = random.Random(vocabulary), c_backend()
    for _ in range(trials):
        logits, distribution, key, k = (
            random_logits(rng, vocabulary),
            random_distribution(rng, vocabulary),
            rng.getrandbits(64),
            rng.randint(1, 8),
        )
        tokens, probabilities = reference.pick(logits, distribution, key, k)
        got, shares = backend.pick(logits, distribution, key, k, True)
        assert got == tokens, (distribution, key, k)
        assert shares == pytest.approx(probabilities, rel=1e-3, abs=1e-6), (distribution, key, k)
        assert backend.pick(logits, distribution, key, 1, False)[0] == tokens[:1], (
            "one token without probabilities"
        )


@needs_c
@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.sampled_from([0.0, 1.0, -1.0, NEVER]), st.floats(-30, 30, width=32)),
        min_size=1,
        max_size=12,
    ),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([1e-3, 0.35, 0.75, 1.0]),
    key=st.integers(0, MASK),
)
def test_c_and_torch_pick_the_same_tokens_of_random_logits(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float, key: int
) -> None:
    if max(logits) == NEVER:
        logits[0] = 0.0
    distribution = DistributionParams(temperature, min_p, top_k, top_p)
    assert (
        c_backend().pick(torch.tensor(logits), distribution, key, 8, False)[0]
        == reference.pick(torch.tensor(logits), distribution, key, 8)[0]
    )


@needs_c
@pytest.mark.parametrize(
    ("distribution", "logits"),
    [
        (
            DistributionParams(top_p=0.9, min_p=0.001),
            [0.0, -0.5, -1.0, -1.5],
        ),  # min_p drops nothing, then top_p counts
        (DistributionParams(top_p=0.9, top_k=3), [0.0, -1.0, -1.0, -1.0]),  # nor does top_k, for ties
        (
            DistributionParams(top_k=4),
            [0.0, -1.0, -2.0, NEVER, NEVER, NEVER],
        ),  # top_k asks for more than there is
        (DistributionParams(top_p=0.99999994), [0.0, -9.0, -18.0]),  # rounding may never reach the whole
    ],
    ids=str,
)
def test_c_and_torch_agree_on_filters_without_effect(
    distribution: DistributionParams, logits: list[float]
) -> None:
    for key in range(20):
        assert (
            c_backend().pick(torch.tensor(logits), distribution, key, 8, True)[0]
            == reference.pick(torch.tensor(logits), distribution, key, 8)[0]
        )


@needs_c
@pytest.mark.parametrize(
    "distribution",
    [
        DistributionParams(0.0),
        DistributionParams(0.8, top_p=0.95),
        DistributionParams(1.0, min_p=0.02, top_k=40, top_p=0.9),
    ],
    ids=str,
)
def test_threads_that_share_a_row_change_nothing(distribution: DistributionParams) -> None:
    """A row of its own is shared among threads; beside others it is not."""
    torch.manual_seed(3)
    backend, logits, keys = c_backend(), torch.randn(6, 20000) * 3, list(range(6))
    together, shares = backend.pick_rows(logits, distribution, keys, 8)
    for r, key in enumerate(keys):
        with two_threads():
            alone = backend.pick(logits, distribution, key, 8, True, r)
        assert alone == (
            [token for token in together[r].tolist() if token >= 0],
            shares[r][together[r] >= 0].tolist(),
        )
        assert backend.pick(logits, distribution, key, 8, False, r)[0] == alone[0]


@pytest.mark.parametrize("backend", [pytest.param("c", marks=needs_c), "torch"])
def test_greedy_takes_the_first_of_equals(backend: str) -> None:
    made: Any = c_backend() if backend == "c" else TorchBackend(torch.device("cpu"), torch.float32)
    logits = torch.zeros(100)
    logits[[20, 70, 90]] = 3.0
    assert made.pick(logits, DistributionParams(0.0), 0, 1, False)[0] == [20]
    assert made.pick(logits, DistributionParams(0.0), 0, 4, True)[0] == [20, 70, 90, 0]


@pytest.mark.parametrize("backend", [pytest.param("c", marks=needs_c), "torch"])
@pytest.mark.parametrize(
    "distribution",
    [DistributionParams(0.0), DistributionParams(top_p=0.9), DistributionParams(top_k=3)],
    ids=str,
)
def test_where_everything_is_forbidden_there_is_nothing_to_pick(
    backend: str, distribution: DistributionParams
) -> None:
    made: Any = c_backend() if backend == "c" else TorchBackend(torch.device("cpu"), torch.float32)
    assert made.pick(torch.full((50,), NEVER), distribution, 9, 3, True) == ([], [])


@pytest.mark.parametrize("backend", [pytest.param("c", marks=needs_c), "torch"])
def test_k_best_tokens_are_distinct_and_allowed(backend: str) -> None:
    made: Any = c_backend() if backend == "c" else TorchBackend(torch.device("cpu"), torch.float32)
    logits = torch.arange(50.0) / 10
    tokens, shares = made.pick(logits, DistributionParams(top_k=3), 9, 8, True)
    assert sorted(tokens) == [47, 48, 49]
    assert sum(shares) == pytest.approx(1)
    assert len(set(made.pick(logits, DistributionParams(), 9, 40, True)[0])) == 40


@needs_c
def test_the_best_ids_of_a_device_have_finite_logits() -> None:
    """As on the CPU, which does not use `topk`, and in one read."""
    nan, inf = math.nan, math.inf
    rows = [[1, 2, 3, 4], [1, -inf, 2, -inf], [-inf] * 4, [nan] * 4, [nan, 1, 2, 3], [1, inf, 2, 3]]
    logits = torch.tensor(rows)
    with Syncs() as seen:
        found = _best_by_topk(logits, 3)
    assert seen.seen == ["tolist"]
    assert found == Sampler(c_backend()).best(logits, 3) == [[3, 2, 1], [2, 0], [], [], [], []]


# ---- the distribution


def naive_distribution(logits: list[float], distribution: DistributionParams) -> list[float]:
    """A naive temperature, min_p, top_k, top_p, in this order; ties stay or go together."""
    scaled = [x / distribution.temperature for x in logits]
    weight = [math.exp(x - max(scaled)) for x in scaled]
    kept = {i for i, w in enumerate(weight) if w > 0 and w >= distribution.min_p * (1 - 1e-6)}
    if distribution.top_k:
        at_least = sorted((weight[i] for i in kept), reverse=True)[: distribution.top_k][-1]
        kept = {i for i in kept if weight[i] >= at_least}
    whole, before, last = sum(weight[i] for i in kept), 0.0, math.inf
    for i in sorted(kept, key=lambda i: -weight[i]):
        if before < distribution.top_p * whole:
            last = weight[i]
        before += weight[i]
    kept = {i for i in kept if weight[i] >= last}
    whole = sum(weight[i] for i in kept)
    return [weight[i] / whole if i in kept else 0.0 for i in range(len(logits))]


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=1, max_size=15),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.13, 0.61, 1.0]),
    top_k=st.integers(0, 16),
    top_p=st.sampled_from([0.017, 0.313, 0.777, 1.0]),
)
def test_sampling_distribution_equals_the_naive_one(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    distribution = DistributionParams(temperature, min_p, top_k, top_p)
    assert reference.probabilities(torch.tensor(logits), distribution).tolist() == pytest.approx(
        naive_distribution(logits, distribution), abs=1e-6
    )


def test_filters_keep_the_tokens_computed_by_hand() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()

    def kept(**distribution: Any) -> list[int]:
        return (
            reference.probabilities(logits, DistributionParams(**distribution)).nonzero().flatten().tolist()
        )

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [0, 1]
    assert kept(top_p=0.6) == [0, 1], "the token that crosses the line belongs to it"
    assert kept(top_p=0.01) == [0], "one token always stays"
    assert kept(min_p=0.2) == [0, 1, 2]
    assert kept(top_k=4) == [0, 1, 2, 3, 4], "the fourth and the fifth are equal"
    assert kept(top_p=0.9) == [0, 1, 2, 3, 4]
    assert kept(temperature=0.0) == [0]
    assert kept(top_k=3, top_p=0.5) == [0], "top_p counts what top_k left: 0.5 of 0.875"


@pytest.mark.parametrize("backend", [pytest.param("c", marks=needs_c), "torch"])
@pytest.mark.parametrize(
    "distribution",
    [
        DistributionParams(),
        DistributionParams(temperature=0.7, top_p=0.9),
        DistributionParams(temperature=1.5, min_p=0.1, top_k=6),
    ],
)
def test_picks_follow_the_sampling_distribution(backend: str, distribution: DistributionParams) -> None:
    """Chi-square over many positions with fixed seeds; the bound is the 1 - 1e-4 quantile.

    The reference is slower, and another test holds its picks to those of C.
    """
    made: Any = c_backend() if backend == "c" else TorchBackend(torch.device("cpu"), torch.float32)
    torch.manual_seed(3)
    logits = torch.randn(12) * 1.5
    expected = reference.probabilities(logits, distribution)
    counts, trials = torch.zeros(12), 6000 if backend == "c" else 1500
    for i in range(trials):
        counts[made.pick(logits, distribution, key_of(i % 7, i % 3, i), 1, False)[0][0]] += 1
    allowed = expected > 0
    assert (counts[~allowed] == 0).all(), "a forbidden token was sampled"
    chi = ((counts - trials * expected) ** 2 / (trials * expected))[allowed].sum().item()
    freedom = int(allowed.sum()) - 1
    quantile = (
        freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    )  # Wilson and Hilferty
    assert freedom >= 3 and chi < quantile


# ---- the sampler: requests, paths, processors


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(TorchBackend(torch.device("cpu"), torch.float32))


def test_the_choice_depends_on_seed_sample_and_position_only(sampler: Sampler) -> None:
    """A path token counts like a row's own, so a node picks what plain decoding picks."""
    logits, distribution = torch.zeros(1000), DistributionParams()
    there = sampler.pick(sampled_row([1, 2, 3, 4], distribution), [], logits)
    assert sampler.pick(sampled_row([1, 2], distribution), [7, 8], logits) == there
    assert sampler.pick(sampled_row([9, 9, 9, 9], distribution), [], logits) == there
    others = [
        sampler.pick(sampled_row([1, 2, 3], distribution), [], logits),
        sampler.pick(sampled_row([1, 2, 3, 4], distribution, seed=6), [], logits),
        sampler.pick(sampled_row([1, 2, 3, 4], distribution, index=1), [], logits),
    ]
    assert there not in others and len(set(others)) == 3


def test_min_tokens_follows_the_path_of_the_node(sampler: Sampler) -> None:
    """Two tokens at least: EOS is forbidden at the root and after one node, and free after two."""
    logits = torch.zeros(10)
    logits[3] = 5.0
    row = sampled_row([1, 1], DistributionParams(0.0), processors=min_tokens(2, 2, [3, 8]))
    assert [sampler.pick(row, path, logits) for path in ([], [4], [4, 4], [4, 4, 4])] == [0, 0, 3, 3]
    assert logits[3] == 5.0, "the logits belong to the forward"
    assert sampler.top(row, [], logits, 9)[0] == [0, 1, 2, 4, 5, 6, 7, 9]


def test_min_tokens_ignores_tokens_that_do_not_exist(sampler: Sampler) -> None:
    """-1 must not mean the last token of the vocabulary, as it does for an index."""
    logits = torch.zeros(10)
    logits[9] = 1.0
    assert (
        sampler.pick(
            sampled_row([1, 1], DistributionParams(0.0), processors=min_tokens(2, 2, [-1, 10, 10**9])),
            [],
            logits,
        )
        == 9
    )


def test_min_tokens_without_effect_needs_no_processor() -> None:
    assert min_tokens(5, 0, [1]) == [] and min_tokens(5, 3, []) == []


def test_logits_without_a_finite_value_are_an_error(sampler: Sampler) -> None:
    for bad in (float("nan"), NEVER):
        with pytest.raises(ModelError, match="finite"):
            sampler.pick(sampled_row([1], DistributionParams(0.0)), [], torch.full((10,), bad))


@needs_c
def test_c_reports_logits_without_a_finite_value() -> None:
    for bad in (float("nan"), NEVER):
        for distribution in (
            DistributionParams(0.0),
            DistributionParams(),
            DistributionParams(top_k=3, top_p=0.5),
        ):
            with pytest.raises(ModelError, match="finite"):
                Sampler(c_backend()).pick(sampled_row([1], distribution), [], torch.full((40,), bad))
