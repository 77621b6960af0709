"""The pictures of what an adaptive controller chose and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reliability

from outrider import LLM, SamplingParams
from outrider.bench.plot import choices
from outrider.errors import ConfigError

pytest.importorskip("matplotlib")


def test_choices_over_time_are_drawn(tiny: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny), speculative_config={"method": "ngram", "adaptive": True})
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7] * 4}, params)
    history = llm.engine.report()["history"]
    sums = [sum(moment.steps.values()) for moment in history]
    assert len(sums) > 1 and sums == sorted(sums) and sums[-1] == output.speculation.steps
    choices(history, "tiny", tmp_path / "choices.png")
    assert (tmp_path / "choices.png").stat().st_size > 1000


def test_without_an_adaptive_controller_there_is_nothing_to_draw(tiny: Path, tmp_path: Path) -> None:
    history = LLM(str(tiny)).engine.report().get("history", ())
    with pytest.raises(ConfigError, match="nothing to draw"):
        choices(history, "tiny", tmp_path / "choices.png")


def test_predictions_are_drawn_for_each_drafter_with_what_was_seen_often_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    save = reliability.save
    monkeypatch.setattr(
        reliability, "save", lambda figure, *more: (drawn.append(figure), save(figure, *more))
    )
    point = reliability.Point
    bins, module = [point(0.2, 0.3, 50), point(0.7, 0.6, 9)], [point(0.25, 0.25, 40), point(0.8, 1.0, 10)]
    few = [point(0.1, 0.0, 3)]
    panels = {"suffix": {"bins": bins, "module": module}, "ngram": {"bins": few, "module": bins}}
    reliability.draw(panels, "title", tmp_path / "x.svg")
    suffix, ngram = drawn[0].axes
    bars = [[c for c in axes.containers if hasattr(c, "lines")] for axes in (suffix, ngram)]
    points = {bar.get_label(): [*bar.lines[0].get_xdata()] for bar in bars[0]}
    assert points == {"bins": [0.2], "module": [0.25, 0.8]} and suffix.get_title() == "suffix"
    assert [bar.get_label() for bar in bars[1]] == ["module"]
    low, high = (bars[0][0].lines[2][0].get_segments()[0][k][1] for k in (0, 1))
    assert low < 0.3 < high and high - low == pytest.approx(2 * 1.96 * (0.3 * 0.7 / 50 + 50**-2) ** 0.5)
