"""`outrider train METHOD`: a draft head, or a draft model, for a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from outrider.cli.arguments import check_folder, named
from outrider.cli.flag import Flag
from outrider.cli.flags import GROUPS, OUT, SEED, Given, checkpoint_of, load, shared
from outrider.cli.speculation import parsed

GROUPS["training"] = (
    (
        Flag("steps", int, "--steps", "Optimizer steps; default: --epochs."),
        Flag("epochs", float, "--epochs", "Passes over the texts; default: 3."),
        Flag("batch", int, "--batch", "Texts of a step; default: 8."),
        Flag("rate", float, "--rate", "Peak learning rate; default: the published one for this width."),
        Flag("dtype", str, "--dtype-train", "float32 or bfloat16, of the forward in training."),
        Flag("length", int, "--length", "Most tokens of a text; default: 1024."),
        Flag("answer_tokens", int, "--answer-tokens", "Most tokens of a regenerated answer; default: 256."),
        Flag("temperatures", list[float], "--temp --temperature", "Of answers, in turn; default: 0, 0.8."),
        Flag("limit", int, "--limit", "Number of texts."),
        Flag("seed", int, " ".join(SEED), "Seed of weights, order and answers; default: 0."),
        Flag("minutes", float, "--minutes", "End after this time; the same command goes on."),
        Flag("init", str, "--init", "Folder of an earlier head to start from."),
        Flag("cache", str, "--cache", "Folder of answers and features; default: in --out."),
        Flag("cache_gb", float, "--cache-gb", "Most gigabytes of features; default: 8."),
        Flag("quantization", str, "--quantization-draft", "Quantize the trained weights: int8 or int4."),
        Flag("format", str, "--format", "Published layout to write: vllm, sglang … as the method has."),
    ),
    "Training",
)  # fmt: skip


@shared
def train(
    engine: Given,
    training: Given,
    method: Annotated[str, typer.Argument(metavar="METHOD", help="eagle, eagle3, medusa, draft_model …")],
    data: Annotated[list[Path], Option("--data", help="Texts: .jsonl or .txt; may be given several times.")],
    out: Annotated[Path, Option(*OUT, help="Folder of the trained weights.")],
    target: Annotated[str | None, Option("--target", help="The same as -m.")] = None,
    regenerate: Annotated[
        bool | None,
        Option("--regenerate/--no-regenerate", help="Replace the answers by the target's own; the default."),
    ] = None,
    options: Annotated[str, Option("--options", help="Further options as JSON or @FILE.")] = "{}",
    estimate: Annotated[bool, Option("--estimate", help="Tell time and size, and end.")] = False,
) -> None:
    """Train a draft head, or a small draft model, on the target's own answers."""
    from outrider.config import options as checked
    from outrider.train import estimate as estimates
    from outrider.train import methods, run
    from outrider.train.processes import Processes
    from outrider.train.report import Report

    kind = methods.method(method)  # before anything slow
    given: dict[str, Any] = {**parsed(options, "--options"), **training}
    given |= {"data": [str(path) for path in data], "out": str(out)}
    if regenerate is not None:
        given["regenerate"] = regenerate
    settings = checked(kind.Options, given, "training option")
    check_folder(out, "trained weights")
    processes = Processes.joined()  # chooses the device, so before the model is there
    console = Console(quiet=not processes.first)
    engine = named(engine, target)
    context = checkpoint_of(engine).spec.context
    room = engine.get("max_model_len") or min(settings.length, context)  # K/V memory for texts of a run only
    given = {**settings.engine, **engine, "max_model_len": room}
    report = Report(console)
    try:
        llm = load(given, max_num_seqs=32)
        if estimate:
            found = estimates.estimate(llm, method, settings, report)
            console.print(estimates.table(found, settings.cache_gb))
        else:
            run.train(llm, method, settings, report)
    except KeyboardInterrupt:
        if not estimate:
            report.say(f"Stopped: the same command goes on from what is saved in {settings.work}.")
        raise
    processes.leave()
