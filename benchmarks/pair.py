"""The built-in pair: every method against plain decoding, by kind of prompt, greedy and at T = 0.8, batch 1.

    python benchmarks/pair.py [--tokens 128] [--repeats 5] [--methods WORD …] [--json OUT]

Speed-up is the ratio of new tokens a second, prompts included: the median over `repeats` rounds, in which all
methods take turns at every prompt.  tokens/s are those of each prompt's fastest round.  The draft of this
pair has 0.40 of the target's weights.  The time of one draft forward over one target forward is printed with
the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.measure import Measured, demonstrations, measure
from outrider.bench.prompts import KINDS, PROMPTS, rendered

SETTINGS = {"greedy": {"temperature": 0.0}, "T = 0.8": {"temperature": 0.8, "top_p": 0.95}}


def decode_seconds(model: str) -> float:
    """Median seconds of one plain decoding step."""
    llm = LLM(model=model, speculative_config=None)
    params = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    times = []
    for _ in range(7):
        llm.engine.reset()
        llm.generate({"prompt_token_ids": list(range(100, 164))}, params)
        times.append(llm.engine.times.forward / llm.engine.steps)
    return statistics.median(times)


def figures(results: list[Measured]) -> dict[str, Any]:
    """method -> kind -> figures; the kind "all" is everything together."""
    made: dict[str, Any] = {}
    for result in results:
        rows = made[result.method] = {}
        for kind in ("all", *KINDS):
            ours, plain = (
                (result, results[0]) if kind == "all" else (result.only(kind), results[0].only(kind))
            )
            rows[kind] = {
                "tokens/s": round(ours.speed, 1),
                "speed-up": round(ours.speed_up(plain), 3),
                "tokens per step": round(ours.total.tokens_per_step, 3),
                "acceptance": round(ours.total.acceptance, 3),
                "repeated 4-grams": round(ours.repeated, 3),
                "same tokens": ours.tokens == plain.tokens,
            }
        rows["all"]["share of time drafting"] = round(result.drafting, 3)
    return made


def show(title: str, made: dict[str, Any], console: Console) -> None:
    table = Table(
        "method", *(f"{kind}" for kind in ("all", *KINDS)), title=f"{title}: speed-up (tokens per step)"
    )
    for method, rows in made.items():
        table.add_row(
            method, *(f"{row['speed-up']:.2f} ({row['tokens per step']:.2f})" for row in rows.values())
        )
    repeated = next(iter(made.values()))
    table.add_row("repeated 4-grams", *(f"{row['repeated 4-grams']:.0%}" for row in repeated.values()))
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="*", help="parts of the labels of those wanted (default: all)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    console = Console(width=150)
    llm = LLM(model="builtin", seed=0, speculative_config=None)
    prompts = [(prompt.kind, rendered(prompt, llm.tokenizer)) for prompt in PROMPTS]
    ratio = decode_seconds("builtin-draft") / decode_seconds("builtin")
    found: dict[str, Any] = {"conditions": conditions(), "draft forward / target forward": round(ratio, 3)}
    began = time.perf_counter()
    shown = {
        label: config
        for label, config in demonstrations().items()
        if config is None or not given.methods or any(word in label for word in given.methods)
    }
    for title, sampling in SETTINGS.items():
        params = SamplingParams(max_tokens=given.tokens, seed=7, **sampling)
        found[title] = figures(measure(llm, shown, prompts, params, given.repeats))
        show(title, found[title], console)
    console.print(f"draft forward / target forward: {ratio:.2f}; {time.perf_counter() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
