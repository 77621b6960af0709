"""Plots of results, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from outrider.control.ledger import Moment
from outrider.errors import ConfigError, check_writable, saving

FORMATS = (".png", ".svg", ".pdf")
BLUE, RED, GREY = "#0072b2", "#d55e00", "#7a7a7a"  # Okabe and Ito: safe for colour-blind readers
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
    check_writable(out, "plot")


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

    def last_median(name: str) -> float:
        last = methods[name][-1]
        return 0.0 if last is None else last.median

    order = sorted(methods, key=last_median, reverse=True)
    size = (max(6.0, 2.2 + 1.4 * len(tasks)), 1.4 + 0.25 * len(order))
    figure, panels = row_of_panels(len(tasks), size)
    for i, (task, axes) in enumerate(zip(tasks, panels)):
        axes.set(xscale="log", axisbelow=True)
        axes.set_title(task, fontsize=9)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.tick_params(labelsize=8, length=0)
        for y, name in enumerate(order):
            if (gain := methods[name][i]) is not None:
                _draw_gain(axes, y, gain)
    axes = panels[-1]
    for y, name in enumerate(order):
        last = methods[name][-1]
        text = "–" if last is None else f"{last.median:.2f}×"
        axes.text(1.04, y, text, fontsize=8, va="center", transform=axes.get_yaxis_transform())
    low, high = axes.get_xlim()
    near = NEAR_TICKS if low >= 0.5 and high <= 3 else TICKS
    ticks = [x for x in near if min(low, 0.7) <= x <= max(high, 1.5)]
    axes.set(xlim=(min(low, ticks[0]), max(high, ticks[-1])), ylim=(len(order) - 0.5, -0.5))
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(order)), order)
    save(figure, title, out)


def row_of_panels(count: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """A figure and its axes, side by side.  size: in inches."""
    figure, panels = pyplot().subplots(
        1, count, sharex=True, sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    return figure, panels[0]


def _draw_gain(axes: Any, y: int, gain: Gain) -> None:
    """A line from the least to the most speed-up, and a mark at the median."""
    if gain.low <= 1 <= gain.high:
        colour = GREY
    else:
        colour = BLUE if gain.low > 1 else RED
    marker = "o" if gain.median >= 1 else "v"
    axes.plot((gain.low, gain.high), (y, y), color=colour, linewidth=2)
    axes.plot(gain.median, y, marker, color=colour, markersize=4.5)


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


def choices(history: Sequence[Moment], title: str, out: Path) -> None:
    """Choices of an adaptive controller over time: steps by drafters, gain, and the ledger of losses.

    history: of `llm.engine.report()["history"]`.
    """
    if len(history) < 2:
        raise ConfigError("there is nothing to draw: few steps, or no adaptive controller.")
    plt = pyplot()
    figure, (top, middle, bottom) = plt.subplots(3, sharex=True, figsize=(7, 6), layout="constrained")
    gains = list[float]()
    shares: dict[str, list[float]] = {name: [] for name in history[-1].steps}  # of the steps of each span
    for before, after in pairwise(history):
        seconds = max(1e-9, after.seconds - before.seconds)
        gains.append((after.plain_seconds - before.plain_seconds) / seconds)
        counts = {name: after.steps.get(name, 0) - before.steps.get(name, 0) for name in shares}
        total = max(1, sum(counts.values()))
        for name, count in counts.items():
            shares[name].append(count / total)
    at = [moment.seconds for moment in history[1:]]
    top.stackplot(at, list(shares.values()), labels=list(shares), step="pre")
    top.set_ylabel("share of steps")
    top.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    middle.step(at, gains, linewidth=1)
    middle.axhline(1, color="#b8c4ce", linewidth=1)
    middle.set_ylabel("plain time / time")
    bottom.step(at, [1e3 * moment.loss for moment in history[1:]], label="loss")
    bottom.step(at, [1e3 * moment.room for moment in history[1:]], label="may be lost")
    bottom.set_ylabel("ms")
    bottom.set_xlabel("seconds")
    bottom.legend(frameon=False, fontsize=7)
    save(figure, title, out)


def save(figure: Any, title: str, out: Path) -> None:
    """Write a figure, with its title, in the form that the name of the file ends in."""
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    metadata = {"Date": None} if out.suffix.lower() == ".svg" else None  # the same file every day
    try:
        with saving("plot", out, ValueError):
            figure.savefig(out.expanduser(), dpi=150, metadata=metadata)
    finally:
        pyplot().close(figure)
