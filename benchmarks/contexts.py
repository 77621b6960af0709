"""Prompts, and the steps of a draft tree far into a text, on a CPU; of several trees of the source in turns.

    python benchmarks/contexts.py --folder DIR [--trees SRC …] [--rounds 3] [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16, with room for 17,000
positions.  SRC is a folder with the package `outrider`, of this commit or another one: each round measures
every tree in a process of its own, so that figures of one round compare.  Without --trees it is this one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from core import checkpoint, greedy, prompt, seconds, verification_ms
from rich.console import Console
from rich.table import Table

from outrider import LLM
from outrider.bench.conditions import conditions

ROOM = 17_000
ROWS, CONTEXTS, PROMPTS = (1, 16, 64), (128, 4000, 8000), (512, 4096, 8192)


def measure(model: str) -> dict[str, float]:
    """Milliseconds by what was measured."""
    llm = LLM(model=model, speculative_config=None, kv_cache_memory_bytes=2 << 30)
    found: dict[str, float] = {}
    llm.generate(prompt(64, 1), greedy(8))  # memory is there
    for context in CONTEXTS:
        for rows, ms in verification_ms(llm, ROWS, context, repeats=7).items():
            found[f"{rows} rows behind {context:,}"] = ms
    for length in PROMPTS:
        llm.engine.forget_prefixes()
        found[f"prompt of {length:,}"] = seconds(lambda n=length: llm.generate(prompt(n), greedy(1))) * 1e3
    return found


def in_a_process(tree: str, folder: Path) -> dict[str, float]:
    """`measure` with the package of this tree."""
    command = [sys.executable, __file__, "--folder", str(folder), "--one"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": tree}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tree} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(trees: list[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Medians by tree, and of the ratios to the first tree within a round."""
    found: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _ in range(rounds):
        for tree in trees:
            found[tree].append(in_a_process(tree, folder))
    first = found[trees[0]]
    return {
        tree: {
            what: {
                "ms": statistics.median(each[what] for each in of_tree),
                "over the first": statistics.median(
                    each[what] / base[what] for each, base in zip(of_tree, first)
                ),
            }
            for what in first[0]
        }
        for tree, of_tree in found.items()
    }


def show(found: dict[str, Any]) -> None:
    table = Table("ms (over the first)", *found)
    for what in next(iter(found.values())):
        cells = [
            f"{of_tree[what]['ms']:.1f} ({of_tree[what]['over the first']:.2f})" for of_tree in found.values()
        ]
        table.add_row(what, *cells)
    Console().print(table)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trees", nargs="+", default=[str(Path(__file__).parents[1] / "src")])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure the installed package and print JSON")
    given = parser.parse_args()
    model = str(checkpoint(given.folder / "llama100m-long", max_position_embeddings=ROOM))
    if given.one:
        print(json.dumps(measure(model)))
    else:
        found = run(given.trees, given.folder, given.rounds)
        show(found)
        write(given.json, {"conditions": conditions(), "trees": found})
