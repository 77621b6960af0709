"""Measured costs of the target's forward: at load, once, and robust."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider import LLM
from outrider.control.auto import AutoController
from outrider.engine import calibrate
from outrider.engine.calibrate import NEAR, ROUNDS, ROWS, Measured, forward_cost, measure
from outrider.engine.stored import StoredJson


def costs_of(llm: LLM) -> dict[int, float]:
    controller = llm.engine.controller
    assert isinstance(controller, AutoController)
    return {rows: controller.evidence.forward.base(rows) for rows in ROWS}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the kernels are loaded already."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.engine.adaptive.forward_cost", forward_cost)
    return tmp_path


def test_costs_are_measured_once_and_read_later(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = costs_of(LLM(str(tiny), speculative_config={"method": "ngram", "adaptive": True}))
    assert all(seconds > 0 for seconds in first.values()) and first[32] > first[1]
    (file,) = folder.glob("costs-*.json")
    assert json.loads(file.read_text())["rounds"] == ROUNDS

    def refuse(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(calibrate, "measure", refuse)
    llm = LLM(str(tiny), speculative_config={"method": "ngram", "adaptive": True})
    assert costs_of(llm) == pytest.approx(first)
    with pytest.raises(AssertionError, match="measured again"):
        LLM(str(tiny), dtype="bfloat16", speculative_config={"method": "ngram", "adaptive": True})


def test_a_broken_file_is_measured_again(tiny: Path, folder: Path) -> None:
    decoder = LLM(str(tiny)).engine.decoder
    forward_cost(decoder, 512)
    (file,) = folder.glob("costs-*.json")
    file.write_text("[1, 2")
    assert forward_cost(decoder, 512).settled(1)
    assert set(json.loads(file.read_text())["rows"]) == {str(rows) for rows in ROWS}


def test_the_forward_of_sixty_four_requests_is_measured(tiny: Path, folder: Path) -> None:
    """The line through 24 and 32 rows is one of noise: at 64 it was off by half."""
    cost = forward_cost(LLM(str(tiny)).engine.decoder, 512)
    assert cost.settled(64) and not cost.settled(256)


def test_one_slow_round_changes_nothing(tiny: Path) -> None:
    """A clock on which the third round takes a hundred times as long."""
    ticks = [0.0]

    def clock() -> float:
        ticks.append(ticks[-1] + (1e-1 if 65 < len(ticks) < 70 else 1e-3))
        return ticks[-1]

    found = measure(LLM(str(tiny)).engine.decoder, 512, clock=clock)
    assert found.rounds > 2 and max(found.rows.values()) < 2e-3


def test_a_delayed_forward_makes_no_more_rows_slow() -> None:
    """Three rows were measured while another program ran: otherwise drafts would seem to cost nothing."""
    cost = Measured({1: 1.0, 2: 1.0, 3: 3.0, 4: 1.1, 8: 1.7}, distant=1.7, far=NEAR + 100).cost()
    assert [cost.base(rows) for rows in (1, 3, 4, 8)] == pytest.approx([1.0, 1.1, 1.1, 1.7])


def test_the_cost_of_context_is_that_of_draft_tokens_which_share_it() -> None:
    found = Measured({1: 1.0, 8: 1.7}, distant=2.1, far=NEAR + 100)
    assert found.cost().per_context == pytest.approx(0.4 / 800)
    assert Measured({1: 1.0}, distant=2.1, far=NEAR + 100).cost().per_context == 0


def test_where_time_runs_out_the_next_start_goes_on(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    decoder = LLM(str(tiny)).engine.decoder
    forward_cost(decoder, 512)
    (file,) = folder.glob("costs-*.json")
    kept = json.loads(file.read_text())
    assert set(kept["rows"]) == {"1"} and kept["rounds"] == 0
    monkeypatch.undo()
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    forward_cost(decoder, 512)
    after = json.loads(file.read_text())
    assert after["rounds"] == ROUNDS and after["rows"]["1"] <= kept["rows"]["1"]


def test_several_writers_leave_a_whole_file(folder: Path) -> None:
    stored, values = StoredJson("drafting", "x"), [{"a": [i] * 2000} for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: [stored.write(value) for _ in range(20)], values))
    assert stored.path is not None and stored.read() in values
    assert [path.name for path in folder.iterdir()] == [stored.path.name]


def test_plain_decoding_measures_nothing(tiny: Path, folder: Path) -> None:
    LLM(str(tiny))
    assert not list(folder.glob("costs-*.json"))
