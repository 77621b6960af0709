"""The rules that end a draft early, each against the formula that it is known by."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from outrider import ConfigError
from outrider.backends.base import Backend
from outrider.backends.select import backend_for
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.stop_rule import NUM_FEATURES, TOP, StopRule, measure, score, should_stop
from outrider.core.tree import Budget, DraftTree
from outrider.draft.draft_model import DraftModel
from outrider.drafting import disco, stop
from outrider.drafting.disco import FEATURES, Classifier
from outrider.testing import make_row


@pytest.fixture(scope="module")
def backend() -> Backend:
    return backend_for(torch.device("cpu"), torch.float32)


def options(**given: Any) -> Any:
    return DraftModel.Options(**given)


def settle(rules: stop.Stop, row: Any, probabilities: list[float], accepted: int, levels: int) -> None:
    """A round of a chain with these probabilities, of which so many tokens were right."""
    count = len(probabilities)
    rules.begin(row, levels)
    rules.note(row, [[p, 0.0, *[p] * TOP] for p in probabilities])
    tree = DraftTree.chain(list(range(count)), [0.5] * count)
    rules.observe(Commit(Batch([RowStep(row, 0, 1, tree=tree, accepted=list(range(accepted)))])))


# ---- features of a draft token


@pytest.mark.parametrize("vocabulary", [3, 7, 64, 300, 4099])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_node_features_equal_those_of_the_distribution(
    vocabulary: int, temperature: float, backend: Backend
) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 4
    logits[1, :2] = -math.inf
    for row in range(4):
        distribution = (logits[row].double() / (temperature or 1)).softmax(-1)
        entropy = -sum(p * math.log(p) for p in distribution.tolist() if p > 0)
        best = [*distribution.sort(descending=True).values[:TOP].tolist(), *[0.0] * TOP][:TOP]
        for features in (
            backend.should_stop(StopRule(), logits, temperature, 2, 0, row)[1],
            measure(logits[row], temperature, 2),
        ):
            assert features == pytest.approx([float(distribution[2]), entropy, *best], abs=2e-5)


def test_each_rule_of_a_halt_counts(backend: Backend) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    p, entropy, *_ = backend.should_stop(StopRule(), logits, 1.0, 3, 0)[1]
    for stop_rule, stops in (
        (StopRule(), False),
        (StopRule(least=p - 1e-6), False),
        (StopRule(least=p + 1e-6), True),
        (StopRule(most=entropy + 1e-6), False),
        (StopRule(most=entropy - 1e-6), True),
    ):
        assert (
            backend.should_stop(stop_rule, logits, 1.0, 3, 0)[0]
            == stops
            == should_stop(stop_rule, measure(logits, 1.0, 3), 0)
        )


def test_the_network_is_the_same_in_c(backend: Backend) -> None:
    random = torch.Generator().manual_seed(2)
    seen = set()
    for trial in range(40):
        hidden = 1 + trial % 9
        net = torch.randn(hidden * (FEATURES + 2) + 1, generator=random)
        stops, features = backend.should_stop(
            StopRule(net=net), torch.randn(99, generator=random) * 3, 0.8, trial, trial % 7
        )
        assert stops == (score(net, features, trial % 7) < 0)
        seen.add(stops)
    assert seen == {True, False}


# ---- the rules


def test_the_schedule_of_lengths() -> None:
    for first, all_right, then in ((5, True, 7), (5, False, 4), (1, False, 1)):
        assert stop.next_length(first, all_right) == then


@pytest.mark.parametrize(("name", "lasts"), [("heuristic", True), ("heuristic_transient", False)])
def test_a_schedule_lasts_or_not(name: str, lasts: bool) -> None:
    rules = stop.Stop(options(num_assistant_tokens_schedule=name, num_assistant_tokens=4))
    row, other = make_row([1, 2]), make_row([3, 4])

    def limit(row: Row, nodes: int = 20) -> int:
        budget = rules.limit(RowStep(row, 0, 1, budget=Budget(nodes, nodes)))
        assert budget.nodes == nodes
        return budget.depth

    for accepted, after in ((4, 6), (6, 8), (3, 7), (7, 9)):
        settle(rules, row, [0.5] * limit(row), accepted, limit(row))
        assert limit(row) == after
    rules.forget(row)
    assert limit(other) == (9 if lasts else 4)
    assert limit(other, 3) == 3, "the budget is the ceiling"
    settle(rules, other, [0.5] * 3, 3, 3)
    assert limit(other) == (9 if lasts else 4), "so many were never tried"


def naive_threshold(history: list[tuple[float, bool]]) -> float:
    """transformers: the first minimum of fpr + 3 fnr over the thresholds of the ROC curve, which fall."""
    right = [p for p, good in history if good]
    wrong = [p for p, good in history if not good]
    best, least = math.inf, math.inf
    for threshold in sorted({p for p, _ in history}, reverse=True):
        cost = sum(p >= threshold for p in wrong) / len(wrong) + 3 * (
            1 - sum(p >= threshold for p in right) / len(right)
        )
        if cost < least - 1e-12:
            best, least = threshold, cost
    return best


@example(
    [(0.0, False), (0.0, True), (0.1, False), (0.1, True), (0.2, True), (0.2, True), (0.2, True), (0.2, True)]
)  # 0.1 costs as much as 0.2
@given(st.lists(st.tuples(st.integers(0, 9).map(lambda i: i / 9), st.booleans()), min_size=0, max_size=40))
def test_the_threshold_is_the_one_of_the_roc_curve(history: list[tuple[float, bool]]) -> None:
    both = len({good for _, good in history}) == 2
    expected = naive_threshold(history) if len(history) > 5 and both else 0.4
    assert stop.fit_threshold(deque(history), 0.4) == pytest.approx(expected, abs=1e-9)


def test_the_history_holds_what_the_target_judged() -> None:
    """Accepted nodes and the first rejected one are judged, none after it, and none of an ended text."""
    rules, row = (
        stop.Stop(options(assistant_confidence_threshold=0.4, assistant_confidence_schedule="refit")),
        make_row([1]),
    )
    settle(rules, row, [0.9, 0.8, 0.3, 0.7], 2, 4)
    settle(rules, row, [0.6, 0.5], 2, 4)
    assert list(rules.memory.judged) == [(0.9, True), (0.8, True), (0.3, False), (0.6, True), (0.5, True)]
    assert rules.stop_rule == StopRule(0.4)
    settle(rules, row, [0.2], 0, 4)
    assert rules.stop_rule == StopRule(naive_threshold(list(rules.memory.judged))) == StopRule(0.5)
    row.finish_reason = "stop"
    settle(rules, row, [0.1], 0, 4)
    assert len(rules.memory.judged) == 6 and not rules.drafts


def test_lambda_follows_the_share_that_was_right() -> None:
    """Draft & Verify, section 3.4, with its constants."""
    rules, row = (
        stop.Stop(options(entropy_threshold=0.5, entropy_target=0.8, entropy_factor=0.3)),
        make_row([1]),
    )
    threshold, mean = 0.5, 0.0
    for drafted, accepted, levels in ((4, 1, 4), (2, 2, 4), (4, 4, 4), (3, 3, 4), (1, 1, 4), (4, 0, 4)):
        settle(rules, row, [0.5] * drafted, accepted, levels)
        mean = 0.5 * mean + 0.5 * accepted / drafted
        wanted = threshold + 0.01 if mean < 0.8 else threshold if drafted == levels else threshold - 0.01
        threshold = 0.9 * threshold + 0.1 * wanted
        assert rules.memory.entropy == pytest.approx(threshold) and rules.memory.accepted == pytest.approx(
            mean
        )
    stop_rule = rules.stop_rule
    assert stop_rule is not None
    for entropy in (0.0, 0.3, 0.6, 0.9, 1.2, 3.0):
        assert (entropy > stop_rule.most) == (1 - math.sqrt(0.3 * entropy) < threshold)


def test_forget_drops_the_rounds_of_a_row() -> None:
    rules, row = stop.Stop(options(assistant_confidence_threshold=0.4)), make_row([1])
    rules.begin(row, 4)
    rules.forget(row)
    assert not rules.drafts


# ---- the network


def separable(count: int) -> list[tuple[list[float], bool]]:
    random = torch.Generator().manual_seed(3)
    pairs = []
    for features in torch.rand(count, FEATURES, generator=random).tolist():
        pairs.append((features, features[0] > 0.5 * features[1] + 0.25))
    return pairs


def test_a_network_learns_and_comes_back_from_its_file(tmp_path: Path) -> None:
    made = disco.fit(separable(600))
    held = separable(900)[600:]
    assert sum(made.accepts(features) == good for features, good in held) > 0.93 * len(held)
    file = str(tmp_path / "folder" / "stop.safetensors")
    made.save(file)
    read = disco.load(file)
    assert torch.equal(read.flat(0.5), made.flat(0.5))
    level = 3
    for features in torch.rand(20, NUM_FEATURES, generator=torch.Generator().manual_seed(4)).tolist():
        probability = float(made(torch.tensor([[*features, float(level)]])).sigmoid())
        for threshold in (0.1, 0.5, 0.9):
            assert (score(made.flat(threshold), features, level) < 0) == (probability < threshold)


@pytest.mark.parametrize("good", [True, False])
def test_fitting_needs_accepted_and_rejected_nodes(good: bool) -> None:
    with pytest.raises(ConfigError, match="teach nothing"):
        disco.fit([([0.5] * FEATURES, good)] * 9)
    with pytest.raises(ConfigError, match="teach nothing"):
        disco.fit([])


def test_files_without_a_classifier_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    bad, other = tmp_path / "bad", tmp_path / "other"
    bad.write_text("no tensors")
    save_file({"hidden.weight": torch.zeros(4, 3)}, other)
    for file, message in (
        (bad, "cannot be read"),
        (tmp_path / "nowhere", "outrider tune disco"),
        (other, "is no such network"),
    ):
        with pytest.raises(ConfigError, match=message):
            disco.load(str(file))
    with pytest.raises(ConfigError, match="cannot be written"):
        Classifier(1).save(str(bad / "x"))


# ---- options


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_assistant_tokens_schedule": "heuristik"}, "Did you mean 'heuristic'"),
        (
            {"assistant_confidence_schedule": "refitted", "assistant_confidence_threshold": 0.4},
            "Did you mean 'refit'",
        ),
        ({"assistant_confidence_schedule": "refit"}, "needs an assistant_confidence_threshold"),
        ({"assistant_confidence_threshold": 1.5}, r"in \[0, 1\] or None, got 1.5"),
        ({"assistant_confidence_threshold": "0.4"}, "got '0.4'"),
        ({"entropy_threshold": True}, "entropy_threshold must be a number"),
        ({"entropy_factor": 0}, "entropy_factor must be a number above 0"),
        ({"num_assistant_tokens": 4}, "set num_speculative_tokens"),
        (
            {"num_assistant_tokens": 0, "num_assistant_tokens_schedule": "heuristic"},
            "in 1 … 1024 or None, got 0",
        ),
        ({"stop_classifier": 3}, "stop_classifier must be a file"),
        ({"drafter": "ngram"}, "drafter must be a speculative_config"),
        ({"drafter": {"method": "ngram"}, "siblings": 2}, "siblings is 2"),
    ],
)
def test_invalid_options_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**given)


def test_without_options_there_is_no_rule() -> None:
    rules = stop.Stop(options())
    assert rules.stop_rule is None and not rules.active and not rules.learns
    step = RowStep(make_row([1]), 0, 1, budget=Budget(4, 4))
    assert rules.limit(step) is step.budget


@pytest.mark.parametrize("bias", [torch.tensor(1.0), torch.zeros(2, 2), torch.zeros(0)])
def test_a_file_of_another_network_is_refused(bias: torch.Tensor, tmp_path: Path) -> None:
    save_file({"hidden.bias": bias}, tmp_path / "c.safetensors")
    with pytest.raises(ConfigError, match="no such network"):
        disco.load(str(tmp_path / "c.safetensors"))
