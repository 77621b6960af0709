"""The real controller in simulated environments: never much slower than plain decoding, near the best arm."""

from __future__ import annotations

import random

import pytest
from simulated import MAX_DEPTH, Environment, Outcome, Simulation, Source

from outrider.core.clock import Times
from outrider.core.step import Batch, Commit

DEPTHS = (1, 2, 3, 4, 6, 8)


def best_fixed(env: Environment, plain: float) -> float:
    """Time of the best of plain decoding and every drafter at every depth, known in hindsight."""
    return min([plain, *(env.fixed_time(k, depth) for k in range(len(env.sources)) for depth in DEPTHS)])


def run(seed: int, settles: bool = False) -> tuple[Environment, Outcome]:
    env = Environment.draw(seed)
    return env, Simulation(env, seed=seed, settles=settles).run()


def check(seeds: range, settles: bool = False) -> None:
    ratios, losses = [], {}
    for seed in seeds:
        env, outcome = run(seed, settles)
        ratios.append(outcome.time / best_fixed(env, outcome.plain))
        losses[seed] = outcome.worst_loss
    assert max(losses.values()) <= 20, max(losses.items(), key=lambda item: item[1])
    assert sum(ratios) / len(ratios) < 1.0, "behind the best fixed arm in hindsight"


@pytest.mark.parametrize("settles", [False, True], ids=["at-once", "beside-the-next-step"])
def test_losses_are_bounded_and_the_best_fixed_arm_is_beaten_on_average(settles: bool) -> None:
    check(range(15), settles)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_losses_are_bounded_in_a_thousand_environments() -> None:
    check(range(1000))


def environment(level: float, per_level: float, batch: int = 1, tokens: int = 600) -> Environment:
    """One drafter of constant acceptance, whose confidence tells nothing."""
    env = Environment.draw(0, tokens=8)
    env.sources = [Source(0.0, per_level, 1.0, [level], False)]
    env.rows = [0.0, *(1 + 0.05 * i for i in range(100))]
    env.batch, env.tokens, env.period, env.noise, env.measured = batch, tokens, 10 * tokens, 0.0, True
    luck = random.Random(1)
    env.luck = [[luck.random() for _ in range(MAX_DEPTH + 1)] for _ in range(batch * (tokens + MAX_DEPTH))]
    return env


@pytest.mark.parametrize("batch", [1, 4])
def test_a_useless_drafter_is_left_alone(batch: int) -> None:
    outcome = Simulation(environment(0.02, 0.1, batch)).run()
    assert outcome.time < 1.02 * outcome.plain
    asked = outcome.controller.report()["drafters"]["drafter0"]["asked"]
    assert 0 < asked < 0.1 * batch * 600


def test_while_nothing_pays_most_steps_decide_nothing() -> None:
    simulation, looks = Simulation(environment(0.02, 0.1)), 0
    look = simulation.controller._look

    def counted(batch: Batch) -> None:
        nonlocal looks
        looks += 1
        look(batch)

    simulation.controller._look = counted  # type: ignore[method-assign]
    outcome = simulation.run()
    assert sum(outcome.controller.report()["summary"]["steps"].values()) > 500
    assert looks < 100


def test_a_new_number_of_rows_costs_one_plain_step() -> None:
    """Requests of different lengths: whenever one ends, plain decoding is measured once again."""
    env = environment(0.95, 0.02, batch=4)
    steps = Simulation(env).run().controller.report()["summary"]["steps"]
    assert steps["off"] < 0.2 * steps["drafter0"]


def test_a_perfect_drafter_is_used_to_its_full_depth() -> None:
    env = environment(0.99, 0.02)
    outcome = Simulation(env).run()
    assert outcome.time < 1.1 * env.fixed_time(0, MAX_DEPTH)


def test_a_slow_machine_switches_no_drafter_off() -> None:
    """All steps take three times as long from the middle on: drafts pay as before."""
    env = environment(0.8, 0.05)
    simulation = Simulation(env)
    learn = simulation.controller.learn

    def slowed(commit: Commit, times: Times) -> None:
        factor = 3.0 if simulation.now > 0.15 else 1.0
        learn(commit, Times(*(factor * seconds for seconds in times)))

    simulation.controller.learn = slowed  # type: ignore[method-assign]
    outcome = simulation.run()
    assert outcome.time < 1.15 * env.fixed_time(0, 4)


def test_what_was_chosen_is_reported() -> None:
    outcome = Simulation(environment(0.9, 0.02)).run()
    summary = outcome.controller.report()["summary"]
    assert summary["steps"]["drafter0"] > summary["steps"]["off"] > 0
    assert summary["expected"] == pytest.approx(summary["accepted"], rel=0.15)
    assert summary["gain"] == pytest.approx(outcome.plain / outcome.time, rel=0.05)
