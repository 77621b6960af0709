"""Sampled texts have the target's law under every rule, and what would bias them is noticed.

A tiny model of ten tokens; the exact joint law of the first three tokens is computed in float64 from the logits of every prefix,
by an implementation of the sampling parameters of our own.  Each rule and drafter answers one crowd of requests, 16 at a time, in
which all temperatures and parameters are mixed; each kind of request is tested by chi-square, and all of them as one.  The seeds are
fixed.  False alarms: ALARM for the whole file (Bonferroni), which is the chance that a healthy engine with other seeds would fail here.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.attention.plan import Plan
from outrider.bench.chances import tail
from outrider.sampling import dice
from outrider.sampling.noise import ACCEPT, DRAW, coin, stream_of
from outrider.types import Budget, Draft, Guesses, Row
from outrider.verify import block, rejection, rule, traversal
from outrider.verify.base import Answers

Checkpoint = Callable[..., Path]
VOCABULARY, TOKENS, DEPTH, SEATS = 10, 3, 3, 16
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6, 5, 3))
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 4},
    {"min_p": 0.15},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"logit_bias": {1: 1.5, 4: -2.0}},
)
LAWS = [{"temperature": 0.7 if i in (0, 2, 4) else 1.0, **ask} for i, ask in enumerate((*ASKS, {}, ASKS[4]))]
ALONE = ({"temperature": 1.0},)
EACH, SAMPLES = 16, 5  # seeds of every kind of request, samples of every seed
LEAST = 5.0  # expected samples of a cell
ALARM = 1e-3


# ---- the exact law


class Exact:
    """The joint law of the first tokens after a prompt."""

    def __init__(self, llm: LLM) -> None:
        self.decoder, self.known = llm.engine.decoder, dict[tuple[int, ...], np.ndarray]()

    def logits(self, ids: tuple[int, ...]) -> np.ndarray:
        if ids not in self.known:
            plan = Plan()
            plan.chain(array("i", range(len(ids))), 0, ids)
            x = self.decoder.forward(plan.build(), self.decoder.pool(len(ids)))
            self.known[ids] = self.decoder.logits(x, [len(ids) - 1])[0].double().numpy()
        return self.known[ids]

    def joint(self, prompt: tuple[int, ...], ask: Mapping[str, Any], tokens: int = TOKENS) -> np.ndarray:
        """[V] * tokens."""
        made = np.zeros((VOCABULARY,) * tokens)
        for said in itertools.product(range(VOCABULARY), repeat=tokens - 1):
            share = math.prod(self.law(prompt, said[:i], ask)[token] for i, token in enumerate(said))
            if share > 0:
                made[said] = share * self.law(prompt, said, ask)
        assert abs(made.sum() - 1) < 1e-9
        return made

    def law(self, prompt: tuple[int, ...], said: tuple[int, ...], ask: Mapping[str, Any]) -> np.ndarray:
        x = self.logits(prompt + said).copy()
        for token, bias in ask.get("logit_bias", {}).items():
            x[token] += bias
        for token in {*prompt, *said}:
            factor = ask.get("repetition_penalty", 1.0)
            x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
        for token, count in Counter(said).items():
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
    """Samples of one kind of request."""

    law: np.ndarray
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros_like(self.law)

    def chi_square(self) -> tuple[float, int]:
        """The statistic over cells of enough expected samples, rare outcomes joined with their neighbours; its degrees of freedom."""
        assert (self.counts[self.law == 0] == 0).all(), "something that cannot be said was said"
        cells: list[tuple[float, float]] = []
        seen = wanted = 0.0
        for count, share in zip(self.counts.flat, self.law.flat):
            expected = share * self.counts.sum()
            if expected >= LEAST:
                cells.append((count, expected))
                continue
            seen, wanted = seen + count, wanted + expected
            if wanted >= LEAST:
                cells.append((seen, wanted))
                seen = wanted = 0.0
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + wanted)
        return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


def p_values(lots: Sequence[Lot]) -> list[float]:
    """Of each lot, and last of all of them as one."""
    found = [lot.chi_square() for lot in lots]
    found.append((sum(statistic for statistic, _ in found), sum(freedom for _, freedom in found)))
    return [tail(*one) for one in found]


def sampled(llm: LLM, exact: Exact, laws: Sequence[dict[str, Any]] = LAWS, each: int = EACH, first_seed: int = 0) -> list[Lot]:
    """A lot for each law and prompt; both prompts meet every law, and all requests are handed in at once."""
    crowd = [(law, prompt) for _ in range(each // 2) for law in range(len(laws)) for prompt in PROMPTS]
    params = [
        SamplingParams(seed=first_seed + i, n=SAMPLES, max_tokens=TOKENS + 1, detokenize=False, **laws[law])
        for i, (law, _) in enumerate(crowd)
    ]
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for _, prompt in crowd], params)
    lots = {(i, prompt): Lot(exact.joint(prompt, law)) for i, law in enumerate(laws) for prompt in PROMPTS}
    for output, which in zip(outputs, crowd):
        for sample in output.outputs:
            lots[which].counts[tuple(sample.token_ids[:TOKENS])] += 1
    llm.engine.check()
    return list(lots.values())


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return LLM(str(checkpoint(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1)), max_num_seqs=SEATS)


@pytest.fixture(scope="module")
def draft(checkpoint: Checkpoint) -> str:
    return str(checkpoint(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, seed=1))


@pytest.fixture(scope="module")
def exact(llm: LLM) -> Exact:
    return Exact(llm)


def chosen(row: Row, budget: Budget) -> Guesses:
    """Two levels of two siblings and a third below the first path, whose tokens depend on what was said."""
    a = row.tokens[-1]
    tokens = [(a + 1) % 10, (a + 4) % 10, (a + 2) % 10, (3 * a + 1) % 10, (a + 7) % 10, 5]
    parents = [-1, -1, 0, 0, 1, 2]
    if tokens[2] == tokens[3]:
        tokens[3] = (tokens[3] + 5) % 10
    return Guesses(tokens, parents, [0.5] * 6)


def chain(row: Row, budget: Budget) -> Guesses:
    a = row.tokens[-1]
    return Guesses.chain([(a + 1) % 10, (a + 2) % 10, 5][: budget.depth], [0.5] * min(3, budget.depth))


def drafting(kind: str, draft: str) -> dict[str, Any]:
    """speculative_config of one kind of drafter."""
    if kind.startswith("chosen"):
        tree = kind == "chosen tree"
        return {"method": "scripted", "script": chosen if tree else chain, "nodes": 6 if tree else DEPTH, "num_speculative_tokens": DEPTH}
    siblings, _, draws = kind.partition(" ")
    return {"model": draft, "num_speculative_tokens": DEPTH, "siblings": int(siblings), "sibling_draws": draws or "without"}


CASES = [
    *(("match", kind) for kind in ("2 without", "chosen tree")),
    *(("rejection", kind) for kind in ("1", "2 without", "3 independent", "chosen tree")),
    *(("block", kind) for kind in ("1", "chosen chain")),
    *(("traversal", kind) for kind in ("3 without", "2 independent", "chosen tree")),  # on a chain it is block
]
LEVEL = ALARM / (len(CASES) * (len(LAWS) * len(PROMPTS) + 1))


def test_the_laws_are_worth_testing(exact: Exact, llm: LLM, draft: str) -> None:
    """Neither flat nor peaked, changed by every parameter, and not the draft's."""
    other = Exact(LLM(draft, max_num_seqs=1))
    for prompt in PROMPTS:
        joint = {repr(law): exact.joint(prompt, law) for law in LAWS}
        for law in joint.values():
            entropy = -(law[law > 0] * np.log(law[law > 0])).sum()
            assert 1.5 < entropy < 0.95 * TOKENS * math.log(VOCABULARY)
        for a, b in itertools.combinations(joint.values(), 2):
            assert np.abs(a - b).sum() / 2 > 0.03
        assert np.abs(exact.joint(prompt, ALONE[0]) - other.joint(prompt, ALONE[0])).sum() / 2 > 0.3


@pytest.mark.parametrize(("judge", "kind"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_the_law_is_the_targets(judge: str, kind: str, llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting(kind, draft), "verification": judge})
    lots = sampled(llm, exact)
    assert sum(lot.counts.sum() for lot in lots) == len(LAWS) * EACH * SAMPLES
    assert min(p_values(lots)) > LEVEL


# ---- controls: what biases the law is caught by the very same test


def caught(llm: LLM, exact: Exact) -> bool:
    """750 samples of one kind of request."""
    return min(p_values(sampled(llm, exact, ALONE, 150))) < LEVEL


def test_the_control_of_the_controls(llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting("1", draft), "verification": "rejection"})
    assert not caught(llm, exact)


@pytest.mark.parametrize("kind", ["1", "chosen tree"])
def test_typical_acceptance_is_noticed(kind: str, llm: LLM, exact: Exact, draft: str) -> None:
    llm.use({**drafting(kind, draft), "verification": "typical", "lossless": False})
    assert caught(llm, exact)


@pytest.mark.parametrize(("judge", "module"), [("rejection", rejection), ("block", block), ("traversal", traversal)])
def test_a_wrong_residual(judge: str, module: Any, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a rejection comes from p itself."""
    llm.use({**drafting("1", draft), "verification": judge})
    monkeypatch.setattr(module, "surplus", lambda p, q, scale=1.0: (p, float((scale * p - q).clamp_min(0).sum())))
    assert caught(llm, exact)


@pytest.mark.parametrize("judge", ["rejection", "block"])
def test_draws_and_acceptance_from_one_coin(judge: str, llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(row: Row, node: int, probability: float) -> bool:
        return coin(stream_of(row.seed, row.index), DRAW, len(row.tokens), node) < probability

    llm.use({**drafting("1", draft), "verification": judge})
    monkeypatch.setattr(dice, "accept", shared)
    assert caught(llm, exact)


def test_acceptance_and_what_follows_from_one_coin(llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a rejection is drawn with the coin that rejected."""

    def shared(row: Row, node: int, law: Tensor) -> int:
        return dice.index(law, coin(stream_of(row.seed, row.index), ACCEPT, len(row.tokens), node + 1))

    llm.use({**drafting("1", draft), "verification": "rejection"})
    monkeypatch.setattr(dice, "emit", shared)
    assert caught(llm, exact)


def test_dropping_a_drawn_guess_for_what_it_is(llm: LLM, exact: Exact, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is cut before its first odd token: those that stay are no draws any more."""
    llm.use({**drafting("1", draft), "verification": "rejection"})
    propose = llm.engine.drafter.propose

    def choosy(*given: Any) -> Draft:
        return Draft([before_odd(tree) for tree in propose(*given).trees])

    def before_odd(tree: Guesses) -> Guesses:
        kept = next((i for i, token in enumerate(tree.tokens) if token % 2), len(tree.tokens))
        parts = (tree.tokens[:kept], tree.parents[:kept], tree.confidence[:kept])
        return Guesses(*parts, tree.laws, tree.law_of[:kept], tree.repeats)

    monkeypatch.setattr(llm.engine.drafter, "propose", choosy)
    assert caught(llm, exact)


# ---- convergence, at one position: vLLM's test of its rejection sampler


class Dice:
    """`Laws` of one row whose target says p everywhere."""

    def __init__(self, p: Tensor, seed: int) -> None:
        self.law, self.row = p, SimpleNamespace(tokens=[0], seed=seed, index=0)

    def p(self, row: int, node: int, path: Sequence[int]) -> Tensor:
        return self.law

    def accept(self, row: int, node: int, probability: float) -> bool:
        return dice.accept(self.row, node, probability)  # type: ignore[arg-type]

    def draw(self, row: int, node: int, law: Tensor) -> int:
        return dice.emit(self.row, node, law)  # type: ignore[arg-type]


@pytest.mark.parametrize("judge", ["rejection", "block", "traversal"])
def test_more_samples_come_nearer_to_the_target_and_to_nothing_else(judge: str) -> None:
    """From 100 to 4,000 samples the distance to the target's law falls about sixfold, that to another law hardly."""
    torch.manual_seed(5)
    p, q, other = (torch.rand(30, dtype=torch.float64) ** 2 for _ in range(3))
    p, q, other = p / p.sum(), q / q.sum(), other / other.sum()
    walk, counts = rule(judge)().walk, torch.zeros(30, dtype=torch.float64)
    near: list[float] = []
    far: list[float] = []
    for seed in range(4_000):
        laws: Any = Dice(p, seed)
        (token,) = dice.children(laws.row, q, range(1))
        tree = Guesses([token], [-1], [0.5], [q], [0])
        _, said = walk(tree, Answers(laws, 0))
        counts[said[0]] += 1
        if seed + 1 in (100, 4_000):
            near.append(float((counts / counts.sum() - p).norm()))
            far.append(float((counts / counts.sum() - other).norm()))
    assert near[0] / near[1] > 4
    assert far[0] / far[1] < 1.6 and near[1] < far[1] / 8
