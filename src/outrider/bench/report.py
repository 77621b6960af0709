"""Tables and JSON of what was measured.  The first result is plain decoding, to which the others are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from outrider.bench.measure import Measured

PERCENTILES = (50, 95, 99)
ALL = "all"


def table(title: str, results: Sequence[Measured]) -> Table:
    """What speculation brought.  Tokens of another engine are not compared: its rounding differs."""
    plain = results[0]
    made = Table(title=title, title_justify="left", title_style="bold", show_edge=False)
    made.add_column("method")
    for name in ("tok/s", "speed-\nup", "tokens\n/ step", "accep-\ntance", "draft\ntime", "4-gram\nrepeats"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("same\ntok.", justify="center", no_wrap=True)
    for result in results:
        gain, total = result.speed / plain.speed, result.total
        made.add_row(
            result.method,
            f"{result.speed:.0f}",
            f"[{'green' if gain >= 1.005 else 'red' if gain < 0.97 else 'white'}]{gain:.2f}×[/]",
            f"{total.tokens_per_step:.2f}" if total.steps else "–",
            f"{total.acceptance:.0%}" if total.drafted else "–",
            f"{result.drafting:.0%}" if total.drafted else "–",
            f"{result.repeated:.0%}",
            _kept(result, plain),
        )
    return made


def _kept(result: Measured, plain: Measured) -> str:
    if result.promise == "tokens":
        return "[bold red]✗[/]" if result.differs(plain) else "[green]✓[/]"
    return {"law": "law", "lossy": "[bold red]lossy[/]"}.get(result.promise, "–")


def latencies(results: Sequence[Measured]) -> Table:
    made = Table(
        title="latency, p50 / p95 / p99 in milliseconds",
        title_justify="left",
        title_style="bold",
        show_edge=False,
    )
    made.add_column("method")
    for name in ("first token", "stall", "per token"):
        made.add_column(name, justify="right", no_wrap=True)
    for result in results:
        made.add_row(
            result.method,
            *(" / ".join(f"{1e3 * x:.3g}" for x in _percentiles(v)) for v in _latencies(result).values()),
        )
    return made


def figures(results: Sequence[Measured]) -> dict[str, Any]:
    """method -> category -> figures, for JSON; the category "all" is everything together."""
    return {
        result.method: {
            kind: _figures(
                result if kind == ALL else result.only(kind),
                results[0] if kind == ALL else results[0].only(kind),
            )
            for kind in (ALL, *result.kinds)
        }
        for result in results
    }


def _figures(ours: Measured, plain: Measured) -> dict[str, Any]:
    total = ours.total
    made: dict[str, Any] = {
        "requests": len(ours.answers),
        "tokens": sum(map(len, ours.tokens)),
        "tokens/s": round(ours.speed, 2),
        "speed-up": round(ours.speed / plain.speed, 4),
        "tokens per step": round(total.tokens_per_step, 4),
        "acceptance": round(total.acceptance, 4),
        "share of time drafting": round(ours.drafting, 4),
        "repeated 4-grams": round(ours.repeated, 4),
        "promise": ours.promise or None,
        "same tokens": ours.tokens == plain.tokens if ours.promise == "tokens" else None,
    }
    for name, values in _latencies(ours).items():
        made[f"{name} ms"] = {f"p{p}": round(1e3 * x, 3) for p, x in zip(PERCENTILES, _percentiles(values))}
    return made


def _latencies(result: Measured) -> dict[str, list[float]]:
    return {"first token": result.first_token, "stall": result.stalls, "per token": result.per_token}


def _percentiles(values: Sequence[float]) -> list[float]:
    return [float(x) for x in np.percentile(values, PERCENTILES)] if values else [0.0] * len(PERCENTILES)
