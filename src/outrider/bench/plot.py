"""Plots of results, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.control.evidence import Moment
from outrider.errors import ConfigError


def check_plot(out: Path) -> None:
    """Raise ConfigError unless a plot can be written to `out`: before anything is measured."""
    _pyplot()
    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the plot {out.name!r}.")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib: install it with  pip install 'outrider[plot]'."
        ) from error
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def heat_map(
    rows: Mapping[str, Sequence[float | None]], columns: Sequence[str], title: str, out: Path
) -> None:
    """Speed-ups by method (rows) and task (columns), 1 in white."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(2.4 + 0.95 * len(columns), 1.2 + 0.3 * len(rows)))
    values = [[float("nan") if value is None else value for value in row] for row in rows.values()]
    most = max([2.0, *(value for row in values for value in row if value == value)])
    colours = plt.matplotlib.colors.TwoSlopeNorm(1.0, min(0.0, 2 - most), most)
    axes.imshow(values, cmap="RdYlGn", norm=colours, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            axes.text(x, y, "–" if value != value else f"{value:.2f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    _save(figure, axes, title, out)


def lines(series: Mapping[str, Sequence[float]], x: str, y: str, title: str, out: Path) -> None:
    """One line a name, over 0, 1, 2, …"""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for name, values in series.items():
        axes.plot(range(len(values)), values, marker="o", markersize=3, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    _save(figure, axes, title, out)


def reliability(points: Mapping[str, Sequence[tuple[float, float, int]]], title: str, out: Path) -> None:
    """Predicted (x) against observed probability (y); the area of a point is its number of observations.

    points: name -> (predicted, observed, observations).
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(4.4, 4.2))
    axes.plot([0, 1], [0, 1], color="#b8c4ce", linewidth=1)
    most = max([n for found in points.values() for *_, n in found], default=1)
    for name, found in points.items():
        predicted, observed, counts = zip(*found) if found else ((), (), ())
        areas = [12 + 150 * n / most for n in counts]
        axes.scatter(predicted, observed, s=areas, alpha=0.6, label=f"{name}, {sum(counts)} tokens")
    axes.set_xlabel("predicted probability")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False, fontsize=8)
    _save(figure, axes, title, out)


def choices(history: Sequence[Moment], title: str, out: Path) -> None:
    """What an adaptive controller chose over time: steps by drafters, gain, and the ledger of losses.

    history: of `llm.engine.controller.report()["history"]`.
    """
    if len(history) < 2:
        raise ConfigError("there is nothing to draw: few steps, or no adaptive controller.")
    plt = _pyplot()
    figure, (top, middle, bottom) = plt.subplots(3, sharex=True, figsize=(7, 6))
    spans = list(pairwise(history))
    at = [after.seconds for _, after in spans]
    names = list(history[-1].steps)
    counts = [
        [after.steps.get(name, 0) - before.steps.get(name, 0) for before, after in spans] for name in names
    ]
    totals = [max(1, sum(each)) for each in zip(*counts)]
    shares = [[count / total for count, total in zip(each, totals)] for each in counts]
    top.stackplot(at, shares, labels=names, step="pre")
    top.set_ylabel("share of steps")
    top.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    gains = [
        (after.plain_seconds - before.plain_seconds) / max(1e-9, after.seconds - before.seconds)
        for before, after in spans
    ]
    middle.step(at, gains, linewidth=1)
    middle.axhline(1, color="#b8c4ce", linewidth=1)
    middle.set_ylabel("plain time / time")
    bottom.step(at, [1e3 * after.loss for _, after in spans], label="loss")
    bottom.step(at, [1e3 * after.room for _, after in spans], label="may be lost")
    bottom.set_ylabel("ms")
    bottom.set_xlabel("seconds")
    bottom.legend(frameon=False, fontsize=7)
    _save(figure, top, title, out)


def _save(figure: Any, axes: Any, title: str, out: Path) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    figure.tight_layout()
    try:
        figure.savefig(out.expanduser(), dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {str(out)!r}: {error}") from error
    finally:
        _pyplot().close(figure)
