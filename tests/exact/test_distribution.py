"""Sampled texts have the target's distribution under every rule, and biased variants are detected.

The exact joint distribution of the first three tokens of a model of ten tokens comes from the logits of every
prefix, float64, with a naive implementation of the sampling parameters.  Each rule and drafter answers one
mixed set of requests, 16 at a time, with each parameter at both temperatures.  Each kind of request is tested
by chi-square in two ways, by its tokens and by their likelihood ratio to the distribution without its
parameters; and all kinds as one.  The seeds are fixed.

False alarms: ALARM for the whole file (Bonferroni), the probability that a correct engine with other seeds
fails.  Power: of engines that ignore a parameter, 99 of 100 fail in every single case, at either temperature
(simulated).
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.noise import ACCEPT, DRAW, stream_of, uniform
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget, Draft, DraftTree
from outrider.sampling import random_streams
from outrider.verify import block, rejection, rule, traversal
from outrider.verify.base import RowPicker

Checkpoint = Callable[..., Path]
VOCABULARY, TOKENS, DEPTH, SEATS, SAMPLES = 10, 3, 3, 16, 16
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3))
TEMPERATURES = (0.7, 1.0)
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.7},
    {"top_k": 4},
    {"min_p": 0.3},
    {"logit_bias": {1: 1.5, 4: -2.0}},
    {"repetition_penalty": 2.5},
    {"frequency_penalty": 2.0},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": 0.6},
)
SEEDS = (
    2,
    2,
    2,
    2,
    2,
    3,
    5,
    3,
    4,
)  # of each of them for each prompt, with SAMPLES samples each: what shows less takes more
ALONE = {"temperature": 1.0}
LEAST, BINS = 5.0, 8  # expected samples of a cell; cells by likelihood
ALARM = 1e-3


def distributions(turn: int) -> list[dict[str, Any]]:
    """Parameters and temperatures of all requests; the temperatures swap in the next round."""
    return [{"temperature": TEMPERATURES[(i + turn) % 2], **ask} for i, ask in enumerate(ASKS)]


# ---- the exact distribution


class Exact:
    """The joint distribution of the first tokens after a prompt."""

    def __init__(self, llm: LLM) -> None:
        self.decoder, self.known = llm.engine.decoder, dict[tuple[int, ...], np.ndarray]()
        self.joints = dict[str, np.ndarray]()

    def logits(self, ids: tuple[int, ...]) -> np.ndarray:
        if ids not in self.known:
            step_input = StepInput()
            step_input.chain(array("i", range(len(ids))), 0, ids)
            x = self.decoder.forward(step_input.build(), self.decoder.pool(len(ids)))
            self.known[ids] = self.decoder.logits(x, [len(ids) - 1])[0].double().numpy()
        return self.known[ids]

    def joint(self, ask: Mapping[str, Any]) -> np.ndarray:
        """[prompts, V, V, V]."""
        if (key := repr(ask)) not in self.joints:
            self.joints[key] = np.stack([self._joint(prompt, ask) for prompt in PROMPTS])
        return self.joints[key]

    def _joint(self, prompt: tuple[int, ...], ask: Mapping[str, Any]) -> np.ndarray:
        made = np.zeros((VOCABULARY,) * TOKENS)
        for emitted in itertools.product(range(VOCABULARY), repeat=TOKENS - 1):
            share = math.prod(
                self.distribution(prompt, emitted[:i], ask)[token] for i, token in enumerate(emitted)
            )
            if share > 0:
                made[emitted] = share * self.distribution(prompt, emitted, ask)
        assert abs(made.sum() - 1) < 1e-9
        return made

    def distribution(
        self, prompt: tuple[int, ...], emitted: tuple[int, ...], ask: Mapping[str, Any]
    ) -> np.ndarray:
        x = self.logits(prompt + emitted).copy()
        for token, bias in ask.get("logit_bias", {}).items():
            x[token] += bias
        for token in {*prompt, *emitted}:
            factor = ask.get("repetition_penalty", 1.0)
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        for token, count in Counter(emitted).items():
            x[token] -= ask.get("frequency_penalty", 0.0) * count + ask.get("presence_penalty", 0.0)
        p = np.exp((x - x.max()) / ask["temperature"])
        p[p < ask.get("min_p", 0.0)] = 0
        p[np.argsort(-p)[ask.get("top_k", VOCABULARY) :]] = 0
        p /= p.sum()
        order = np.argsort(-p)
        p[order[np.cumsum(p[order]) - p[order] >= ask.get("top_p", 1.0)]] = 0
        return p / p.sum()


# ---- the engine's samples, and the test


@dataclass
class Lot:
    """Samples of one kind of request, and three distributions [prompts, V, V, V].

    distribution: the target's.  bare: with all parameters but the temperature ignored.  asked: with all of
    them ignored.
    """

    distribution: np.ndarray
    asked: np.ndarray
    bare: np.ndarray
    counts: np.ndarray

    @property
    def expected(self) -> np.ndarray:
        return self.distribution * self.counts.sum(axis=(1, 2, 3), keepdims=True)

    def by_outcome(self) -> tuple[float, int]:
        """Counts of texts; rare outcomes are joined with their neighbours."""
        return chi_square(self.counts.ravel(), self.expected.ravel(), LEAST)

    def by_likelihood(self) -> tuple[float, int]:
        """A few cells, from what the parameters make likeliest to what they make least likely."""
        order = np.argsort(-(self.asked / self.bare).ravel(), kind="stable")
        return chi_square(self.counts.ravel()[order], self.expected.ravel()[order], self.counts.sum() / BINS)


def chi_square(counts: np.ndarray, expected: np.ndarray, least: float) -> tuple[float, int]:
    """The chi-square statistic and its degrees of freedom.

    Cells that expect fewer than `least` samples are joined with others.
    """
    if counts[expected == 0].any():
        return math.inf, 1  # an impossible token was emitted
    cells: list[tuple[float, float]] = []
    seen = wanted = 0.0
    for count, mean in zip(counts.tolist(), expected.tolist()):
        if mean >= least:
            cells.append((count, mean))
            continue
        seen, wanted = seen + count, wanted + mean
        if wanted >= least:
            cells.append((seen, wanted))
            seen = wanted = 0.0
    cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
    return sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1


def p_values(lots: Sequence[Lot]) -> list[float]:
    """Of each lot in both ways, and last of all of them as one."""
    found = [stream_id.by_outcome() for stream_id in lots]
    whole = (sum(statistic for statistic, _ in found), sum(freedom for _, freedom in found))
    return [
        float(chi2.sf(*one)) for one in (*found, *(stream_id.by_likelihood() for stream_id in lots), whole)
    ]


def sampled(
    llm: LLM,
    exact: Exact,
    asks: Sequence[dict[str, Any]],
    seeds: Sequence[int] = SEEDS,
    instead: Sequence[dict[str, Any]] | None = None,
) -> list[Lot]:
    """A sample for each of `asks`, all requests queued at once; `instead` replaces some parameters."""
    crowd = [
        (i, place)
        for nth in range(max(seeds))
        for i in range(len(asks))
        if nth < seeds[i]
        for place in range(len(PROMPTS))
    ]
    params = [
        SamplingParams(seed=seed, n=SAMPLES, max_tokens=TOKENS + 1, detokenize=False, **(instead or asks)[i])
        for seed, (i, _) in enumerate(crowd)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(PROMPTS[place])} for _, place in crowd], params)
    joints = [(exact.joint(ask), exact.joint({"temperature": ask["temperature"]})) for ask in asks]
    lots = [Lot(asked, asked, bare, np.zeros_like(asked)) for asked, bare in joints]
    for output, (i, place) in zip(outputs, crowd):
        for sample in output.outputs:
            lots[i].counts[(place, *sample.token_ids[:TOKENS])] += 1
    llm.engine.check()
    return lots


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return LLM(
        str(checkpoint(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)), max_num_seqs=SEATS
    )


@pytest.fixture(scope="module")
def draft(checkpoint: Checkpoint) -> str:
    return str(checkpoint(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, seed=1))


@pytest.fixture(scope="module")
def exact(llm: LLM) -> Exact:
    return Exact(llm)


def chosen(row: Row, budget: Budget) -> DraftTree:
    """Two levels of two siblings and a third below the first path; tokens depend on the row."""
    a = row.tokens[-1]
    tokens = [(a + 1) % 10, (a + 4) % 10, (a + 2) % 10, (3 * a + 1) % 10, (a + 7) % 10, 5]
    parents = [-1, -1, 0, 0, 1, 2]
    if tokens[2] == tokens[3]:
        tokens[3] = (tokens[3] + 5) % 10
    return DraftTree(tokens, parents, [0.5] * 6)


def chain(row: Row, budget: Budget) -> DraftTree:
    a = row.tokens[-1]
    return DraftTree.chain([(a + 1) % 10, (a + 2) % 10, 5][: budget.depth], [0.5] * min(3, budget.depth))


def drafting(kind: str, draft: str) -> dict[str, Any]:
    """speculative_config of one kind of drafter."""
    if kind.startswith("chosen"):
        tree = kind == "chosen tree"
        return {
            "method": "scripted",
            "script": chosen if tree else chain,
            "nodes": 6 if tree else DEPTH,
            "num_speculative_tokens": DEPTH,
        }
    siblings, _, draws = kind.partition(" ")
    return {
        "model": draft,
        "num_speculative_tokens": DEPTH,
        "siblings": int(siblings),
        "sibling_draws": draws or "without",
    }


KINDS = {
    "match": ("2 without", "chosen tree"),
    "rejection": ("1", "2 without", "3 independent", "chosen tree"),
    "block": ("1", "chosen chain"),
    "traversal": ("3 without", "2 independent", "chosen tree"),  # on a chain it is block
}
CASES = [(judge, kind, i % 2) for judge, kinds in KINDS.items() for i, kind in enumerate(kinds)]
LEVEL = ALARM / (len(CASES) * (2 * len(ASKS) + 1))


def test_tested_distributions_differ_from_trivial_ones(exact: Exact, llm: LLM, draft: str) -> None:
    """Neither flat nor peaked, changed by every parameter, and not the draft's."""
    joints = [exact.joint(distribution) for turn in (0, 1) for distribution in distributions(turn)]
    for distribution in (distribution for joint in joints for distribution in joint):
        entropy = -(distribution[distribution > 0] * np.log(distribution[distribution > 0])).sum()
        assert 1.5 < entropy < 0.95 * TOKENS * math.log(VOCABULARY)
    for a, b in itertools.combinations(joints, 2):
        assert (apart(a, b) > 0.03).all()
    assert (apart(exact.joint(ALONE), Exact(LLM(draft, max_num_seqs=1)).joint(ALONE)) > 0.3).all()


def apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[prompts]: half the sum of the differences."""
    return np.abs(a - b).sum(axis=(1, 2, 3)) / 2


@pytest.mark.parametrize(("judge", "kind", "turn"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_emitted_tokens_have_the_targets_distribution(
    judge: str, kind: str, turn: int, llm: LLM, exact: Exact, draft: str
) -> None:
    llm.use({**drafting(kind, draft), "verification": judge})
    lots = sampled(llm, exact, distributions(turn))
    assert sum(stream_id.counts.sum() for stream_id in lots) == sum(SEEDS) * SAMPLES * len(PROMPTS)
    assert min(p_values(lots)) > LEVEL


# ---- controls: biased engines fail the same test


def test_the_power_of_the_test(exact: Exact) -> None:
    """Simulated power: engines that ignore a parameter fail at either temperature; correct ones pass."""
    random_streams, healthy = np.random.default_rng(0), list[float]()

    def samples(distribution: np.ndarray, seeds: int) -> np.ndarray:
        return np.stack(
            [
                random_streams.multinomial(seeds * SAMPLES, share.ravel()).reshape(share.shape)
                for share in distribution
            ]
        ).astype(float)

    for ask, seeds in (pair for turn in (0, 1) for pair in list(zip(distributions(turn), SEEDS))[1:]):
        asked, bare = exact.joint(ask), exact.joint({"temperature": ask["temperature"]})
        lots = [Lot(asked, asked, bare, samples(asked, seeds)) for _ in range(30)]
        healthy += [p for stream_id in lots for p in p_values([stream_id])]
        ignoring = [replace(stream_id, counts=samples(bare, seeds)) for stream_id in lots]
        for what, wrong in (
            ("an engine", ignoring),
            ("a law", [replace(stream_id, distribution=bare) for stream_id in lots]),
        ):
            assert sum(min(p_values([stream_id])) < LEVEL for stream_id in wrong) >= 27, (
                f"{what} without {ask}"
            )
    assert min(healthy) > LEVEL and np.mean(np.array(healthy) < 0.05) < 0.07


@pytest.mark.parametrize("turn", [0, 1])
def test_a_parameter_that_the_engine_ignores(turn: int, llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting("chosen tree", draft), "verification": "match"})
    asks = distributions(turn)
    lots = sampled(llm, exact, asks, instead=[{"temperature": ask["temperature"]} for ask in asks])
    for ask, stream_id in list(zip(asks, lots))[1:]:
        assert min(p_values([stream_id])) < LEVEL, ask


def use_reference(llm: LLM, draft: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled chains, verified by the reference, which the mutations change."""
    monkeypatch.setattr(rule(name), "kernel", "")
    llm.use({**drafting("1", draft), "verification": name})


def caught(llm: LLM, exact: Exact) -> bool:
    """768 samples of one kind of request."""
    return min(p_values(sampled(llm, exact, [ALONE], [24]))) < LEVEL


def test_the_control_of_the_controls(llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting("1", draft), "verification": "rejection"})
    assert not caught(llm, exact)


@pytest.mark.parametrize("kind", ["1", "chosen tree"])
def test_typical_acceptance_is_noticed(kind: str, llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting(kind, draft), "verification": "typical", "lossless": False})
    assert caught(llm, exact)


@pytest.mark.parametrize(
    ("judge", "module"), [("rejection", rejection), ("block", block), ("traversal", traversal)]
)
def test_a_wrong_residual(
    judge: str, module: Any, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a rejection comes from p itself."""
    use_reference(llm, draft, judge, monkeypatch)
    monkeypatch.setattr(
        module, "surplus", lambda p, q, scale=1.0: (p, float((scale * p - q).clamp_min(0).sum()))
    )
    assert caught(llm, exact)


@pytest.mark.parametrize("judge", ["rejection", "block"])
def test_drafts_and_acceptance_from_one_random_stream_are_detected(
    judge: str, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(row: Row, node: int, probability: float) -> bool:
        return uniform(stream_of(row.seed, row.index), DRAW, len(row.tokens), node) < probability

    use_reference(llm, draft, judge, monkeypatch)
    monkeypatch.setattr(random_streams, "accept", shared)
    assert caught(llm, exact)


def test_acceptance_and_emission_from_one_random_stream_are_detected(
    llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token after a rejection is sampled with the uniform that rejected."""

    def shared(row: Row, node: int, distribution: Tensor) -> int:
        return random_streams.index(
            distribution, uniform(stream_of(row.seed, row.index), ACCEPT, len(row.tokens), node + 1)
        )

    use_reference(llm, draft, "rejection", monkeypatch)
    monkeypatch.setattr(random_streams, "emit", shared)
    assert caught(llm, exact)


def test_dropping_a_sampled_node_by_its_token_is_detected(
    llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain is cut before its first odd token: those that stay are no draws any more."""
    llm.use({**drafting("1", draft), "verification": "rejection"})
    propose = llm.engine.drafter.propose

    def choosy(*given: Any) -> Draft:
        return Draft([before_odd(tree) for tree in propose(*given).trees])

    def before_odd(tree: DraftTree) -> DraftTree:
        kept = next((i for i, token in enumerate(tree.tokens) if token % 2), len(tree.tokens))
        parts = (tree.tokens[:kept], tree.parents[:kept], tree.confidence[:kept])
        return DraftTree(*parts, tree.distributions, tree.probs_of[:kept], tree.repeats)

    monkeypatch.setattr(llm.engine.drafter, "propose", choosy)
    assert caught(llm, exact)


# ---- convergence, at one position: vLLM's test of its rejection sampler


class Dice:
    """`Picker` of one row whose target says p everywhere."""

    def __init__(self, p: Tensor, seed: int) -> None:
        self.distribution, self.row = p, SimpleNamespace(tokens=[0], seed=seed, index=0)

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.distribution

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.row, node, probability)  # type: ignore[arg-type]

    def draw(self, row: int, node: int, distribution: Tensor) -> int:
        return random_streams.emit(self.row, node, distribution)  # type: ignore[arg-type]


@pytest.mark.parametrize("judge", ["rejection", "block", "traversal"])
def test_more_samples_come_nearer_to_the_target_and_to_nothing_else(judge: str) -> None:
    """From 100 to 4,000 samples the distance to the target falls sixfold, that to another hardly."""
    torch.manual_seed(5)
    p, q, other = (torch.rand(30, dtype=torch.float64) ** 2 for _ in range(3))
    p, q, other = p / p.sum(), q / q.sum(), other / other.sum()
    walk, counts = rule(judge)().walk, torch.zeros(30, dtype=torch.float64)
    near: list[float] = []
    far: list[float] = []
    for seed in range(4_000):
        distributions: Any = Dice(p, seed)
        (token,) = random_streams.children(distributions.row, q, range(1))
        tree = DraftTree([token], [-1], [0.5], [q], [0])
        _, emitted = walk(tree, RowPicker(distributions, 0))
        counts[emitted[0]] += 1
        if seed + 1 in (100, 4_000):
            near.append(float((counts / counts.sum() - p).norm()))
            far.append(float((counts / counts.sum() - other).norm()))
    assert near[0] / near[1] > 4
    assert far[0] / far[1] < 1.6 and near[1] < far[1] / 8
