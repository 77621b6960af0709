"""The ranking of a search on the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from outrider.tune.report import show_ranking
from outrider.tune.search import Candidate, Outcome, Pair


def printed(outcome: Outcome, exact: bool = True) -> str:
    console = Console(width=80, file=io.StringIO())
    show_ranking(outcome, Path("tuned.json"), exact, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_ranking_tells_what_was_compared() -> None:
    best = Candidate("builtin-draft", {"model": "x"}, [Pair(2.0, 1.0)] * 4)
    other = Candidate(
        "suffix, min_token_prob 0.2, use_tree_spec True", {"method": "suffix"}, [Pair(3.0, 1.0)]
    )
    found = Outcome([best], [other], [], {})
    text = printed(found)
    assert "The first is ranked by runs at the end" in text
    assert "Every setting emitted the tokens of plain decoding." in text
    assert "Every setting" not in printed(found, exact=False)
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    assert ["builtin-draft", "2.00×", "2.00 … 2.00", "4"] in rows
    text = printed(replace(found, dropped=[replace(other, changed=True)], interrupted=True))
    assert "a bug: suffix, min_token_prob" in text and "Every setting" not in text
    assert text.startswith("Cut short by Ctrl-C") and "runs at the end" not in text


def test_what_was_not_tried_has_its_reason() -> None:
    found = Outcome([Candidate("builtin-draft", {"model": "x"}, [Pair(2.0, 1.0)])], [], ["ngram"], {})
    text = " ".join(printed(found).split())
    assert "Not tried for lack of time: ngram. Give more --minutes." in text
    text = " ".join(printed(replace(found, interrupted=True)).split())
    assert "Not tried because of Ctrl-C: ngram." in text and "--minutes" not in text


def test_brackets_in_reasons_and_names_are_no_markup() -> None:
    """The name of an extra was left out, and a path in brackets ended the command with a traceback."""
    best = Candidate("/models/[a]", {"model": "x"}, [Pair(2.0, 1.0)])
    reasons = {"gguf": "it needs  pip install 'outrider[gguf]'", "b": "no file in [/models/b]"}
    text = " ".join(printed(Outcome([best], [], ["/c/[d]"], reasons)).split())
    assert "'outrider[gguf]'" in text and "[/models/b]" in text
    assert "Not tried for lack of time: /c/[d]." in text and "/models/[a] is not shown" in text
