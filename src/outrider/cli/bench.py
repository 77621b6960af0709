"""`outrider bench`: measure methods against plain decoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from outrider.cli.arguments import one_of
from outrider.cli.flags import BUILTIN, OUT, Given, load, note, shared
from outrider.cli.speculation import parsed
from outrider.errors import ConfigError, saving, writing

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.bench.measure import Attempt, Measured, Prompts
    from outrider.bench.rounds import Rounds
    from outrider.core.params import SamplingParams
    from outrider.llm import LLM

MOST_NAMED = 20  # lines of the prompts that cannot be read
ALL_METHODS = "all"  # every demonstration on the built-in models
LOG = "Append the results as one line of JSON to this file; - is standard output."


File = Annotated[Path | None, typer.Argument(metavar="PROMPTS", help="The same as --prompts.")]
BatchSize = Annotated[int, Option("-b", "--batch-size", min=1, help="Requests in a batch.")]
AllTurns = Annotated[bool, Option("--all-turns", help="Ask all turns, not only the first.")]
Limit = Annotated[int | None, Option("--limit", min=1, help="Maximum prompts of each category.")]
Repeats = Annotated[
    int, Option("--repeats", min=1, help="Rounds of two runs each; methods alternate within a round.")
]
PeerTimeout = Annotated[
    float, Option("--peer-timeout", min=1.0, help="Seconds for a peer to load, and for each answer.")
]
Out = Annotated[str | None, Option(*OUT, "--json", help=LOG)]
Plot = Annotated[
    Path | None, Option("--plot", help="Draw the speed-ups by method and task: a .svg, .png or .pdf file.")
]


class Unread:
    """Prompts that cannot be read: named as they come, and counted."""

    count = 0

    def __call__(self, fault: str) -> None:
        self.count += 1
        if self.count <= MOST_NAMED:
            note(f"left out: {fault}")


class Found(NamedTuple):
    """Results of a measurement.

    short: groups of prompts left out, as their answers have one token.  interrupted: by Ctrl-C.
    """

    results: list[Measured]
    short: int
    interrupted: bool

    def about(self) -> dict[str, Any]:
        return {"left out, of one token": self.short, "interrupted": self.interrupted}


@shared
def bench(
    engine: Given,
    asked: Given,
    measured: Given,
    compared: Given,
    file: File = None,
    batch_size: BatchSize = 1,
    turns: AllTurns = False,
    limit: Limit = None,
    repeats: Repeats = 3,
    peer_timeout: PeerTimeout = 600.0,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Measure methods against plain decoding, by category, with the same prompts and seeds.

    Times include prefill, from an empty prefix cache.  The exit status is 1 if a method that promises the
    same tokens changed one.  Ctrl-C ends the measurement with the results so far, and status 130.
    """
    from rich.console import Console

    from outrider.bench.peers import Rival, running
    from outrider.bench.questions import prompts_for, read
    from outrider.bench.rounds import Rounds

    params = params_of(measured)
    file, raw = one_of("file of prompts", file, asked.get("file")), asked["raw"]
    draft, levels = compared.get("draft"), compared.get("levels")
    peers = [Rival.parse(text, engine["model"], draft) for text in compared.get("peers") or []]
    configs = configs_of(compared.get("methods"), compared.get("configs"), draft, levels, engine["model"])
    if plot is not None:
        _check_drawn(plot, len(configs) > 1 or bool(peers))
    sink, console, unread = opened(out), Console(stderr=out == "-"), Unread()
    questions = read(file, limit, raw, unread) if file else None
    llm = load(engine, max_num_seqs=batch_size)
    prompts, left_out = prompts_for(llm, questions, params, raw, turns)
    others = partial(running, peers, llm, params, levels or 5, peer_timeout)
    found = run(llm, configs, prompts, params, Rounds(repeats, batch_size), others, console)
    results = found.results
    show(results, left_out, found.short, unread.count, console)
    if sink:
        about = {"prompts": file and str(file), "left out": left_out, "left out, unread": unread.count}
        settings = {"batch size": batch_size, **measured, "repeats": repeats, "raw": raw}
        record(sink, llm, {**about, **found.about(), "settings": settings, "configs": configs}, results)
    if plot is not None and results[0].runs:
        draw(results, plot, f"{engine['model']}, batch {batch_size}, {described(params)}")
    if llm.engine.exact and any(result.differs(results[0]) for result in results):
        raise typer.Exit(1)
    if found.interrupted:
        raise typer.Exit(130)


def params_of(measured: Given) -> SamplingParams:
    """Raise ConfigError for answers of one token."""
    from outrider.core.params import SamplingParams

    if measured["max_tokens"] < 2:
        raise ConfigError("-n must be at least 2: the first token comes from prefill, whatever the method.")
    return SamplingParams(**measured)


def _check_drawn(plot: Path, methods: bool) -> None:
    """Raise ConfigError if the picture cannot be written, or there are no `methods` to draw."""
    from outrider.bench.plot import check_plot

    check_plot(plot)
    if not methods:
        raise ConfigError(
            "--plot needs a method to draw: give --method, --speculative-config, -md or --peer."
        )


def record(sink: IO[str], llm: LLM, about: dict[str, Any], results: Sequence[Measured]) -> None:
    from outrider.bench.conditions import conditions
    from outrider.bench.report import figures, requests

    ran = bool(results[0].runs)
    line = {"conditions": conditions(), "model": llm.engine.options.model, **about}
    line |= {"results": figures(results) if ran else {}, "requests": requests(results) if ran else {}}
    print_line(line, sink)


def print_line(value: Any, sink: IO[str]) -> None:
    """Write a line of JSON to a file of `opened`."""
    with writing("standard output" if sink is sys.stdout else sink.name):
        print(json.dumps(value, default=repr), file=sink, flush=True)


def configs_of(
    methods: Sequence[str] | None,
    configs: Sequence[str] | None,
    draft: str | None,
    depth: int | None,
    target: str = BUILTIN,
) -> dict[str, dict[str, Any] | None]:
    """Label -> speculative_config, plain decoding first.  Raises ConfigError before anything is loaded."""
    from outrider.bench.measure import PLAIN, demonstrations, demonstrations_for
    from outrider.checkpoints.hub import BUILTIN as SHIPPED
    from outrider.config import SpeculativeOptions
    from outrider.draft import names

    levels = {} if depth is None else {"num_speculative_tokens": depth}
    made: dict[str, dict[str, Any] | None] = {PLAIN: None}
    shown = {label: dict(config) for label, config in demonstrations().items() if config}
    for name in methods or ():
        if name == ALL_METHODS and target in SHIPPED:
            made |= shown
        elif name == ALL_METHODS:
            suited = demonstrations_for(draft)
            made |= {label: dict(config) for label, config in suited.items() if config}
            left = "; ".join(label for label in shown if label not in suited)
            note(f"left out, as their models were trained for the built-in target: {left}.")
        elif name in shown and name not in names():
            made[name] = {**shown[name], **levels}
        else:
            made[name] = {"method": name, **levels}
    if draft is not None:
        made["draft model"] = {"model": draft, **levels}
    for text in configs or ():
        label, _, rest = ("", "", text) if text.lstrip().startswith(("{", "@")) else text.partition("=")
        made[label or text] = parsed(rest)
    for given in made.values():
        SpeculativeOptions.of(given)
    return made


def run(
    llm: LLM,
    configs: dict[str, dict[str, Any] | None],
    prompts: Prompts,
    params: SamplingParams,
    rounds: Rounds,
    running: Callable[[], AbstractContextManager[dict[str, Attempt]]],
    console: Console,
) -> Found:
    """Measure, also other engines."""
    from outrider.bench.measure import grouped, too_short
    from outrider.bench.report import counted
    from outrider.bench.rounds import Interrupted, measure

    groups, interrupted = len(grouped(prompts, rounds.batch_size)), False
    with (
        running() as others,
        counted("Measuring", (len(configs) + len(others)) * groups * rounds.repeats, console) as tick,
    ):
        try:
            results = measure(llm, configs, prompts, params, rounds, tick, others)
        except Interrupted as error:
            results, interrupted = error.results, True
            console.print("Interrupted: these are the results so far.")
    short = too_short(results)
    return Found([result.without(short) for result in results], len(short), interrupted)


def show(results: Sequence[Measured], left_out: int, short: int, unread: int, console: Console) -> None:
    """Tables of the results, and what was left out of them."""
    kinds = results[0].kinds
    if kinds:
        _show_tables(results, console)
    if short:
        what = "Every answer has" if not kinds else f"Left out: {short} whose answers have"
        console.print(
            f"{what} one token, which comes from prefill: there is nothing to speed up. "
            "Use other prompts, or --ignore-eos."
        )
    if left_out:
        console.print(f"Left out, as prompt and answer exceed the context: {left_out}.")
    if unread:
        console.print(f"Left out, as they could not be read: {unread}.")


def _show_tables(results: Sequence[Measured], console: Console) -> None:
    """Speed-ups by category, all results from the fastest on, their latencies, and remarks."""
    from outrider.bench.report import latencies, matrix, remarks, table

    plain, *others = ran(results)
    others.sort(key=lambda other: other.speed_up(plain), reverse=True)
    ours = [plain, *(other for other in others if other.promise)]
    peers = [other for other in others if not other.promise]
    best_of: dict[str, Measured] = {}  # by engine, its fastest mode
    for peer in sorted(peers, key=lambda peer: peer.speed):
        best_of[peer.method.split()[0]] = peer
    if len(results[0].kinds) > 1 or peers:
        console.print(matrix(ours, [*best_of.values()]), "")
    stopped = [result for result in results if result.stopped]
    console.print(table(f"all {len(plain.answers)} prompts", [plain, *others, *stopped]), "")
    console.print(latencies([plain, *others]))
    for remark in remarks([plain, *others]):
        console.print(remark)


def ran(results: Sequence[Measured]) -> list[Measured]:
    """The results without the engines that were stopped."""
    return [result for result in results if not result.stopped]


def described(params: SamplingParams) -> str:
    """How the answers were sampled, for a title."""
    how = f"T = {params.temperature:g}, seed {params.seed}" if params.temperature else "greedy"
    return f"{how}, at most {params.max_tokens} tokens"


def draw(results: Sequence[Measured], out: Path, settings: str) -> None:
    """Write the speed-ups of our methods, and of other engines, as a picture."""
    from outrider.bench.conditions import conditions
    from outrider.bench.plot import speed_ups as panels
    from outrider.bench.report import speed_ups

    plain = results[0]
    rounds, prompts = len(plain.runs[0].turns), len(plain.answers)
    machine, spread = conditions(), "one round" if rounds == 1 else f"median and range of {rounds} rounds"
    title = (
        f"speed-up over {plain.method}, {prompts} prompts: {spread}\n"
        f"{settings}; {machine.get('gpu') or machine['cpu']}, {machine['threads']} threads\n"
        "blue: faster in every round; orange: slower; grey: neither"
    )
    panels(speed_ups(ran(results)), plain.tasks, title, out)


def opened(out: str | None) -> IO[str] | None:
    """The open file for the JSON, before anything is measured.

    Raises ConfigError if it cannot be written.
    """
    with saving("results", out):
        return None if out is None else sys.stdout if out == "-" else open(out, "a", encoding="utf-8")
