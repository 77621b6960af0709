"""Plots of results, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from outrider.control.evidence import Moment
from outrider.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
BLUE, RED, GREY = "#0072b2", "#d55e00", "#7a7a7a"  # of Okabe and Ito, whom colour-blind readers can follow
FEWEST = 10  # observations of a point that is drawn
Point = tuple[float, float, int]  # predicted, observed, number of observations
TICKS, NEAR_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20), (0.5, 0.7, 1, 1.5, 2, 3)


class Gain(NamedTuple):
    """Speed-up over plain decoding in the median of the repeats, the least and the most of one."""

    median: float
    low: float
    high: float


def check_plot(out: Path) -> None:
    """Raise ConfigError unless a plot can be written to `out`: before anything is measured."""
    pyplot()
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"the plot {out.name!r} must end in one of {', '.join(FORMATS)}.")
    if not out.expanduser().parent.is_dir():
        raise ConfigError(f"there is no folder {str(out.parent)!r} for the plot {out.name!r}.")


def pyplot() -> Any:
    """Matplotlib's pyplot.  Raises ConfigError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "a plot needs matplotlib: install it with  pip install 'outrider[plot]'."
        ) from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "outrider"  # the same file for the same figures
    import matplotlib.pyplot as plt

    return plt


def speed_ups(
    methods: Mapping[str, Sequence[Gain | None]], tasks: Sequence[str], title: str, out: Path
) -> None:
    """Speed-ups, a panel for each task and a row for each method: medians with the range of the repeats.

    methods: name -> its gain in each task; an impossible one (None) is not drawn.  Rows are sorted by the
    last task, whose medians are written out.  Grey ones are not shown to differ from 1.
    """
    order = sorted(methods, key=lambda name: -(gain.median if (gain := methods[name][-1]) else 0.0))
    size = (max(6.0, 2.2 + 1.4 * len(tasks)), 1.4 + 0.25 * len(order))
    figure, panels = pyplot().subplots(
        1, len(tasks), sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for task, axes, gains in zip(tasks, panels[0], zip(*(methods[name] for name in order))):
        axes.set(xscale="log", axisbelow=True)
        axes.set_title(task, fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.tick_params(labelsize=8, length=0)
        for y, gain in enumerate(gains):
            if gain is not None:
                colour = GREY if gain.low <= 1 <= gain.high else BLUE if gain.low > 1 else RED
                axes.plot((gain.low, gain.high), (y, y), color=colour, linewidth=2)
                axes.plot(gain.median, y, "ov"[gain.median < 1], color=colour, markersize=4.5)
    for y, gain in enumerate(gains):
        text = f"{gain.median:.2f}×" if gain is not None else "–"
        axes.text(1.04, y, text, fontsize=8, va="center", transform=axes.get_yaxis_transform())
    low, high = axes.get_xlim()
    near = NEAR_TICKS if low >= 0.5 and high <= 3 else TICKS
    ticks = [x for x in near if min(low, 0.7) <= x <= max(high, 1.5)]
    axes.set(xlim=(min(low, ticks[0]), max(high, ticks[-1])), ylim=(len(order) - 0.5, -0.5))
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(order)), order)
    save(figure, title, out)


def lines(series: Mapping[str, Sequence[float]], x: str, y: str, title: str, out: Path) -> None:
    """One line a name, over 0, 1, 2, …"""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for name, values in series.items():
        axes.plot(range(len(values)), values, marker="o", markersize=3, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
    save(figure, title, out)


def reliability(panels: Mapping[str, Mapping[str, Sequence[Point]]], title: str, out: Path) -> None:
    """Predicted (x) against observed probability (y) with 95 % intervals, a panel for each drafter.

    panels: drafter -> predictor -> points, of which those with few observations are left out.  The bars below
    are the numbers of observations of the first predictor.
    """
    size = (0.6 + 2.7 * len(panels), 3.5)
    figure, grid = pyplot().subplots(
        1, len(panels), sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axes, (drafter, predictors) in zip(grid[0], panels.items()):
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
        for points, name, colour, marker in zip(predictors.values(), predictors, (BLUE, RED), "os"):
            if not (known := [point for point in points if point[2] >= FEWEST]):
                continue
            predicted, observed, counts = zip(*known)
            spread = [1.96 * (p * (1 - p) / n + 1 / n**2) ** 0.5 for p, n in zip(observed, counts)]
            axes.errorbar(predicted, observed, spread, fmt=marker, color=colour, markersize=4, label=name)
            if colour == BLUE:
                axes.bar(predicted, [0.2 * n / max(counts) for n in counts], 0.06, color="#d4dde4")
        axes.set_title(drafter, fontsize=9)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability", aspect="equal")
        axes.legend(frameon=False, fontsize=7, loc="upper left")
    grid[0][0].set_ylabel("share accepted")
    save(figure, title, out)


def choices(history: Sequence[Moment], title: str, out: Path) -> None:
    """What an adaptive controller chose over time: steps by drafters, gain, and the ledger of losses.

    history: of `llm.engine.report()["history"]`.
    """
    if len(history) < 2:
        raise ConfigError("there is nothing to draw: few steps, or no adaptive controller.")
    plt = pyplot()
    figure, (top, middle, bottom) = plt.subplots(3, sharex=True, figsize=(7, 6), layout="constrained")
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
    save(figure, title, out)


def save(figure: Any, title: str, out: Path) -> None:
    """Write a figure, with its title, in the form that the name of the file ends in."""
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    try:
        figure.savefig(out.expanduser(), dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {str(out)!r}: {error}") from error
    finally:
        pyplot().close(figure)
