"""Tables and JSON of results.  The others are compared with the first result, plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.bench.measure import ALL, Measured
from outrider.bench.plot import Gain
from outrider.bench.tables import Column, NamedRows

PERCENTILES = (50, 95, 99)
DRAFT_TIME, REPEATS = "draft\ntime", "4-gram\nrepeats"


@contextmanager
def counted(what: str, total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal.  Yields a function that advances it by one, with a label."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda now: bar.update(task, advance=1, description=now)


def table(title: str, results: Sequence[Measured], plain: Measured | None = None) -> NamedRows:
    """Speed-ups as a table, over the first result by default: medians of the repeats ± half their range.

    Of another engine, whose rounding differs, the answers with the same tokens are counted.
    """
    plain = plain or results[0]
    titles = ("tok/s", "speed-\nup", "tokens\n/ step", "accep-\ntance", DRAFT_TIME, REPEATS, "same\ntok.")
    names, rows = list[str](), list[Sequence[str]]()
    for result in sorted(results, key=lambda result: bool(result.stopped)):
        names.append(f"{result.method}: {result.stopped}" if result.stopped else result.method)
        rows.append(["–"] * len(titles) if result.stopped else _cells(result, plain))
    columns = [Column(name, [row[i] for row in rows]) for i, name in enumerate(titles)]
    return NamedRows(title, names, columns, (REPEATS, DRAFT_TIME))


def _cells(result: Measured, plain: Measured) -> Sequence[str]:
    """The cells of a row of `table`."""
    total = result.total
    return (
        f"{result.speed:.0f}",
        _speed_up(result, plain),
        f"{total.tokens_per_step:.2f}" if total.steps else "–",
        f"{total.acceptance:.0%}" if total.drafted else "–",
        f"{result.drafting:.0%}" if total.drafted else "–",
        f"{result.repeated:.0%}",
        _kept(result, plain),
    )


def matrix(results: Sequence[Measured], peers: Sequence[Measured] = ()) -> NamedRows:
    """Speed-ups by method and category, then total speed over that of each other engine's best mode."""
    plain, peers = results[0], [peer for peer in peers if not peer.stopped]
    columns = list[Column]()
    for kind in plain.tasks[:-1]:
        gains = [_speed_up(result.only(kind), plain.only(kind), False) for result in results]
        columns.append(Column(kind, gains))
    columns.append(Column(ALL, [_speed_up(result, plain) for result in results]))
    for peer in peers:
        ratios = [f"{result.speed / peer.speed:.2f}×" for result in results]
        columns.append(Column("÷ " + peer.method.replace(" ", "\n"), ratios))
    return NamedRows("speed-up by task", [result.method for result in results], columns)


def speed_ups(results: Sequence[Measured]) -> dict[str, list[Gain | None]]:
    """Method -> its speed-up in each category, then in all; None for an impossible one."""
    plain = results[0]

    def gain(ours: Measured, theirs: Measured) -> Gain | None:
        each = ours.speed_ups(theirs)
        return None if ours.impossible(theirs) else Gain(ours.speed_up(theirs), min(each), max(each))

    return {r.method: [gain(r.only(kind), plain.only(kind)) for kind in plain.tasks] for r in results[1:]}


def _speed_up(result: Measured, plain: Measured, spread: bool = True) -> str:
    """Text of a speed-up: its limit if it is impossible, else in the colour of gain or loss."""
    gain, noise = result.speed_up(plain), result.noise(plain)
    if result.impossible(plain):
        return f"≤ {result.limit(plain):.2f}×"
    colour = "green" if gain >= 1.005 else "red" if gain < 0.97 else "white"
    if result is plain or noise is None or not spread:
        return f"[{colour}]{gain:.2f}×[/]"
    return f"[{'white' if within_noise(result, plain) else colour}]{gain:.2f} ± {noise:.2f}×[/]"


def within_noise(result: Measured, plain: Measured) -> bool:
    """Whether the difference from plain decoding is smaller than that between repeats."""
    noise = result.noise(plain)
    return result is not plain and noise is not None and noise >= abs(result.speed_up(plain) - 1)


def remarks(results: Sequence[Measured]) -> list[str]:
    """Caveats for the reader of the speed-ups."""
    plain, *others = results
    if not others:
        return []
    if all(other.noise(plain) is None for other in others):
        return [
            "One repeat: how much of a speed-up is noise is not known. `outrider bench --repeats 3` tells."
        ]
    lines = []
    if busy := [other.method for other in others if other.impossible(plain)]:
        lines.append(
            f"More was measured for {', '.join(busy)} than the tokens of a step allow: the machine was busy. "
            "The limit is shown instead (≤)."
        )
    unsure = [o.method for o in others if within_noise(o, plain) and not o.impossible(plain)]
    if not unsure:
        return lines
    return [
        *lines,
        f"No difference from plain decoding is shown for {', '.join(unsure)}: the repeats differ by more. "
        "Measure more of them (`outrider bench --repeats`), longer answers (-n) or on an idle machine.",
    ]


def _kept(result: Measured, plain: Measured) -> str:
    """Text of the last column: whether the promise was kept."""
    if result.promise == "tokens":
        return "[bold red]✗[/]" if result.differs(plain) else "[green]✓[/]"
    if not result.promise:
        return f"{_same(result, plain)}/{len(plain.tokens)}"
    return {"distribution": "dist.", "lossy": "[bold red]lossy[/]"}[result.promise]


def _same(result: Measured, plain: Measured) -> int:
    """Number of answers that have the tokens of plain decoding."""
    return sum(map(list.__eq__, result.tokens, plain.tokens))


def latencies(results: Sequence[Measured]) -> NamedRows:
    """Percentiles of the times to the first token, between steps, and per token."""
    return _latency_table(results, PERCENTILES, _latency_table(results, PERCENTILES[:2]))


def _latency_table(
    results: Sequence[Measured], percentiles: Sequence[int], narrower: NamedRows | None = None
) -> NamedRows:
    found = [_latencies(result) for result in results]
    columns = list[Column]()
    for name in found[0]:
        cells = list[str]()
        for latency in found:
            shown = _percentiles(latency[name])[: len(percentiles)]
            cells.append(" / ".join(f"{1e3 * seconds:.3g}" for seconds in shown))
        columns.append(Column(name, cells))
    title = f"latency, {' / '.join(f'p{p}' for p in percentiles)} in milliseconds"
    return NamedRows(title, [result.method for result in results], columns, narrower=narrower)


def figures(results: Sequence[Measured]) -> dict[str, Any]:
    """Method -> category -> figures, for JSON; the category "all" holds all prompts."""
    plain, found = results[0], dict[str, Any]()
    for result in results:
        if result.stopped:
            found[result.method] = {ALL: {"stopped": result.stopped}}
            continue
        kinds = (ALL, *plain.kinds)
        found[result.method] = {kind: _figures(result.only(kind), plain.only(kind)) for kind in kinds}
    return found


def _figures(ours: Measured, plain: Measured) -> dict[str, Any]:
    total = ours.total
    made: dict[str, Any] = {
        "requests": len(ours.answers),
        "tokens": ours.num_tokens,
        "tokens/s": round(ours.speed, 2),
        "speed-up": None if ours.impossible(plain) else round(ours.speed_up(plain), 4),
        "largest possible speed-up": _number(ours.limit(plain)),
        "speed-up of each repeat": [round(gain, 4) for gain in ours.speed_ups(plain)],
        "tokens per step": round(total.tokens_per_step, 4),
        "acceptance": round(total.acceptance, 4),
        "acceptance by depth": [round(count / total.drafts, 4) for count in total.accepted_at],
        "share of time drafting": round(ours.drafting, 4),
        "share of the ideal speed-up": round(ours.of_ideal(plain), 4) or None,
        "repeated 4-grams": round(ours.repeated, 4),
        "promise": ours.promise or None,
        "same tokens": ours.tokens == plain.tokens if ours.promise == "tokens" else None,
        "answers with the same tokens": _same(ours, plain),
    }
    for name, values in _latencies(ours).items():
        made[f"{name} ms"] = {f"p{p}": round(1e3 * x, 3) for p, x in zip(PERCENTILES, _percentiles(values))}
    return made


def requests(results: Sequence[Measured]) -> dict[str, dict[str, list[Any]]]:
    """Method -> column -> a value for every request, for JSON; the requests are the same for all methods.

    "steps": target forwards.  Times count from the submission of a batch, and are of the best run.
    """
    found, plain = dict[str, dict[str, list[Any]]](), results[0]
    for result in results:
        if result.stopped:
            continue
        kinds = [run.kind for run in result.runs for _ in run.answers]
        counts = [answer.speculation for answer in result.answers]
        times = [answer.token_times for answer in result.answers]
        found[result.method] = {
            "category": kinds,
            "tokens": list(map(len, result.tokens)),
            "same tokens": list(map(list.__eq__, result.tokens, plain.tokens)),
            "steps": [count.steps or None for count in counts],
            "drafted": [count.drafted for count in counts],
            "accepted": [count.accepted for count in counts],
            "first token ms": [round(1e3 * each[0], 3) if each else None for each in times],
            "last token ms": [round(1e3 * each[-1], 3) if each else None for each in times],
        }
    return found


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _latencies(result: Measured) -> dict[str, list[float]]:
    return {"first token": result.first_token, "stall": result.stalls, "per token": result.per_token}


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(x) for x in np.percentile(values, PERCENTILES)] if values else [0.0] * len(PERCENTILES)
