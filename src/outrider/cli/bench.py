"""`outrider bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Option

from outrider.bench.conditions import conditions
from outrider.bench.measure import PLAIN, Measured, Prompts, grouped, measure
from outrider.bench.peers import measure_peer, peer
from outrider.bench.prompts import PROMPTS, rendered
from outrider.bench.questions import prompts_of, read
from outrider.bench.report import figures, latencies, table
from outrider.cli.flags import Given, load, parsed, shared
from outrider.config import SpeculativeOptions
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.sampling.params import SamplingParams


@shared
def bench(
    engine: Given,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="question.jsonl of Spec-Bench or MT-bench, or text with one prompt a line; without it our own."
        ),
    ] = None,
    method: Annotated[
        list[str] | None, Option("--method", help="Measure this method; may be given several times.")
    ] = None,
    config: Annotated[
        list[str] | None,
        Option("--speculative-config", help="Measure this JSON, or LABEL=JSON; may be given several times."),
    ] = None,
    draft: Annotated[
        str | None, Option("-md", "--model-draft", help="Measure this model as the draft.")
    ] = None,
    depth: Annotated[
        int | None, Option("--draft", "--draft-max", help="Tokens that --method and -md guess ahead.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        Option("--peer", help="Measure this engine too, one request at a time: transformers."),
    ] = None,
    batch_size: Annotated[int, Option("-b", "--batch-size", min=1, help="Requests at once.")] = 1,
    max_tokens: Annotated[
        int, Option("-n", "--max-tokens", min=1, help="New tokens a prompt, at most.")
    ] = 128,
    temperature: Annotated[float, Option("--temperature", "--temp", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, Option("--top-p", help="As in generate.")] = 1.0,
    seed: Annotated[int, Option("-s", "--seed", help="Of every request.")] = 7,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Always write all tokens.")] = False,
    turns: Annotated[
        bool, Option("--all-turns", help="Ask every turn, with the answers before it, not only the first.")
    ] = False,
    limit: Annotated[int | None, Option("--limit", min=1, help="Prompts of each category, at most.")] = None,
    repeats: Annotated[int, Option("--repeats", min=1, help="Best of so many turns, two runs each.")] = 1,
    out: Annotated[
        str | None, Option("--json", help="Append everything as one line to this file; - prints it.")
    ] = None,
) -> None:
    """Measure methods against plain decoding, by category, with the same prompts and seeds.

    Times include the prompts, from an empty prefix cache.  The status is 1 if a method changed a token that it promises to keep.
    """
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
    )
    for name in peers or []:
        peer(name)
    sink = opened(out)
    configs = configs_of(method or [], config or [], draft, depth)
    questions = read(file, limit) if file else None
    llm = load(engine, max_num_seqs=batch_size)
    prompts: Prompts = [(p.kind, rendered(p, llm.tokenizer)) for p in PROMPTS] if questions is None else []
    left_out = 0
    if questions is not None:
        prompts, left_out = prompts_of(llm, questions, params, turns)
    console = Console(stderr=out == "-")
    results = run(llm, configs, prompts, params, repeats, batch_size, peers or [], draft, depth or 5, console)
    show(results, left_out, console)
    if sink:
        found = {
            "conditions": conditions(), "model": llm.engine.options.model, "prompts": str(file) if file else None, "left out": left_out,
            "settings": {"batch size": batch_size, "max tokens": max_tokens, "temperature": temperature, "seed": seed, "repeats": repeats},
            "configs": configs, "results": figures(results),
        }  # fmt: skip
        print(json.dumps(found), file=sink, flush=True)
    if llm.engine.exact and any(result.differs(results[0]) for result in results):
        raise typer.Exit(1)


def configs_of(
    methods: Sequence[str], configs: Sequence[str], draft: str | None, depth: int | None
) -> dict[str, dict[str, Any] | None]:
    """Label -> speculative_config, plain decoding first; each is checked before anything is loaded."""
    levels = {} if depth is None else {"num_speculative_tokens": depth}
    made: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for name in methods:
        made[name] = {"method": name, **levels}
    if draft is not None:
        made["draft model"] = {"model": draft, **levels}
    for text in configs:
        label, _, rest = ("", "", text) if text.lstrip().startswith("{") else text.partition("=")
        made[label or text] = parsed(rest)
    for given in made.values():
        SpeculativeOptions.of(given)
    return made


def run(
    llm: LLM,
    configs: dict[str, dict[str, Any] | None],
    prompts: Prompts,
    params: SamplingParams,
    repeats: int,
    batch_size: int,
    peers: Sequence[str],
    draft: str | None,
    depth: int,
    console: Console,
) -> list[Measured]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Measuring", total=len(configs) * len(grouped(prompts, batch_size)) * repeats)

        def tick(label: str) -> None:
            bar.update(task, advance=1, description=label)

        results = measure(llm, configs, prompts, params, repeats, tick, batch_size)
        for name in peers:
            task = bar.add_task(name, total=None)
            results += measure_peer(name, llm, prompts, params, draft, depth, repeats, tick)
    return results


def show(results: Sequence[Measured], left_out: int, console: Console) -> None:
    kinds = results[0].kinds
    for kind in kinds if len(kinds) > 1 else ():
        console.print(table(kind, [result.only(kind) for result in results]), "")
    console.print(table(f"all {len(results[0].answers)} prompts", results), "")
    console.print(latencies(results))
    if left_out:
        console.print(f"Left out, as they and their answers exceed the context: {left_out}.")


def opened(out: str | None) -> IO[str] | None:
    """Where the JSON goes: a file that cannot be written is found before anything is measured."""
    try:
        return None if out is None else sys.stdout if out == "-" else open(out, "a")
    except OSError as error:
        raise ConfigError(f"the figures cannot be written to {out!r}: {error}") from error
