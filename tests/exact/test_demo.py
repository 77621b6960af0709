"""`outrider demo` shows every method that wants to be shown, and that all of them say the same."""

from __future__ import annotations

from typer.testing import CliRunner

from outrider.bench.measure import demonstrations
from outrider.cli import app


def test_the_demo_runs_and_every_method_says_the_same() -> None:
    result = CliRunner().invoke(app, ["demo", "--tokens", "6"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for label in demonstrations():
        rows = [
            line for line in result.output.splitlines() if "│" in line and line.split("│")[0].strip() == label
        ]
        assert len(rows) == 2, f"{label}: one row greedy, one sampled"
        assert all("✓" in row and "✗" not in row for row in rows)
    assert "the same tokens as plain decoding" in result.output
