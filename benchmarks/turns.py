"""Plain decoding, a tree's nodes and eight requests in turns with llama.cpp, by weights of 16, 8 and 4 bits.

    python benchmarks/turns.py --folder DIR --gguf BF16.gguf Q8_0.gguf Q4_0.gguf [--rounds 5] [--json OUT]

DIR gets (or holds) the checkpoint of core.py; the GGUF files are the same weights.  Where the speed of memory
changes by the minute, only figures of one round compare: every round measures ours and llama.cpp for one kind
of weights after the other.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import peers
from command_line import parser_of, write
from core import NEW, PROMPT, checkpoint, conditions, decode_speed, verification_ms
from quantized import FORMS
from rich.console import Console
from rich.table import Table

from outrider import LLM

NODES = (1, 8, 16, 64)  # rows of a forward, root and nodes
ONCE = peers.Tools(repeats=2)


def one_round(llm: LLM, gguf: Path) -> dict[str, Any]:
    """Tokens a second of ours before and after llama.cpp, and of eight requests; forwards in milliseconds."""
    before = decode_speed(llm, 1, 1)
    theirs = peers.llama_cpp(str(gguf), PROMPT, NEW, ONCE)
    return {
        "one": [before, decode_speed(llm, 1, 1)],
        "llama.cpp": theirs.get("tokens_per_s"),
        "eight": decode_speed(llm, 8, 1),
        "forward ms by rows": verification_ms(llm, NODES, repeats=10),
    }


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; ratios are taken in each round."""
    ones = [statistics.mean(found["one"]) for found in rounds]
    forwards = [found["forward ms by rows"] for found in rounds]
    return {
        "tokens/s": statistics.median(ones),
        "over llama.cpp": statistics.median(
            [one / found["llama.cpp"] for one, found in zip(ones, rounds) if found["llama.cpp"]] or [0.0]
        ),
        "eight over one": statistics.median(found["eight"] / one for one, found in zip(ones, rounds)),
        "forward over one row": {n: statistics.median(each[n] / each[1] for each in forwards) for n in NODES},
    }


def run(folder: Path, ggufs: list[Path], count: int) -> dict[str, Any]:
    model = str(checkpoint(folder / "llama100m"))
    llms = {form: LLM(model=model, speculative_config=None, **options) for form, options in FORMS.items()}
    rounds: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for llm in llms.values():
        decode_speed(llm, 1, 1)  # memory is there
    for _ in range(count):
        for (form, llm), gguf in zip(llms.items(), ggufs):
            rounds[form].append(one_round(llm, gguf))
    return {"medians": {form: medians(found) for form, found in rounds.items()}, "rounds": rounds}


def show(result: dict[str, Any]) -> None:
    nodes = [f"{n} rows" for n in NODES[1:]]
    table = Table("weights", "tokens/s", "over llama.cpp", "eight over one", *nodes, title="In turns")
    for form, found in result["medians"].items():
        figures = [found["tokens/s"], found["over llama.cpp"], found["eight over one"]]
        figures += [found["forward over one row"][n] for n in NODES[1:]]
        table.add_row(form, *[f"{figure:.2f}" for figure in figures])
    Console().print(table)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs=3, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found = {"conditions": conditions(), **run(given.folder, given.gguf, given.rounds)}
    show(found)
    write(given.json, found)
