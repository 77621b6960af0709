"""Figures of spec_bench.py: speeds by kind of question, without the requests that loop.

    python benchmarks/spec_figures.py RESULT.json [--plot OUT.svg] [--document FILE.md]

prints a table in Markdown for every model, and draws the decode tokens/s of the first one.  In a document
each table replaces the text between <!-- MODEL --> and <!-- end -->; the table with other engines replaces
that after <!-- MODEL, engines -->.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.measure import PLAIN, Measured
from outrider.bench.plot import BLUE, GREY, pyplot, save

LOOPS = 0.3
# "no loops", "all" or a kind of question -> figures of a method; {"all": {"stopped": why}} without any
Parts = dict[str, dict[str, Any]]


# ---- figures


def part(result: Measured, indices: Iterable[int]) -> Measured:
    return replace(result, runs=[result.runs[i] for i in indices])


def decoding(result: Measured) -> float:
    """New tokens a second after those of the first step."""
    times = [
        answer.token_times
        for answer in result.answers
        if answer.token_times and answer.token_times[-1] > answer.token_times[0]
    ]
    return sum(len(t) - t.count(t[0]) for t in times) / (sum(t[-1] - t[0] for t in times) or 1)


def drafting_seconds(result: Measured) -> float:
    return sum(run.times.propose for run in result.runs)


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
        "acceptance by depth": [round(n / total.drafts, 3) for n in total.accepted_at] or None,
        "share of time drafting": round(result.drafting, 3) if total.drafted and result.promise else None,
        "ms drafting a step": round(1e3 * drafting_seconds(result) / total.steps, 3) if total.steps else None,
        "repeated 4-grams": round(result.repeated, 3),
        "same tokens": result.tokens == plain.tokens if result.promise == "tokens" else None,
        "answers with the same tokens": sum(map(list.__eq__, result.tokens, plain.tokens)),
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
        r.method: {"all": {"stopped": r.stopped}}
        if r.stopped
        else {name: figure(part(r, where), part(plain, where)) for name, where in parts.items() if where}
        for r in results
    }


def ran(made: dict[str, Parts]) -> dict[str, Parts]:
    """Without the engines that were stopped."""
    return {method: parts for method, parts in made.items() if "stopped" not in parts["all"]}


def best_part(made: dict[str, Parts]) -> str:
    """The requests that do not loop, or all where all do."""
    return "no loops" if "no loops" in made[PLAIN] else "all"


def shown_as(value: float) -> str:
    """A speed-up, red where it is none."""
    color = "green" if value >= 1.005 else "red" if value < 0.995 else "white"
    return f"[{color}]{value:.2f}[/]{'' if value >= 0.995 else ' slower'}"


def headline(title: str, made: dict[str, dict[str, Any]], console: Console) -> None:
    """Figures over the requests that do not loop, or all where all do."""
    key = best_part(made)
    rest = made[PLAIN]["all"]["requests"] - made[PLAIN][key]["requests"]
    table = Table(
        "method",
        "tok/s",
        "speed-up",
        "decode\ntok/s",
        "decode\nspeed-up",
        "tokens\n/ step",
        "accep-\ntance",
        "draft\ntime",
        "4-gram\nrepeats",
        "same\ntok.",
        title_justify="left",
        title=f"{title}: {made[PLAIN][key]['requests']} requests, {rest} that loop left out; "
        "speed-up over our plain decoding",
    )

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    for method, parts in made.items():
        if "stopped" in parts["all"]:
            table.add_row(method, parts["all"]["stopped"])
            continue
        f = parts[key]
        table.add_row(
            method,
            f"{f['tokens/s']:.0f}",
            shown_as(f["speed-up"]),
            f"{f['decode tokens/s']:.0f}",
            shown_as(f["decode speed-up"]),
            "–" if f["tokens per step"] is None else f"{f['tokens per step']:.2f}",
            percent(f["acceptance"]),
            percent(f["share of time drafting"]),
            percent(f["repeated 4-grams"]),
            {None: f["promise"] or "–", True: "[green]✓[/]", False: "[bold red]✗[/]"}[f["same tokens"]],
        )
    console.print(table)


def by_kind(title: str, made: dict[str, dict[str, Any]], console: Console) -> None:
    kinds = [kind for kind in made[PLAIN] if kind != "no loops"]
    table = Table(
        "method",
        *kinds,
        title=f"{title}, by kind: speed-up (tokens per step), loops included",
        title_justify="left",
    )
    for method, parts in ran(made).items():
        cells = (
            shown_as(f["speed-up"]) + (f" ({f['tokens per step']:.2f})" if f["tokens per step"] else "")
            for f in (parts[k] for k in kinds)
        )
        table.add_row(method, *cells)
    table.add_row("4-gram repeats", *(f"{made[PLAIN][kind]['repeated 4-grams']:.0%}" for kind in kinds))
    console.print(table)


# ---- documents


def markdown(result: dict[str, Any]) -> dict[str, str]:
    """Place in a document -> a table: decode tokens/s, speed-up and tokens per step in each setting."""
    made, about = {}, result["conditions"]
    for model, found in result["models"].items():
        settings = {title: methods for title, methods in found.items() if isinstance(methods, dict)}
        first = ran(next(iter(settings.values())))
        rest = [f"{title} {_counted(methods)}" for title, methods in settings.items()]
        columns = " | ".join(f"{title}: tokens/s | speed-up | tokens per step" for title in settings)
        lines = [
            f"{about['date']}, {about['cpu']}, {about['cores']} cores, commit {about['commit']};",
            f"requests: {', '.join(rest)}. One draft forward takes",
            f"{found['draft forward / target forward']:.2f} of a target forward.",
            "",
            f"| | {columns} |",
            "|---" * (1 + 3 * len(settings)) + "|",
        ]
        for method in sorted(first, key=lambda name: -first[name][best_part(first)]["decode tokens/s"]):
            cells = [cell for methods in settings.values() for cell in _cells(methods, method)]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        engines = any(not parts["all"]["promise"] for parts in first.values())
        made[f"{model}, engines" if engines else model] = "\n".join(lines)
    return made


def _counted(made: dict[str, Parts]) -> str:
    plain = made[PLAIN]
    return f"{plain[best_part(made)]['requests']} of {plain['all']['requests']}"


def filled(document: str, tables: dict[str, str]) -> str:
    """A document with these tables in their places.  Raises ValueError if one has none."""
    for place, table in tables.items():
        before, found, after = document.partition(f"<!-- {place} -->\n")
        _, end, rest = after.partition("<!-- end -->")
        if not (found and end):
            raise ValueError(f"the document has no <!-- {place} --> … <!-- end -->.")
        document = f"{before}{found}{table}\n{end}{rest}"
    return document


def _cells(made: dict[str, Parts], method: str) -> list[str]:
    if method not in ran(made):
        return ["–"] * 3
    one = made[method][best_part(made)]
    known = (one["decode speed-up"], "{:.2f}×"), (one["tokens per step"], "{:.2f}")
    return [f"{one['decode tokens/s']:.0f}", *(form.format(x) if x else "–" for x, form in known)]


def draw(result: dict[str, Any], out: Path) -> None:
    """Decode tokens/s of every method and engine of the first model, a panel for each setting."""
    model, found = next(iter(result["models"].items()))
    settings = {title: ran(made) for title, made in found.items() if isinstance(made, dict)}
    first = next(iter(settings.values()))
    order = sorted(first, key=lambda m: -first[m][best_part(first)]["decode tokens/s"])
    size = (3.8 + 2.6 * len(settings), 1.2 + 0.24 * len(order))
    figure, panels = pyplot().subplots(
        1, len(settings), sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axes, (title, made) in zip(panels[0], settings.items()):
        rows = [made.get(method, {}).get(best_part(made), {}) for method in order]
        speeds = [row.get("decode tokens/s", 0.0) for row in rows]
        axes.barh(range(len(order)), speeds, color=[BLUE if row.get("promise") else GREY for row in rows])
        for y, speed in enumerate(speeds):
            axes.text(speed, y, f" {speed:.0f}", va="center", fontsize=7)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("decode tokens/s", fontsize=8)
        axes.tick_params(labelsize=8)
    panels[0][0].set_yticks(range(len(order)), order)
    panels[0][0].invert_yaxis()
    about = result["conditions"]
    save(figure, f"{model}, batch 1, {about['cores']} cores of {about['cpu']} ({about['date']})", out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--document", type=Path)
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    tables = markdown(result)
    print("\n\n".join(tables.values()))
    if given.document:
        given.document.write_text(filled(given.document.read_text(), tables))
    if given.plot:
        draw(result, given.plot)


if __name__ == "__main__":
    main()
