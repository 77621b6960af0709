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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributions import DEPTH, PROMPTS, SAMPLES, SEATS, TOKENS, VOCABULARY, Counted, Exact, p_values
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.noise import ACCEPT, DRAW, stream_of, uniform
from outrider.core.row import Row
from outrider.core.tree import Budget, Draft, DraftTree
from outrider.sampling import random_streams
from outrider.verify import block, rejection, rule, traversal
from outrider.verify.base import RowPicker

Checkpoint = Callable[..., Path]
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
# Seeds of each of them for each prompt, with SAMPLES samples each: what shows less takes more.
SEEDS = (2, 2, 2, 2, 2, 3, 5, 3, 4)
ALONE = {"temperature": 1.0}
ALARM = 1e-3


def distributions(turn: int) -> list[dict[str, Any]]:
    """Parameters and temperatures of all requests; the temperatures swap in the next round."""
    return [{"temperature": TEMPERATURES[(i + turn) % 2], **ask} for i, ask in enumerate(ASKS)]


def sampled(
    llm: LLM,
    exact: Exact,
    asks: Sequence[dict[str, Any]],
    seeds: Sequence[int] = SEEDS,
    instead: Sequence[dict[str, Any]] | None = None,
) -> list[Counted]:
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
    found = [Counted(asked, asked, bare, np.zeros_like(asked)) for asked, bare in joints]
    for output, (i, place) in zip(outputs, crowd):
        for sample in output.outputs:
            found[i].counts[(place, *sample.token_ids[:TOKENS])] += 1
    llm.engine.check()
    return found


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
    "traversal": ("3 without", "2 independent", "3 greedy", "chosen tree"),  # on a chain it is block
    "spectr": ("3 independent",),
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
    found = sampled(llm, exact, distributions(turn))
    assert sum(sample.counts.sum() for sample in found) == sum(SEEDS) * SAMPLES * len(PROMPTS)
    assert min(p_values(found)) > LEVEL


# ---- controls: biased engines fail the same test


def test_engines_that_ignore_a_parameter_fail_in_simulation(exact: Exact) -> None:
    """Simulated power: engines that ignore a parameter fail at either temperature; correct ones pass."""
    rng, healthy = np.random.default_rng(0), list[float]()

    def samples(distribution: np.ndarray, seeds: int) -> np.ndarray:
        drawn = [
            rng.multinomial(seeds * SAMPLES, share.ravel()).reshape(share.shape) for share in distribution
        ]
        return np.stack(drawn).astype(float)

    for ask, seeds in (pair for turn in (0, 1) for pair in list(zip(distributions(turn), SEEDS))[1:]):
        asked, bare = exact.joint(ask), exact.joint({"temperature": ask["temperature"]})
        right = [Counted(asked, asked, bare, samples(asked, seeds)) for _ in range(30)]
        healthy += [p for each in right for p in p_values([each])]
        ignoring = [replace(each, counts=samples(bare, seeds)) for each in right]
        for what, wrong in (
            ("an engine", ignoring),
            ("a distribution", [replace(each, distribution=bare) for each in right]),
        ):
            assert sum(min(p_values([each])) < LEVEL for each in wrong) >= 27, f"{what} without {ask}"
    assert min(healthy) > LEVEL and np.mean(np.array(healthy) < 0.05) < 0.07


@pytest.mark.parametrize("turn", [0, 1])
def test_an_engine_that_ignores_a_parameter_fails_the_test(
    turn: int, llm: LLM, exact: Exact, draft: str
) -> None:
    llm.use({**drafting("chosen tree", draft), "verification": "match"})
    asks = distributions(turn)
    found = sampled(llm, exact, asks, instead=[{"temperature": ask["temperature"]} for ask in asks])
    for ask, sample in list(zip(asks, found))[1:]:
        assert min(p_values([sample])) < LEVEL, ask


def use_reference(llm: LLM, draft: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled chains, verified by the reference, which the mutations change."""
    monkeypatch.setattr(rule(name), "kernel", "")
    llm.use({**drafting("1", draft), "verification": name})


def caught(llm: LLM, exact: Exact) -> bool:
    """768 samples of one kind of request."""
    return min(p_values(sampled(llm, exact, [ALONE], [24]))) < LEVEL


def test_an_unchanged_engine_passes_the_test_of_mutations(llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting("1", draft), "verification": "rejection"})
    assert not caught(llm, exact)


@pytest.mark.parametrize("kind", ["1", "chosen tree"])
def test_typical_acceptance_fails_the_test(kind: str, llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting(kind, draft), "verification": "typical", "lossless": False})
    assert caught(llm, exact)


@pytest.mark.parametrize(
    ("judge", "module"), [("rejection", rejection), ("block", block), ("traversal", traversal)]
)
def test_sampling_from_p_after_a_rejection_is_detected(
    judge: str, module: Any, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a rejection comes from p itself."""
    use_reference(llm, draft, judge, monkeypatch)
    monkeypatch.setattr(
        module, "residual", lambda p, q, scale=1.0: (p, float((scale * p - q).clamp_min(0).sum()))
    )
    assert caught(llm, exact)


@pytest.mark.parametrize("judge", ["rejection", "block"])
def test_drafts_and_acceptance_from_one_random_stream_are_detected(
    judge: str, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(row: Row, node: int, probability: float) -> bool:
        return uniform(row.stream, DRAW, len(row.tokens), node) < probability

    use_reference(llm, draft, judge, monkeypatch)
    monkeypatch.setattr(random_streams, "accept", shared)
    assert caught(llm, exact)


def test_acceptance_and_emission_from_one_random_stream_are_detected(
    llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token after a rejection is sampled with the uniform that rejected."""

    def shared(row: Row, node: int, distribution: Tensor) -> int:
        return random_streams.index(distribution, uniform(row.stream, ACCEPT, len(row.tokens), node + 1))

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


class FixedTarget:
    """`Picker` of one row whose target has the distribution p everywhere."""

    def __init__(self, p: Tensor, seed: int) -> None:
        self.distribution, self.row = p, SimpleNamespace(tokens=[0], stream=stream_of(seed, 0))

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
        picker: Any = FixedTarget(p, seed)
        (token,) = random_streams.children(picker.row, q, range(1))
        tree = DraftTree([token], [-1], [0.5], [q], [0])
        _, emitted = walk(tree, RowPicker(picker, 0))
        counts[emitted[0]] += 1
        if seed + 1 in (100, 4_000):
            near.append(float((counts / counts.sum() - p).norm()))
            far.append(float((counts / counts.sum() - other).norm()))
    assert near[0] / near[1] > 4
    assert far[0] / far[1] < 1.6 and near[1] < far[1] / 8
