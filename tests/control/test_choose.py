"""Costs, calibrated acceptance, the ledger and the choice of nodes."""

from __future__ import annotations

import math

import pytest

from outrider.control.acceptance import Calibration, Outcome, Reach, key_of
from outrider.control.choose import Price, best_option, joint_probabilities, select
from outrider.control.cost import ForwardCost
from outrider.control.ledger import USED, Ledger
from outrider.control.plan import Load
from outrider.core.step import Batch, RowStep
from outrider.core.tree import ROOT, DraftTree
from outrider.testing import make_row


def test_nodes_are_kept_while_they_pay() -> None:
    """A node costs 0.1 s and a second is worth two tokens: 0.2 tokens is the border."""
    assert select([[0.9, 0.15], [0.5, 0.3, 0.1]], [0.1 * nodes for nodes in range(6)], 2.0) == [[0], [0, 1]]


def test_a_step_in_the_cost_is_taken_if_all_nodes_together_pay() -> None:
    costs = [0.0, 0.5, 0.5, 0.5, 0.5]
    assert select([[0.4, 0.39, 0.38, 0.37]], costs, 2.0) == [[0, 1, 2, 3]]
    assert select([[0.4, 0.3]], costs, 2.0) == [[]]


def test_a_draft_whose_cost_cannot_be_told_is_not_free() -> None:
    option = best_option(0, [0.9, 1.6], Price(0.0, 0.01, 1.0, lambda nodes: math.inf), 1, 1.0)
    assert math.isinf(option.cost) and not option.gain


def test_probabilities_follow_the_observed_acceptance_and_multiply_along_a_path() -> None:
    calibration = Calibration()
    for i in range(200):
        calibration.learn(key_of(1, 1, 0.9), i % 4 == 0)
    tree = DraftTree.chain([1, 2], [0.9, 0.9])
    first, second = joint_probabilities(tree, calibration)
    assert first == pytest.approx(0.25, abs=0.03)
    assert second == pytest.approx(first * calibration.probability(key_of(1, 2, 0.9)))


def test_a_request_departs_from_the_estimate_over_all_of_them() -> None:
    shared = Calibration()
    mine, key = Calibration(shared), key_of(1, 1, 0.5)
    for _ in range(100):
        shared.learn(key, True)
    before = mine.probability(key)
    for _ in range(10):
        mine.learn(key, False)
    mine.refresh()
    assert before > 0.9 and mine.probability(key) < 0.5 < shared.probability(key)


def test_samples_of_one_distribution_stay_in_order() -> None:
    """A later sample is never kept without the earlier one, as rejection rules require."""
    calibration = Calibration()
    for _ in range(50):
        calibration.learn(key_of(1, 1, 0.7), False)
        calibration.learn(key_of(1, 1, 0.2), True)
    tree = DraftTree([4, 5], [ROOT, ROOT], [0.7, 0.2], [None], [0, 0])  # type: ignore[list-item]
    joint = joint_probabilities(tree, calibration)
    assert joint[0] >= joint[1]


def test_reach_forgets_what_it_has_not_tried_again() -> None:
    shared = Reach()
    reach = Reach(shared)
    for step in range(10):
        reach.learn(Outcome(0, True), step)
    low = reach.estimates[0][0]
    reach.fade(1000)
    assert low < 0.2 < reach.estimates[0][0]


def test_the_room_of_a_ledger_grows_with_time_and_shrinks_with_losses() -> None:
    ledger = Ledger(grace=0.02)
    assert ledger.room == pytest.approx(USED * 0.02)
    ledger.add(1.0, 1.0)
    assert ledger.room == pytest.approx(USED * 0.02 + 0.01)
    ledger.add(0.03, 0.0)
    assert ledger.room < 0.0


def test_a_slow_step_changes_no_cost_and_a_slow_machine_changes_the_pace_only() -> None:
    cost = ForwardCost({1: 1.0, 8: 1.7})
    for _ in range(4):
        cost.learn_plain(1, 1, 0, 1.0)
    cost.learn_plain(1, 1, 0, 5.0)
    assert cost.pace(1) == pytest.approx(1.0)
    for _ in range(3):
        cost.learn_plain(1, 1, 0, 2.0)
    assert cost.pace(1) == pytest.approx(2.0, rel=0.01)
    assert cost.base(8) / cost.base(1) == pytest.approx(1.7)


def test_the_first_plain_steps_of_a_batch_are_worth_the_shortest() -> None:
    """The first one finds nothing in the caches of the processor.  Later a shorter one is noise."""
    cost = ForwardCost({1: 1.0})
    for seconds in (1.5, 1.0):
        cost.learn_plain(1, 1, 0, seconds)
    assert cost.pace(1) == pytest.approx(1.0)
    for _ in range(8):
        cost.learn_plain(1, 1, 0, 1.0)
    cost.learn_plain(1, 1, 0, 0.8)
    assert cost.pace(1) > 0.95


def test_the_depth_for_some_rows_is_the_best_for_the_whole_batch() -> None:
    """The fewer ask, the fewer tokens a second there are, and the less a deeper draft has to gain."""
    gains, price = [0.9, 1.1], Price(0.0, 0.01, 1.0, lambda nodes: 0.0)
    depths = [best_option(0, gains, price, 16, 1.0, crowd).depth for crowd in (0, 16, 4)]
    assert depths == [1, 1, 2]


def test_rows_far_beyond_those_seen_have_no_price() -> None:
    """One draft of unknown cost must not take the time of many plain steps."""
    load = Load(ForwardCost({1: 1e-3, 2: 1.1e-3}), rows=1, pace=1.0)
    assert load.verify(3) < 1e-2 and load.verify(200) == math.inf > load.added(200)
    assert Load(ForwardCost(), rows=4).verify(5) == math.inf > Load(ForwardCost(), rows=4).verify(4)


def test_draft_nodes_beside_a_prompt_take_at_most_as_long_as_the_step() -> None:
    """The first token of the prompt must not wait long for the draft nodes of other rows."""
    cost = ForwardCost({1: 1.0, 16: 2.0, 64: 8.0})
    row = make_row([1] * 32)
    prefill = Load.of(Batch([RowStep(row, 0, 16)], prefill=True), cost)
    assert prefill.verify(16) < math.inf == prefill.verify(17)
    assert Load.of(Batch([RowStep(row, 31, 1)]), cost).verify(17) < math.inf


@pytest.mark.parametrize("waiting, weight", [(0, 1.25), (7, 3.0)])
def test_draft_nodes_beside_a_prompt_are_priced_by_the_requests_that_they_delay(
    waiting: int, weight: float
) -> None:
    """Each second is one of all that wait, and only those that decode gain tokens."""
    cost, rows = ForwardCost({1: 1.0, 64: 2.0}), [make_row([1] * 32) for _ in range(5)]
    batch = Batch([RowStep(rows[0], 0, 16, emits=False), *[RowStep(row, 31, 1) for row in rows[1:]]])
    batch.waiting = waiting
    load = Load.of(batch, cost)
    assert load.verify(4) == load.costs_of(4)[4] == pytest.approx(weight * load.added(4))


def test_rows_beyond_one_a_request_take_what_they_took_in_the_table() -> None:
    """What each request takes beside the forward makes plain steps longer, but not draft nodes."""
    cost = ForwardCost({1: 1.0, 64: 64.0})
    cost.learn_plain(4, 4, 0, 6.0)
    batch = Batch([RowStep(make_row([1] * 32), 31, 1) for _ in range(4)])
    load = Load.of(batch, cost)
    assert load.decode == pytest.approx(6.0) and load.verify(4) == pytest.approx(4.0)
    for _ in range(60):
        cost.learn_drafting(4, 8, 0, 12.0)
    assert Load.of(batch, cost).verify(4) == pytest.approx(6.0, rel=0.1), "the machine is slower than it was"


@pytest.mark.parametrize("batch, depth", [(1, 8), (32, 1)])
def test_further_levels_are_asked_for_if_they_cost_little_for_all_rows(batch: int, depth: int) -> None:
    """Eight levels take 0.016 of a plain step for one row.  The second token is hardly ever accepted."""
    price = Price(fixed=0.0, per_level=0.002, nodes_per_level=1.0, verify=lambda nodes: 0.01 * nodes)
    gains = [0.5 + 0.001 * level for level in range(8)]
    assert best_option(0, gains, price, batch, plain=1.0).depth == depth


def test_a_token_beside_a_prompt_is_worth_what_it_costs_without_the_prompt() -> None:
    """The prompt is computed in any case, so its time is none that drafts could save."""
    cost, rows = ForwardCost({1: 1.0, 64: 64.0}), [make_row([1] * 32) for _ in range(5)]
    decoding = [RowStep(row, 31, 1) for row in rows[1:]]
    prefill = Load.of(Batch([RowStep(rows[0], 0, 16), *decoding], prefill=True), cost)
    assert prefill.plain == pytest.approx(20.0) and prefill.token == pytest.approx(1.0)
    assert prefill.rate == pytest.approx(Load.of(Batch(decoding), cost).rate)
    kept = select([[0.9, 0.8]] * 4, prefill.costs_of(8), prefill.rate)
    assert kept == [[], [], [], []], "where a row costs as much as a token is worth, no draft pays"


def test_a_resumed_text_is_computed_in_any_case_like_a_prompt() -> None:
    cost, rows = ForwardCost({1: 1.0, 64: 64.0}), [make_row([1] * 48, prompt=8) for _ in range(4)]
    resumed = Load.of(Batch([RowStep(rows[0], 8, 40), *[RowStep(row, 47, 1) for row in rows[1:]]]), cost)
    assert resumed.plain == pytest.approx(43.0) and resumed.token == pytest.approx(1.0)
    assert resumed.rate == pytest.approx(1.0) and resumed.max_added < math.inf and not resumed.decodes_only


def test_the_cost_of_rows_between_those_seen_is_on_their_line() -> None:
    cost = ForwardCost()
    for _ in range(60):
        cost.learn_plain(4, 4, 0, 1e-3)
        cost.learn_drafting(4, 12, 0, 3e-3)
    assert cost.base(8) / cost.base(4) == pytest.approx(2.0, rel=0.1)


def test_the_cost_of_rows_is_learned_from_steps_with_drafts() -> None:
    cost = ForwardCost()
    for _ in range(40):
        cost.learn_plain(1, 1, 0, 1e-3)
        cost.learn_drafting(1, 5, 0, 3e-3)
    assert cost.base(5) / cost.base(1) == pytest.approx(3.0, rel=0.1)


def test_the_cost_of_more_rows_than_were_measured_is_learned() -> None:
    """Beside 64 requests, nodes cost more than the line through the few rows that were measured."""
    cost = ForwardCost({1: 1e-3, 24: 2e-3, 32: 2.05e-3})
    cost.learn_plain(64, 64, 0, cost.base(64))
    assert cost.settled(32) and not cost.settled(128)
    for _ in range(40):
        cost.learn_drafting(64, 128, 0, 2 * cost.base(64))
    assert cost.base(128) / cost.base(64) == pytest.approx(2.0, rel=0.1)
