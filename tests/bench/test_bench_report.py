"""Tables and the picture of what `outrider bench` measured."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider import ConfigError
from outrider.bench import plot
from outrider.bench.measure import ALL, PLAIN, Measured
from outrider.bench.measure import Run as Group
from outrider.bench.plot import Gain, check_plot
from outrider.bench.report import figures, matrix, remarks, requests, speed_ups, table
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.outputs import CompletionOutput


def test_an_impossible_speed_up_is_not_shown() -> None:
    """A step takes at least as long as one of plain decoding: 1.02 tokens a step give no 1.22 times."""

    def steps(method: str, count: int, seconds: float) -> Measured:
        spoken = CompletionOutput(0, "", [1] * 102, speculation=Speculation(count, 0, 0, 102))
        return Measured(method, [Group("chat", seconds, Times(), [spoken], [seconds] * 3)])

    plain, busy, real = steps(PLAIN, 102, 1.22), steps("busy", 100, 1.0), steps("real", 60, 1.0)
    assert busy.limit(plain) == pytest.approx(1.02) and busy.impossible(plain)
    assert not real.impossible(plain) and not plain.impossible(plain)
    console = Console(width=160, file=io.StringIO())
    console.print(table("title", [plain, busy, real]), *remarks([plain, busy, real]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "≤ 1.02×" in text and text.count("1.22") == 1 and "busy" in text.split("measured for")[1]
    found = figures([plain, busy, real])
    assert found["busy"]["all"]["speed-up"] is None and found["real"]["all"]["speed-up"] == 1.22


def test_tasks_are_columns_and_other_engines_are_ratios() -> None:
    def run(method: str, promise: str, *seconds: float) -> Measured:
        answers = [CompletionOutput(0, "", [1] * 10, speculation=Speculation()) for _ in seconds]
        pairs = zip(("qa", "math"), seconds, answers)
        return Measured(method, [Group(kind, s, Times(), [a], [s]) for kind, s, a in pairs], promise)

    plain, fast, rival = run(PLAIN, "tokens", 2, 4), run("fast", "tokens", 1, 1), run("rival", "", 4, 4)
    console = Console(width=160, file=io.StringIO())
    console.print(matrix([plain, fast], [rival]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "÷ rival" in lines[1]
    (row,) = [line for line in lines if "fast" in line]
    assert [cell.strip() for cell in row.split("│")] == ["fast", "2.00×", "4.00×", "3.00×", "4.00×"]
    assert speed_ups([plain, fast]) == {"fast": [Gain(gain, gain, gain) for gain in (2.0, 4.0, 3.0)]}


def test_json_has_acceptance_by_depth_and_every_request() -> None:
    drafted = Speculation(4, 9, 3, 7, accepted_lengths=(1, 1, 1))
    one = CompletionOutput(0, "", [1] * 7, speculation=drafted, token_times=[0.1, 0.5, 0.5])
    two = CompletionOutput(0, "", [2] * 3)  # of another engine, whose steps and times are not known
    ours = Measured("ours", [Group("qa", 1.0, Times(), [one], [1.0])])
    theirs = Measured("rival", [Group("qa", 1.0, Times(), [two], [1.0])], "")
    found = figures([ours, theirs])
    assert found["ours"]["all"]["acceptance by depth"] == [0.6667, 0.3333]
    assert found["rival"]["all"]["acceptance by depth"] == []
    assert requests([ours, theirs]) == {
        "ours": {
            "category": ["qa"], "tokens": [7], "same tokens": [True], "steps": [4], "drafted": [9],
            "accepted": [3], "first token ms": [100.0], "last token ms": [500.0],
        },
        "rival": {
            "category": ["qa"], "tokens": [3], "same tokens": [False], "steps": [None], "drafted": [0],
            "accepted": [0], "first token ms": [None], "last token ms": [None],
        },
    }  # fmt: skip


def test_prompts_without_a_category_are_one_task() -> None:
    def run(method: str, promise: str, seconds: float) -> Measured:
        answer = CompletionOutput(0, "", [1] * 10, speculation=Speculation())
        return Measured(method, [Group(ALL, seconds, Times(), [answer], [seconds])], promise)

    plain, fast, rival = run(PLAIN, "tokens", 2), run("fast", "tokens", 1), run("rival", "", 4)
    assert plain.tasks == [ALL] and speed_ups([plain, fast]) == {"fast": [Gain(2.0, 2.0, 2.0)]}
    assert [column.title for column in matrix([plain, fast], [rival]).columns] == [ALL, "÷ rival"]


def test_a_plot_without_its_folder_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere|matplotlib"):
        check_plot(tmp_path / "nowhere" / "x.png")


def test_a_plot_of_an_unknown_kind_is_refused_before_measuring(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match=r"'x\.jpg' must end in one of \.png, \.svg"):
        check_plot(tmp_path / "x.jpg")


def test_plot_has_a_panel_for_each_task_and_the_fastest_method_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, *more: (drawn.append(figure), save(figure, *more)))
    slow, fast = Gain(0.8, 0.7, 0.9), Gain(2.0, 1.9, 2.1)
    gains = {
        "slow": [fast, slow],
        "busy": [fast, None],
        "fast": [slow, fast],
        "even": [slow, Gain(1, 0.9, 2)],
    }
    for name, head in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("again.svg", b"<?xml")):
        plot.speed_ups(gains, ["qa", "all"], "title", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(head)
    assert (tmp_path / "x.svg").read_bytes() == (tmp_path / "again.svg").read_bytes(), "the same every time"
    qa, total = drawn[0].axes
    assert [axes.get_title() for axes in (qa, total)] == ["qa", "all"]
    assert [label.get_text() for label in qa.get_yticklabels()] == ["fast", "even", "slow", "busy"]
    assert [text.get_text() for text in total.texts] == ["2.00×", "1.00×", "0.80×", "–"]
    spans = [line for line in total.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] != 1]
    assert [(*line.get_xdata(), line.get_color()) for line in spans] == [
        (1.9, 2.1, plot.BLUE), (0.9, 2, plot.GREY), (0.7, 0.9, plot.RED),
    ]  # fmt: skip
