"""`outrider demo` shows every method that wants to be shown, and that all of them emit the same tokens."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.bench import demo
from outrider.bench.measure import demonstrations
from outrider.bench.panes import Piece, coloured, frame, lines_of, palette_of, pieces_of, replay
from outrider.bench.prompts import TASKS, rendered
from outrider.cli import app, main
from outrider.outputs import CompletionOutput

PLAIN = [Piece(0.1 * i, f" {i}", None) for i in range(1, 11)]
FAST = [Piece(0.1 + 0.05 * (i // 3), f" {i}", None if i % 3 == 0 else "ngram") for i in range(1, 11)]


def test_the_demo_shows_every_method_with_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TASKS", TASKS[2:4])
    monkeypatch.setattr(demo, "ROUNDS", 1)
    result = CliRunner().invoke(app, ["demo", "--small", "--tokens", "6"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    rows = [line.split("│") for line in result.output.splitlines() if line.count("│") == 7]
    shown = {row[0].strip(): row[-1] for row in rows[-len(demonstrations()) :]}
    assert shown.keys() == set(demonstrations())
    assert all("✓" in mark for mark in shown.values())
    speeds = [float(row[1]) for row in rows[-len(demonstrations()) :]]
    assert speeds == sorted(speeds, reverse=True), "one table, the fastest first"
    assert "the same tokens as plain decoding" in result.output
    assert "when plain decoding had" in result.output, "without a terminal the panes are text"


def test_a_model_of_ones_own_with_a_draft() -> None:
    words = ["demo", "builtin", "-md", "builtin-draft", "--tokens", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "PROMPTS", TASKS[:4])
        patch.setattr(demo, "ROUNDS", 1)
        patch.setattr(demo, "demonstrations", lambda: {"plain": None, "n-gram look-up": {"method": "ngram"}})
        result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "n-gram look-up" in result.output and "builtin-draft" in result.output
    assert CliRunner().invoke(app, ["demo", "-md", "builtin-draft"]).exit_code != 0


def test_answers_of_the_demo_are_right() -> None:
    llm, params = LLM("builtin"), SamplingParams(temperature=0, max_tokens=160)
    prompts = [rendered(prompt, llm.tokenizer) for prompt in TASKS]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert texts[0].endswith("12 + 8 = 20\nThe answer is 20.")
    code = dict[str, Any]()
    exec(texts[1], code)
    is_prime = code["is_prime"]
    assert callable(is_prime) and [n for n in range(12) if is_prime(n)] == [2, 3, 5, 7, 11]
    assert all(name in texts[2] for name in ("Nora", "Naples", "Oscar", "flowers"))
    assert 5 <= len(re.findall(r"[.!?]", texts[2])) <= 12 and texts[2].endswith((".", '"'))
    code = dict[str, Any]()
    exec(texts[3], code)
    count_vowels = code["count_vowels"]
    assert callable(count_vowels) and count_vowels("Outrider") == 4
    assert count_vowels.__doc__ == "Count the vowels in a string."
    assert texts[4] == "SELECT title FROM books WHERE price > 20;"
    assert texts[5] == "On Monday, Max bought 32 cards at the market in Vienna for Emma."
    assert texts[6] == "Ich möchte morgen ein neues Buch kaufen."
    assert "I will arrive on Friday at 5." in texts[7]
    assert texts[8].endswith("Sorted: 3, 7, 19, 42, 56, 88")


def test_a_pane_is_as_far_as_its_answer_was() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    console.print(frame("question", PLAIN, FAST, 0.21, 1.0, 2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "plain decoding: 2 of 10" in text and "Outrider: 8 of 10" in text


def test_a_pane_has_room_for_the_whole_answer() -> None:
    console, words = Console(width=80, file=io.StringIO()), [Piece(0.1, f" word{i}", None) for i in range(60)]
    console.print(frame("question", words, words, 1.0, 1.0, lines_of(words, console)))
    assert "word59" in console.file.getvalue()  # type: ignore[attr-defined]


def test_draft_tokens_have_the_colour_of_their_drafter() -> None:
    palette = palette_of([*FAST, Piece(1.0, "x", "suffix")])
    assert list(palette) == ["ngram", "suffix"] and len(set(palette.values())) == 2
    styles = [span.style for span in coloured(FAST[:3], palette).spans]
    assert styles == [f"bold {palette['ngram']}"] * 2


def test_pieces_of_an_answer_wait_for_whole_characters() -> None:
    octets = [b"a", b"\xc3", b"\xa4"]

    def decode(ids: list[int]) -> str:
        return b"".join(octets[i] for i in ids).decode(errors="replace")

    answer = CompletionOutput(
        0, "", [0, 1, 2], token_times=[0.1, 0.2, 0.3], token_sources=[None, "ngram", "ngram"]
    )
    assert [piece.text for piece in pieces_of(answer, decode)] == ["a", "", "ä"]


def test_a_replay_ends_with_the_right_pane() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=True)
    replay("question", PLAIN, FAST, console, least=0.2)
    assert "Outrider: 10 of 10" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_wrong_draft_of_the_demo_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "builtin", "-md", "no such draft"])
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("no such draft") == 1 and "Left out" not in printed.out
