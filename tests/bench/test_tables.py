"""Tables on narrow terminals."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from outrider.bench.measure import PLAIN, Measured, Run
from outrider.bench.report import latencies, matrix, table
from outrider.bench.tables import LONG_NAME, Column, NamedRows
from outrider.core.clock import Times
from outrider.core.row import Speculation
from outrider.outputs import CompletionOutput

NAMES = (PLAIN, "n-gram with recycling", "draft model, chain")


def printed(table: NamedRows, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def measured(method: str, kinds: list[str]) -> Measured:
    counts = Speculation(40, 90, 60, 100)
    runs = list[Run]()
    for kind in kinds:
        times = [0.1234 + i for i in range(100)]
        answer = CompletionOutput(0, "", [1] * 100, speculation=counts, token_times=times)
        runs.append(Run(kind, 1.0, Times(), [answer], [0.81, 1.04, 1.23]))
    return Measured(method, runs)


def whole(results: list[Measured]) -> NamedRows:
    return table("all", results)


@pytest.mark.parametrize("shown", [whole, latencies, matrix])
@pytest.mark.parametrize("width", [80, 120])
def test_names_of_methods_are_whole_at_80_columns(
    shown: Callable[[list[Measured]], NamedRows], width: int
) -> None:
    kinds = ["multi-turn", "translation", "summarization", "qa", "math_reasoning", "rag"]
    results = [measured(name, kinds) for name in NAMES]
    text = printed(shown(results), width)
    assert all(len(line) <= width for line in text.splitlines())
    rows = [line.split("│")[0].strip() for line in text.splitlines() if "│" in line]
    assert {*rows} == {*NAMES}
    if shown is matrix:
        assert all(kind in text for kind in kinds), "no category is left out"


def test_what_a_narrow_terminal_leaves_out_is_named() -> None:
    results = [measured(name, ["a"]) for name in NAMES]
    assert "Not shown" not in printed(table("all", results), 120)
    text = printed(table("all", results), 80)
    assert "Not shown in 80 columns: 4-gram repeats.\n" in text and "speed-" in text and "draft" in text
    assert "p50 / p95 / p99" in printed(latencies(results), 120)
    assert "p50 / p95 in" in printed(latencies(results), 80)


def test_long_names_wrap_between_words() -> None:
    name = "suffix, min_token_prob 0.2, use_tree_spec True, max_spec_factor 4.0"
    made = NamedRows("", [name, "[x]"], [Column("speed-up", ["1.00×", "2.00×"])])
    assert name in printed(made, 100) and "[x]" in printed(made, 100), "a name has no markup"
    lines = [line.split("│")[0].rstrip() for line in printed(made, 60).splitlines()[2:]]
    assert lines[:3] == [" suffix, min_token_prob 0.2,", "   use_tree_spec True, max_spec_factor", "   4.0"]
    assert all(len(line) <= LONG_NAME + 1 for line in lines)
