"""`outrider demo`: the built-in model with plain decoding and with every method, compared in a table."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.bench.measure import Configs, Measured, Prompts, demonstrations, measure
from outrider.bench.prompts import PROMPTS, rendered
from outrider.bench.report import table
from outrider.core.params import SamplingParams
from outrider.llm import LLM

SETTINGS = (("greedy", {"temperature": 0.0}), ("T = 0.8, top_p 0.95", {"temperature": 0.8, "top_p": 0.95}))


def demo(tokens: int, repeats: int, console: Console) -> bool:
    """Run the demo and print its tables.  True if every method emitted the tokens of plain decoding."""
    with console.status("Loading the built-in model"):
        llm = LLM(model="builtin")
    prompts = [(prompt.kind, rendered(prompt, llm.tokenizer)) for prompt in PROMPTS]
    configs = demonstrations()
    console.print(
        f"[bold]Outrider[/] on {llm.engine.decoder.backend.name}; {len(prompts)} prompts, "
        f"at most {tokens} new tokens each."
    )
    _show_answers(llm, prompts, console)
    good = True
    for title, sampling in SETTINGS:
        params = SamplingParams(max_tokens=tokens, seed=7, **sampling)
        results = _measured(llm, configs, prompts, params, repeats, title, console)
        console.print(table(title, results))
        good &= not any(result.differs(results[0]) for result in results)
    console.print(
        "Every method emitted the same tokens as plain decoding."
        if good
        else "[bold red]Tokens differ: this is a bug.[/]"
    )
    return good


def _measured(
    llm: LLM,
    configs: Configs,
    prompts: Prompts,
    params: SamplingParams,
    repeats: int,
    title: str,
    console: Console,
) -> list[Measured]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=len(configs) * len(prompts) * repeats)
        return measure(
            llm,
            configs,
            prompts,
            params,
            repeats,
            lambda label: bar.update(task, advance=1, description=f"{title}: {label}"),
        )


def _show_answers(llm: LLM, prompts: Prompts, console: Console) -> None:
    """Print a few answers."""
    chosen = [2, 8, 12]
    outputs = llm.generate([prompts[i][1] for i in chosen], SamplingParams(temperature=0, max_tokens=40))
    for i, output in zip(chosen, outputs):
        question = PROMPTS[i].turns[-1]
        console.print(
            f"[dim]{question}[/]\n  {output.outputs[0].text.strip()}",
            markup=True,
            highlight=False,
            soft_wrap=True,
        )
