"""Estimates and rankings on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from outrider.bench.measure import PLAIN, Measured, Prompts
from outrider.bench.plot import lines
from outrider.bench.report import table
from outrider.bench.rounds import Rounds, measure
from outrider.bench.tables import Column, NamedRows
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.tune.estimate import Costs, Estimate
from outrider.tune.layerskip import Trial, Tuner
from outrider.tune.search import LEVEL, OFF, Outcome

BAR = 40  # blocks of the longest bar, fewer on a terminal of less than 111 columns
DROPPED = 20  # settings shown behind the finalists
CLOSE = 0.1  # a prediction may be off by this


def show_estimates(costs: Costs, found: Sequence[Estimate], console: Console) -> None:
    """The costs, a bar for each setting, and the best one."""
    depth = found[-1].depth
    console.print(
        f"A step takes {1e3 * costs.step:.2f} ms, one with {depth} draft tokens "
        f"{1e3 * (costs.step + costs.verify[1, depth]):.2f} ms; drafting {depth} takes "
        f"{1e3 * costs.propose[1, depth]:.2f} ms."
    )
    best = max(found, key=lambda one: one.speed)
    blocks = max(1, min(BAR, console.width - 71))
    for one in found:
        kind = "chain" if one.siblings == 1 else f"{one.siblings} siblings"
        name = "plain decoding" if one.depth == 0 else f"{kind}, depth {one.depth}"
        mark = "  ◀ best" if one is best else ""
        console.print(
            f"{name:20} {'▇' * round(blocks * one.speed / best.speed):{blocks}} {one.speed:7.1f} tokens/s  "
            f"{one.gain:.2f}×  {one.tokens_per_step:.2f} tokens/step{mark}",
            highlight=False,
            soft_wrap=True,
        )
    if best.depth == 0:
        console.print("Plain decoding is the fastest: this draft does not pay here.")


def draw_estimates(found: Sequence[Estimate], draft: str, out: Path) -> None:
    """Write tokens/s by depth as a picture, one line for each number of siblings."""
    plain, *others = found
    curves = {"chain": [plain.speed], "2 siblings": [plain.speed], "3 siblings": [plain.speed]}
    for one in others:
        curves["chain" if one.siblings == 1 else f"{one.siblings} siblings"].append(one.speed)
    lines(curves, "depth", "tokens/s", f"{draft}: predicted", out)


def check_estimate(
    llm: LLM, draft: str, best: Estimate, prompts: Prompts, params: SamplingParams, console: Console
) -> bool:
    """Measure the best draft and plain decoding in turns.  Whether the predicted speed-up was close."""
    configs = {PLAIN: None, "draft": best.config(draft)}
    plain, measured = measure(llm, configs, prompts, params, Rounds(3))
    gain = measured.speed_up(plain)
    off = best.gain / gain - 1
    console.print(
        f"Measured: {measured.speed:.1f} tokens/s, {gain:.2f}×, {measured.total.tokens_per_step:.2f} tokens "
        f"a step; the predicted {best.gain:.2f}× is off by {off:+.1%}.",
        soft_wrap=True,
    )
    return abs(off) <= CLOSE


def show_ranking(outcome: Outcome, out: Path, exact: bool, console: Console) -> None:
    """The ranking with confidence intervals, and what was written.  exact: whether tokens must be equal."""
    shown = [*outcome.ranking, *outcome.dropped[:DROPPED]]
    intervals = ["{:.2f} … {:.2f}".format(*one.interval) if one.interval else "–" for one in shown]
    columns = [
        Column("speed-up", [f"{one.gain:.2f}×" for one in shown]),
        Column(f"{LEVEL} % interval", intervals),
        Column("runs", [str(len(one.pairs)) for one in shown]),
    ]
    if outcome.interrupted:
        console.print(
            "Cut short by Ctrl-C: this is the ranking of what was measured until then.", style="bold"
        )
    console.print(NamedRows("", [one.label for one in shown], columns, what="setting"))
    if outcome.dropped and not outcome.interrupted:
        first = "The first is" if len(outcome.ranking) == 1 else f"The first {len(outcome.ranking)} are"
        console.print(f"{first} ranked by runs at the end, the others by those of the search.")
    if (others := len(outcome.dropped) - DROPPED) > 0:
        console.print(f"{others} others were slower.")
    for label, reason in outcome.refused.items():
        console.print(f"Left out: {label}: {reason}", style="dim", soft_wrap=True, markup=False)
    advice = "Let the search end." if outcome.interrupted else "Give more --minutes."
    if outcome.untried:
        why = "because of Ctrl-C" if outcome.interrupted else "for lack of time"
        console.print(f"Not tried {why}: {', '.join(outcome.untried)}. {advice}", markup=False)
    if outcome.changed:
        labels = "; ".join(one.label for one in outcome.changed)
        found = f"Other tokens than plain decoding, which is a bug: {labels}."
        console.print(found, style="bold red", markup=False)
    elif exact:
        console.print("Every setting emitted the tokens of plain decoding.")
    best = outcome.ranking[0]
    if outcome.config == OFF:
        console.print(
            f"Nothing was faster than plain decoding: {out} switches speculation off.",
            style="bold",
            markup=False,
        )
    elif best.interval is None or best.interval[0] <= 1:
        why = "its interval includes 1" if best.interval else "it has too few runs"
        console.print(
            f"{best.label} is not shown to be faster than plain decoding: {why}. {advice}",
            style="bold",
            markup=False,
        )
    console.print(f"{out}: use it with --speculative-config @{out}", soft_wrap=True, markup=False)


def show_layers(
    tuner: Tuner, best: Trial, results: Sequence[Measured], speed_up: float, out: Path, console: Console
) -> None:
    """Print the best set, its speed and whether it is faster than plain decoding."""
    costs = tuner.costs
    console.print(table(f"{len(tuner.prompts)} prompts, greedy", results), "")
    console.print(
        f"{len(tuner.trials)} sets tried.  A step takes {1e3 * costs.step:.2f} ms, {1e3 * costs.row:.2f} ms "
        f"more a draft token; drafting one with all layers {1e3 * costs.full:.2f} ms, less "
        f"{1e3 * costs.attention:.3f} ms for every attention and {1e3 * costs.mlp:.3f} ms for every MLP that "
        "is skipped."
    )
    console.print(
        f"Skipped: attention {list(best.skip.attention)}, MLP {list(best.skip.mlp)}; draft tokens per "
        f"step: {best.depth}."
    )
    if speed_up <= 1:
        console.print(
            f"This set is slower than plain decoding: {speed_up:.2f}×. {out} was written and says so; using "
            "it does not pay here. More --minutes or other --prompts may find a better one.",
            style="bold red",
        )
