"""`outrider tune control`: fit the network that predicts acceptance for the adaptive controller."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from outrider.cli.arguments import Drafts, Target, check_file, named, print_use, with_prompts
from outrider.cli.flags import MAX_TOKENS, OUT, SEED, Given, shared


@shared
def control(
    engine: Given,
    asked: Given,
    target: Target = None,
    drafts: Drafts = None,
    out: Annotated[Path, Option(*OUT, help="Output file (.safetensors).")] = Path("control.safetensors"),
    tokens: Annotated[int, Option(*MAX_TOKENS, min=2, help="Maximum new tokens per prompt.")] = 64,
    seed: Annotated[int, Option(*SEED, min=0, help="Seed of the sampled texts and of the fit.")] = 7,
) -> None:
    """Fit the control module: the network that predicts for an adaptive controller what will be accepted.

    Every prompt is answered greedily and at temperature 0.8, with look-up, each draft, and both together.
    The file is written if the network predicts better than calibrated bins on held-out prompts.
    """
    from outrider.bench.report import counted
    from outrider.core.params import SamplingParams
    from outrider.tune.control import configs, fit, record

    check_file(out, "control module")
    params = [SamplingParams(temperature=t, max_tokens=tokens, seed=seed) for t in (0.0, 0.8)]
    console = Console()
    llm, prompts = with_prompts(named(engine, target), asked, params[0], max_num_seqs=1)
    settings, answers = configs(drafts or []), []
    with counted("Drafting", len(prompts) * len(params) * len(settings), Console(stderr=True)) as tick:
        for setting in settings:
            answers += record(llm, setting, prompts, params, tick)
    found = fit(answers, {"target": llm.engine.checkpoint.name, "prompts": str(len(prompts))}, seed)
    console.print(
        f"Fitted to {found.nodes:,} draft tokens. On {found.held_out:,} of other prompts the log loss is "
        f"{found.loss:.4f} nats, that of calibrated bins {found.bins:.4f} (difference ± {found.spread:.4f}).",
        soft_wrap=True,
    )
    if not found.better:
        console.print("It does not predict better: nothing is written, and bins stay in use.", style="bold")
        return
    found.network.save(out.expanduser())
    print_use(out, {"method": "auto", "control_module": str(out)})
