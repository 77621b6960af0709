"""Steps of one request by rows, and prefill, on the kernels of several instruction sets, in turns.

    python benchmarks/instruction_sets.py [--sets avx512_bf16 amx] [--model builtin-100m] [--rounds N]
        [--json OUT]

A round measures every set after the other; the figures are the medians and the least of all rounds.  Other
options of `LLM`, such as `--quantization int8`, hold for all sets.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from command_line import parser_of, write
from core import greedy, prompt, seconds, verification_ms
from rich.console import Console
from rich.table import Table

from outrider import LLM
from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu import targets
from outrider.bench.conditions import conditions

ROWS, TOKENS = (1, 8, 16, 64), 512


def load(name: str, model: str, quantization: str | None) -> LLM:
    """A model of its own on the kernels of one set."""
    os.environ["OUTRIDER_ISA"] = name
    cpu.library.cache_clear()
    form: dict[str, Any] = {"quantization": quantization} if quantization else {}
    return LLM(model, max_num_batched_tokens=TOKENS, max_num_seqs=8, speculative_config=None, **form)


def prefill_ms(llm: LLM) -> float:
    llm.engine.forget_prefixes()
    return seconds(lambda: llm.generate(prompt(TOKENS), greedy(1))) * 1e3


def figures(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times)}


def run(llms: dict[str, LLM], rounds: int) -> dict[str, Any]:
    steps = {name: {n: list[float]() for n in ROWS} for name in llms}
    prefills = {name: list[float]() for name in llms}
    for _ in range(rounds):
        for name, llm in llms.items():
            for n, of_size in verification_ms(llm, ROWS, repeats=5).items():
                steps[name][n].append(of_size)
        for name, llm in llms.items():
            prefills[name].append(min(prefill_ms(llm) for _ in range(2)))
    found: dict[str, Any] = {}
    for name in llms:
        of_rows = {n: figures(steps[name][n]) for n in ROWS}
        found[name] = {
            "step ms by rows of one request": of_rows,
            "in steps of one row": {n: of_rows[n]["median"] / of_rows[1]["median"] for n in ROWS},
            f"prefill of {TOKENS}, ms": figures(prefills[name]),
        }
    return found


def show(found: dict[str, Any], console: Console) -> None:
    made = Table("set", *map(str, ROWS), f"prefill of {TOKENS}", title="ms, median (least)")
    for name, (of_rows, _, prefill) in ((name, each.values()) for name, each in found.items()):
        cells = (f"{each['median']:.2f} ({each['least']:.2f})" for each in (*of_rows.values(), prefill))
        made.add_row(name, *cells)
    console.print(made)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--sets", nargs="+", default=targets.available()[-2:])
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    under = conditions()
    under.pop("instruction set")
    llms = {name: load(name, given.model, given.quantization) for name in given.sets}
    found = run(llms, given.rounds)
    show(found, Console())
    write(given.json, {"conditions": under, **found})
