"""Acceptance of each verification rule with the built-in pair: chains and trees, by temperature.

    python benchmarks/rules.py [--samples 20] [--temperature 0.8 1.0] [--json OUT]

Every rule answers every prompt of the demo `samples` times with other seeds, 128 tokens each; EOS is ignored,
so that all texts are equally long.  Tokens per step come with their standard error over requests.  The host
time of the rule and its samples is part of tokens/s, which needs an idle machine.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from command_line import parser_of, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.prompts import PROMPTS, rendered
from outrider.core.row import Speculation

TEMPERATURES = (0.5, 0.8, 1.0)
TREE = {"siblings": 3}
DRAFTS = {
    "chain of 4": {},
    "tree, 4 levels of 3": TREE,
    "tree, independent siblings": {**TREE, "sibling_draws": "independent"},
    "tree, greedy siblings": {**TREE, "sibling_draws": "greedy"},
}
RULES = ("match", "rejection", "block", "traversal", "spectr")
CHAINS_ALONE = ("block",)
INDEPENDENT_ALONE = ("spectr",)  # elsewhere it is rejection


def serves(rule: str, draft: str) -> bool:
    """Whether this rule has figures of its own for these drafts."""
    if rule == "match":  # its siblings are chosen, however samples are drawn
        return "sibling_draws" not in DRAFTS[draft]
    if rule in CHAINS_ALONE:
        return "siblings" not in DRAFTS[draft]
    return rule not in INDEPENDENT_ALONE or DRAFTS[draft].get("sibling_draws") == "independent"


def judged(llm: LLM, prompts: list[Any], temperature: float, samples: int) -> dict[str, Any]:
    each = [
        SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True, seed=1000 * s + i)
        for s in range(samples)
        for i in range(len(prompts))
    ]
    began = time.perf_counter()
    answers = [llm.generate(prompts[i % len(prompts)], params)[0] for i, params in enumerate(each)]
    seconds = time.perf_counter() - began
    rates = [answer.speculation.tokens_per_step for answer in answers]
    total = sum((answer.speculation for answer in answers), Speculation())
    return {
        "tokens per step": round(total.tokens_per_step, 3),
        "standard error": round(statistics.stdev(rates) / math.sqrt(len(rates)), 3),
        "acceptance": round(total.acceptance, 4),
        "tokens": total.emitted,
        "tokens/s": round(total.emitted / seconds, 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--temperature", type=float, nargs="*", default=TEMPERATURES)
    given = parser.parse_args()
    llm = LLM(model="builtin", seed=0, speculative_config=None)
    prompts = [rendered(prompt, llm.tokenizer) for prompt in PROMPTS]
    common = {"model": "builtin-draft", "num_speculative_tokens": 4}
    todo = [
        (t, draft, rule)
        for t in given.temperature
        for draft in DRAFTS
        for rule in RULES
        if serves(rule, draft)
    ]
    found: dict[str, Any] = {"conditions": conditions()}
    for t, draft, rule in track(todo, "Judging"):
        variant = llm.variant({**common, **DRAFTS[draft], "verification": rule})
        found.setdefault(f"T = {t}", {}).setdefault(draft, {})[rule] = judged(
            variant, prompts, t, given.samples
        )
    table = Table("", *RULES, title="tokens per step (acceptance, tokens/s)")
    for t in given.temperature:
        for draft, rows in found[f"T = {t}"].items():
            cells = [rows.get(rule) for rule in RULES]
            table.add_row(
                f"T = {t}, {draft}",
                *(
                    f"{c['tokens per step']:.2f} ± {c['standard error']:.2f} "
                    f"({c['acceptance']:.0%}, {c['tokens/s']:.0f})"
                    if c
                    else "–"
                    for c in cells
                ),
            )
    Console(width=150).print(table)
    write(given.json, found)


if __name__ == "__main__":
    main()
