"""The demo shows kinds of tasks that the target answers right."""

import json
from pathlib import Path

import pytest

from outrider.bench.prompts import TASKS
from recipes.builtin.answers import DEMO

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


@pytest.mark.parametrize("name", ["2026-11-27-answers.json", "2026-11-27-answers-demo.json"])
def test_kinds_of_the_demo_are_right_with_held_out_values(name: str) -> None:
    scores = json.loads((RESULTS / name).read_text())["values"]
    for kind in {DEMO[prompt.kind] for prompt in TASKS}:
        assert scores["right"][kind] >= 0.95 and scores["turns"][kind] >= 100, kind
