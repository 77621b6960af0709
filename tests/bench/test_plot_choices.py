"""The picture of what an adaptive controller chose."""

from __future__ import annotations

from pathlib import Path

import pytest

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
