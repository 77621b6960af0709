"""`outrider tune layerskip`, and guessing with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Run
from helpers import tiny_checkpoint

from outrider import LLM
from outrider.bench.tune import Costs, Tuner
from outrider.draft.layerskip.sets import Skip
from outrider.types import Speculation


def test_tune_and_guess(run: Run, tmp_path: Path) -> None:
    model, out, asked = (
        tiny_checkpoint(tmp_path / "model", num_hidden_layers=3),
        tmp_path / "set.json",
        tmp_path / "asked.txt",
    )
    asked.write_text("What do plants need?\nWhere is the sea?\n")
    tuned = run(
        "tune", "layerskip", model, "--prompts", asked, "--minutes", 0.02, "--out", out, "-n", 8, "--draft", 3
    )
    assert tuned.status == 0, tuned.err
    found = json.loads(out.read_text())
    assert found["layers"] == 3 and found["tried"] > 0 and 1 <= found["num_speculative_tokens"] <= 3
    assert "plain decoding" in tuned.out and "tuned" in tuned.out and "✗" not in tuned.out
    llm = LLM(model, speculative_config={"method": "layerskip", "layers": str(out)})
    skip = llm.engine.drafter.skip  # type: ignore[attr-defined]
    assert [*skip.attention] == found["skip_attention"] and [*skip.mlp] == found["skip_mlp"]
    assert llm.engine.drafter.depth == found["num_speculative_tokens"]


def test_where_nothing_can_be_written(run: Run, tmp_path: Path) -> None:
    refused = run("tune", "layerskip", "builtin", "--out", tmp_path / "nowhere" / "set.json")
    assert refused.status == 2 and "nowhere" in refused.err


def test_the_costs_say_what_a_guess_costs() -> None:
    costs = Costs(step=10.0, row=1.0, whole=8.0, attention=1.0, mlp=1.5)
    assert costs.speed(Skip((1, 2), (3,)), Speculation(4, 6, 3, 7)) == 7 / (4 * 10 + 6 * (1 + 8 - 2 - 1.5))


def test_the_optimiser_finds_what_the_costs_make_worth_while(tmp_path: Path) -> None:
    """Guesses that cost all of a step are never worth it, those that cost nothing always: the best trial skips accordingly."""
    llm = LLM(tiny_checkpoint(tmp_path / "model", num_hidden_layers=3))
    prompts = [("ids", {"prompt_token_ids": [5, 6, 7]})]
    best = {}
    for name, costs in {
        "free": Costs(1.0, 0.0, 0.0, 0.0, 0.0),
        "dear": Costs(1.0, 0.0, 6.0, 0.99, 0.99),
    }.items():
        tuner = Tuner(llm, prompts, depth=3, tokens=12)
        tuner._costs = lambda costs=costs: costs  # type: ignore[method-assign, misc]
        best[name] = tuner.run(0.02, lambda tried, speed: None)
        assert best[name].speed == max(trial.speed for trial in tuner.trials)
    free, dear = (len(best[name].skip.attention) + len(best[name].skip.mlp) for name in ("free", "dear"))
    assert free < dear
    assert best["free"].counts.tokens_per_step > 1.5
