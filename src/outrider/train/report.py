"""A training run on the terminal, and its plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.plot import check_plot, lines
from outrider.errors import ConfigError
from outrider.train.answers import Text
from outrider.train.data import Source
from outrider.train.loop import Trainer

SHOWN = 5  # bad lines of a file that are named
SMOOTHED = 20  # steps whose mean loss is shown
POINTS = 100  # of the plotted loss, about


class Report:
    """Output of a run: what is printed and drawn, nothing without a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(quiet=True)
        self.found = ""  # by the last evaluation

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def sources(self, sources: Sequence[Source]) -> None:
        for source in sources:
            self.say(f"{source.path}: {source.lines - len(source.bad)} of {source.lines} lines")
            for bad in source.bad[:SHOWN]:
                self.say(f"  left out, {bad}", "yellow")
            if len(source.bad) > SHOWN:
                self.say(f"  and {len(source.bad) - SHOWN} more", "yellow")

    def failed(self, item: int, error: str) -> None:
        self.say(f"  no answer to text {item + 1}: {error}", "yellow")

    def empty(self, count: int, texts: int) -> None:
        if count:
            self.say(f"{count} of {texts} texts have no answer of the target and are left out", "yellow")

    @contextmanager
    def phase(self, what: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """A bar over texts.  Yields tick(texts, tokens)."""
        tokens = 0
        with self._bar() as bar:
            task = bar.add_task(what, total=total, found="")

            def tick(texts: int, more: int) -> None:
                nonlocal tokens
                tokens += more
                speed = tokens / (bar.tasks[0].elapsed or 1e9)
                bar.update(task, advance=texts, found=f"{speed:.0f} tokens/s" if tokens else "")

            yield tick

    def start(self, trainer: Trainer, texts: Sequence[Text], weights: int, resumed: bool) -> None:
        tokens = sum(len(texts[i].ids) - texts[i].prompt for i in trainer.chosen)
        after = f", going on after step {trainer.step}" if resumed else ""
        steps = "steps until the time is over" if trainer.steps is None else f"{trainer.steps} steps"
        self.say(
            f"{len(trainer.chosen)} texts with {tokens:,} answer tokens; {weights:,} weights; "
            f"{steps} at a rate of {trainer.method.rate:.2g}{after}"
        )

    @contextmanager
    def steps(self, trainer: Trainer) -> Iterator[Callable[[float], None]]:
        """A bar over steps.  Yields tick(loss)."""
        with self._bar() as bar:
            task = bar.add_task("Training", total=trainer.steps, completed=trainer.step, found="")

            def tick(loss: float) -> None:
                recent = trainer.losses[-SMOOTHED:]
                bar.update(task, advance=1, found=f"loss {sum(recent) / len(recent):.3f}{self.found}")

            yield tick

    def evaluated(self, record: dict[str, Any]) -> None:
        depths = " ".join(f"{share:.2f}" for share in record["by_depth"]) or "0.00"
        self.found = f", accepted {depths}, {record['tokens_per_step']:.2f} tokens/step"
        self.say(f"step {record['step']}: held-out loss {record['held_loss']:.3f}{self.found}")

    def finish(self, trainer: Trainer, finished: bool) -> None:
        """Print where the time went, and write the plot if matplotlib is there."""
        parts, out = trainer.seconds, trainer.options.out
        total = sum(parts.values())
        if total and trainer.tokens:
            shares = ", ".join(f"{what} {seconds / total:.0%}" for what, seconds in parts.items())
            busy = total - parts["evaluation"]
            self.say(f"{trainer.tokens / busy:,.0f} answer tokens/s in training; time: {shares}")
        elif finished:
            self.say(f"All {trainer.step} steps were already done: nothing was trained.")
        if not finished:
            all_steps = "" if trainer.steps is None else f" of {trainer.steps}"
            self.say(f"Stopped after step {trainer.step}{all_steps}: the same command goes on.")
        config = json.dumps(trainer.method.speculation(Path(out), trainer.options.depth))
        self.say(f"{out}: evaluated with --speculative-config '{config}'")
        if (adapter := trainer.method.adapter(Path(out))) is not None:
            self.say(
                f"for requests with the LoRA adapter {adapter.lora_path}: the target's texts have changed"
            )
        self._plot(trainer, Path(out).expanduser())

    def _plot(self, trainer: Trainer, folder: Path) -> None:
        """acceptance.png and loss.png."""
        if self.console.quiet:
            return
        try:
            check_plot(folder / "loss.png")
        except ConfigError as error:
            self.say(f"No plot: {error}")
            return
        wide = max(1, len(trainer.losses) // POINTS)
        parts = [trainer.losses[i : i + wide] for i in range(0, len(trainer.losses), wide)]
        means = [sum(part) / len(part) for part in parts]
        title = f"{len(trainer.losses)} steps"
        lines({"training": means}, f"mean of {wide} steps", "loss", title, folder / "loss.png")
        series = {"tokens per step": [record["tokens_per_step"] for record in trainer.records]}
        by_depth = zip_longest(*(record["by_depth"] for record in trainer.records), fillvalue=0.0)
        for depth, shares in enumerate(by_depth, 1):
            series[f"accepted at depth {depth}"] = list(shares)
        axis = f"evaluations, every {trainer.options.evaluate_every} steps"
        lines(series, axis, "", title, folder / "acceptance.png")

    def _bar(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        found = TextColumn("{task.fields[found]}")
        hidden = not self.console.is_terminal
        return Progress(*columns, found, console=self.console, transient=True, disable=hidden)
