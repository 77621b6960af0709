"""The learning rate follows steps or time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider import LLM
from outrider.errors import ConfigError
from outrider.train import run
from outrider.train.features import Features
from outrider.train.loop import Trainer
from outrider.train.report import Report
from outrider.train.run import train
from outrider.train.schedule import Schedule, rate_factor


class Killed(BaseException):
    """As if the process had been ended."""


def test_the_rate_may_follow_the_time(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step a second: the cosine ends with the minutes, and a killed run goes on where it was."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("outrider.train.schedule.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.now)
    rates, advance = list[float](), Trainer.advance

    def second(self: Trainer) -> float:
        if clock.now == 130:
            raise Killed
        loss = advance(self)
        rates.append(self.optimizers[0].param_groups[0]["lr"])
        clock.now += 1
        return loss

    monkeypatch.setattr(Trainer, "advance", second)
    given = {"steps": None, "schedule": "minutes", "minutes": 1.0, "checkpoint_every": 10, "rate": 1.0}
    with pytest.raises(Killed):
        train(target, "medusa", run_options("medusa", tmp_path, **given), Report())
    clock.now = 1000.0
    given["minutes"] = 0.5
    result = train(target, "medusa", run_options("medusa", tmp_path, **given), Report())
    assert result.finished and len(result.losses) == 60
    assert clock.now == 1030 and rates[30] == pytest.approx(Schedule(60).factor(30, 0, 0.03), abs=1e-2)
    assert rates[-1] < 1e-3 and rates[5:] == sorted(rates[5:], reverse=True)
    with pytest.raises(ConfigError, match="needs minutes"):
        run_options("medusa", tmp_path, schedule="minutes", minutes=1.0)


def test_a_run_without_time_for_a_step_goes_on_later(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation before the first step takes longer than the minutes, and is not made again."""
    clock, evaluate, advance = SimpleNamespace(now=100.0), run.Evaluation.__call__, Trainer.advance
    monkeypatch.setattr("outrider.train.schedule.time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(run.time, "perf_counter", lambda: clock.now)

    def slow(self: Any) -> None:
        evaluate(self)
        clock.now += 100

    def second(self: Trainer) -> float:
        clock.now += 1
        return advance(self)

    monkeypatch.setattr(run.Evaluation, "__call__", slow)
    monkeypatch.setattr(Trainer, "advance", second)
    given = {"steps": None, "schedule": "minutes", "minutes": 1.0}
    result = train(target, "medusa", run_options("medusa", tmp_path, **given), Report())
    assert not result.finished and not result.losses
    clock.now = 1000.0
    result = train(target, "medusa", run_options("medusa", tmp_path, **given), Report())
    assert result.finished and len(result.losses) == 60


def test_fewer_texts_are_joined_if_their_logits_are_large(
    target: LLM, run_options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    sample = Features.sample

    def noting(self: Any, *numbers: int, **options: Any) -> Any:
        sizes.append(sum(len(self.texts[i].ids) for i in numbers) if len(numbers) > 1 else 0)
        return sample(self, *numbers, **options)

    monkeypatch.setattr(Features, "sample", noting)
    train(target, "medusa", run_options("medusa", tmp_path / "many", steps=2, batch=4), Report())
    most = max(sizes)
    assert most > 40
    monkeypatch.setattr("outrider.train.loop.LOGIT_BYTES", 4 * target.engine.target.vocabulary * 40)
    sizes.clear()
    train(target, "medusa", run_options("medusa", tmp_path / "few", steps=2, batch=4), Report())
    assert sizes and max(sizes) <= 40


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    factors = [rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factors[10] == 1 and factors[55] == pytest.approx(0.5) and factors[99] < 1e-3
    assert factors[10:] == sorted(factors[10:], reverse=True)
