"""`outrider tune layerskip`, and drafting with its file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from commands import Run

from outrider import LLM, ConfigError
from outrider.cli.tune import _check_model
from outrider.core.row import Speculation
from outrider.draft.layerskip.sets import Skip
from outrider.testing import tiny_checkpoint
from outrider.tune.layerskip import Costs, Tuner
from outrider.tune.search import Candidate, Search

COMMANDS = ("search", "control", "layerskip")


def test_tuned_layer_set_drafts(run: Run, tmp_path: Path) -> None:
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
    assert ("slower than plain decoding" in tuned.out) == (found["measured speed-up"] <= 1)
    llm = LLM(model, speculative_config={"method": "layerskip", "layers": str(out)})
    skip = llm.engine.drafter.skip  # type: ignore[attr-defined]
    assert [*skip.attention] == found["skip_attention"] and [*skip.mlp] == found["skip_mlp"]
    assert llm.engine.drafter.depth == found["num_speculative_tokens"]


def test_slower_layer_set_is_reported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tiny_checkpoint(tmp_path / "model", num_hidden_layers=2), tmp_path / "set.json"
    asked = tmp_path / "asked.txt"
    asked.write_text("What do plants need?\n")
    for measured in (0.71, 1.4):
        monkeypatch.setattr("outrider.tune.layerskip.gain", lambda results, measured=measured: measured)
        words = ("--prompts", asked, "--minutes", 0.01, "-o", out, "-n", 6, "--draft", 2)
        tuned = run("tune", "layerskip", "-m", model, *words)
        assert tuned.status == 0, tuned.err
        assert json.loads(out.read_text())["measured speed-up"] == measured
        assert ("slower than plain decoding: 0.71×" in tuned.out) == (measured < 1)


def test_missing_optuna_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused = run("tune", "layerskip", tmp_path / "never loaded", "-o", tmp_path / "set.json")
    assert refused.status == 2 and "pip install 'outrider[tune]'" in refused.err


def test_a_stop_classifier_needs_enough_to_learn_from(run: Run, tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.txt", tmp_path / "stop.safetensors"
    asked.write_text("What do plants need?\nWhere is the sea?\n")
    few = run(
        "tune", "disco", "-m", "builtin", "-md", "builtin-draft", "--prompts", asked, "-n", 6, "-o", out
    )
    assert (
        few.status == 2
        and few.err.count("\n") == 1
        and re.search(r"\d+ draft tokens were judged, and .* needs 200", few.err)
    )
    assert not out.exists()
    made = run("tune", "disco", "builtin", "builtin-draft", "-n", 64, "-o", out)
    assert made.status == 0 and out.exists() and "rightly" in made.out, made.err


def test_where_nothing_can_be_written(run: Run, tmp_path: Path) -> None:
    refused = run("tune", "layerskip", "builtin", "--out", tmp_path / "nowhere" / "set.json")
    assert refused.status == 2 and "nowhere" in refused.err


def test_speed_follows_costs_of_steps_and_draft_tokens() -> None:
    costs = Costs(step=10.0, row=1.0, full=8.0, attention=1.0, mlp=1.5)
    assert costs.speed(Skip((1, 2), (3,)), Speculation(4, 6, 3, 7)) == 7 / (4 * 10 + 6 * (1 + 8 - 2 - 1.5))


def test_the_optimiser_finds_what_the_costs_make_worth_while(tmp_path: Path) -> None:
    """Drafts that cost a whole step never pay, free ones always: the best trial follows the costs."""
    llm = LLM(tiny_checkpoint(tmp_path / "model", num_hidden_layers=3))
    prompts = [("ids", {"prompt_token_ids": [5, 6, 7]})]
    best = {}
    for name, costs in {
        "free": Costs(1.0, 0.0, 0.0, 0.0, 0.0),
        "dear": Costs(1.0, 0.0, 6.0, 0.99, 0.99),
    }.items():
        tuner = Tuner(llm, prompts, depth=3, tokens=12)
        tuner._measure_costs = lambda costs=costs: costs  # type: ignore[method-assign, misc]
        best[name] = tuner.run(0.02, lambda tried, speed: None)
        assert best[name].speed == max(trial.speed for trial in tuner.trials)
    free, dear = (len(best[name].skip.attention) + len(best[name].skip.mlp) for name in ("free", "dear"))
    assert free < dear
    assert best["free"].counts.tokens_per_step > 1.5


def test_tune_without_a_method_searches_all_of_them(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Write a function to merge two lists.\n")
    asked = ("builtin", "--prompts", prompts, "--minutes", 0.05, "-n", 4, "--out", out)
    result = run("tune", *asked)
    assert result.status == 0, result.err
    assert "interval" in result.out and "--speculative-config @" in result.out
    config = json.loads(out.read_text())
    assert run("generate", "-p", "x", "-n", 3, "--speculative-config", f"@{out}").status == 0 and config
    assert ("switches speculation off" in result.out) == (config == {"method": "off"})


@pytest.mark.parametrize(
    "command", [[], ["control"], ["layerskip"], ["disco", "-md", "never loaded"]], ids=str
)
def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    run: Run, tmp_path: Path, command: list[str]
) -> None:
    """A folder was refused when the minutes of the search were over."""
    for out, fault in (
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "no" / "x", "there is no folder"),
        (tmp_path / ("x" * 300), "cannot be written to"),
    ):
        refused = run("tune", *command, "-m", tmp_path / "never loaded", "--out", out)
        assert refused.status == 2 and fault in refused.err, refused.err


def test_ctrl_c_writes_the_best_setting_so_far(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured was lost."""
    visit, out = Search._visit, tmp_path / "tuned.json"

    def interrupted(self: Search, candidate: Candidate) -> bool:
        if sum(len(one.pairs) for one in self.tried.values()) == 2:
            raise KeyboardInterrupt
        return visit(self, candidate)

    monkeypatch.setattr(Search, "_visit", interrupted)
    ended = run("tune", "builtin", "--minutes", 5, "-n", 4, "--out", out)
    assert ended.status == 130 and "Cut short by Ctrl-C" in ended.out, ended.err
    assert "interval" in ended.out and "Every setting emitted the tokens" in ended.out
    assert "runs at the end" not in ended.out
    assert "method" in json.loads(out.read_text())


def test_a_misspelt_command_is_no_model(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run("tune", "kontrol", "--out", tmp_path / "x")
    assert refused.status == 2 and "is it `outrider tune control`?" in refused.err, refused.err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kontrol").mkdir()
    assert "`outrider tune control`" not in run("tune", "kontrol").err, "a folder of that name is a model"


@pytest.mark.parametrize(
    ("name", "command"),
    [("contol", "control"), ("controll", "control"), ("layerskp", "layerskip"), ("searhc", "search")],
)
def test_a_slip_of_the_fingers_is_a_misspelt_command(name: str, command: str) -> None:
    with pytest.raises(ConfigError, match=f"is it `outrider tune {command}`"):
        _check_model(name, COMMANDS)


@pytest.mark.parametrize("name", ["org/control", "control/x", "control-v2", "research", "layerskip-llama"])
def test_a_model_named_like_a_command_is_a_model(name: str) -> None:
    _check_model(name, COMMANDS)
