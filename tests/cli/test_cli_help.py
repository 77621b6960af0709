"""Names of options and paragraphs in the help of a narrow terminal."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from outrider.cli import main
from outrider.cli.flags import LEVELS, MODEL_DRAFT, TEMPERATURE


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
def test_no_name_is_cut(
    command: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    names = [cells[1] for line in lines if (cells := re.match(r"│ (\S+(?: -\S+)*)", line))]
    assert len(names) > 20 and not [name for name in names if "…" in name]
    if columns > 60 and command == "generate":
        words = {word for name in names for word in name.split()}
        assert {name for name in (*MODEL_DRAFT, *LEVELS, *TEMPERATURE) if name.startswith("--")} <= words


@pytest.mark.parametrize("command", [["bench"], ["verify"], ["models"], ["tune", "control"]], ids=" ".join)
def test_paragraphs_fill_the_lines(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line breaks of docstrings were kept beside those of the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    about = capsys.readouterr().out.split("╭")[0]
    lines = [line.strip() for line in about.splitlines()]
    for line, after in pairwise(lines):
        assert not (line and after) or len(line) + 1 + len(after.split()[0]) > 78, (line, after)
