"""Figures of spec_bench.py: speeds by kind of question, without the requests that loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.measure import PLAIN, Measured

LOOPS = 0.3
# ---- figures


def part(result: Measured, indices: Iterable[int]) -> Measured:
    return Measured(result.method, [result.runs[i] for i in indices], result.promise)


def decoding(result: Measured) -> float:
    """New tokens a second after those of the first step."""
    times = [
        answer.token_times
        for answer in result.answers
        if answer.token_times and answer.token_times[-1] > answer.token_times[0]
    ]
    return sum(len(t) - t.count(t[0]) for t in times) / (sum(t[-1] - t[0] for t in times) or 1)


def figure(result: Measured, plain: Measured) -> dict[str, Any]:
    total = result.total
    return {
        "requests": len(result.runs),
        "tokens": sum(map(len, result.tokens)),
        "tokens/s": round(result.speed, 1),
        "speed-up": round(result.speed / plain.speed, 3),
        "decode tokens/s": round(decoding(result), 1),
        "decode speed-up": round(decoding(result) / decoding(plain), 3) if decoding(plain) else None,
        "tokens per step": round(total.tokens_per_step, 3) if total.steps else None,
        "acceptance": round(total.acceptance, 3) if total.drafted else None,
        "share of time drafting": round(result.drafting, 3) if total.drafted and result.promise else None,
        "repeated 4-grams": round(result.repeated, 3),
        "same tokens": result.tokens == plain.tokens if result.promise == "tokens" else None,
        "promise": result.promise,
    }


def looping(plain: Measured) -> set[int]:
    """Indices of the requests whose plain answers loop."""
    return {i for i in range(len(plain.runs)) if part(plain, [i]).repeated >= LOOPS}


def figures(results: list[Measured]) -> dict[str, dict[str, Any]]:
    """method -> "no loops", "all" and every kind -> figures.  The first result is our plain decoding."""
    plain, loops = results[0], looping(results[0])
    parts: dict[str, list[int]] = {
        "no loops": [i for i in range(len(plain.runs)) if i not in loops],
        "all": list(range(len(plain.runs))),
    }
    for kind in plain.kinds:
        parts[kind] = [i for i in parts["all"] if plain.runs[i].kind == kind]
    return {
        r.method: {name: figure(part(r, where), part(plain, where)) for name, where in parts.items() if where}
        for r in results
    }


def shown_as(value: float) -> str:
    """A speed-up, red where it is none."""
    color = "green" if value >= 1.005 else "red" if value < 0.995 else "white"
    return f"[{color}]{value:.2f}[/]{'' if value >= 0.995 else ' slower'}"


def headline(title: str, made: dict[str, dict[str, Any]], console: Console) -> None:
    """Figures over the requests that do not loop, or all where all do."""
    key = "no loops" if "no loops" in made[PLAIN] else "all"
    rest = made[PLAIN]["all"]["requests"] - made[PLAIN][key]["requests"]
    table = Table(
        "method", "tok/s", "speed-up", "decode\ntok/s", "decode\nspeed-up", "tokens\n/ step", "accep-\ntance",
        "draft\ntime",
        "4-gram\nrepeats", "same\ntok.", title_justify="left",
        title=f"{title}: {made[PLAIN][key]['requests']} requests, {rest} that loop left out; "
        "speed-up over our plain decoding",
    )  # fmt: skip

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    for method, parts in made.items():
        f = parts[key]
        table.add_row(
            method, f"{f['tokens/s']:.0f}", shown_as(f["speed-up"]), f"{f['decode tokens/s']:.0f}",
            shown_as(f["decode speed-up"]),
            "–" if f["tokens per step"] is None else f"{f['tokens per step']:.2f}", percent(f["acceptance"]),
            percent(f["share of time drafting"]), percent(f["repeated 4-grams"]),
            {None: f["promise"] or "–", True: "[green]✓[/]", False: "[bold red]✗[/]"}[f["same tokens"]],
        )  # fmt: skip
    console.print(table)


def by_kind(title: str, made: dict[str, dict[str, Any]], console: Console) -> None:
    kinds = [kind for kind in made[PLAIN] if kind != "no loops"]
    table = Table(
        "method",
        *kinds,
        title=f"{title}, by kind: speed-up (tokens per step), loops included",
        title_justify="left",
    )
    for method, parts in made.items():
        cells = (
            shown_as(f["speed-up"]) + (f" ({f['tokens per step']:.2f})" if f["tokens per step"] else "")
            for f in (parts[k] for k in kinds)
        )
        table.add_row(method, *cells)
    table.add_row("4-gram repeats", *(f"{made[PLAIN][kind]['repeated 4-grams']:.0%}" for kind in kinds))
    console.print(table)
