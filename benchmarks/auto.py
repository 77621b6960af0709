"""The adaptive controller against plain decoding and every fixed setting, cell by cell.

    python benchmarks/auto.py [--minutes 8] [--models builtin builtin-100m] [--folder DIR] [--cpu-time]
                              [--json OUT]

A cell is a kind of text, a temperature, a batch size and a model.  All settings of a cell answer the same
stream of prompts in a full batch, in lockstep (lockstep.py), since the speed of a machine
varies, until plain decoding has taken --seconds.  Drafters and controllers are new in each cell; what earlier
cells have taught is on disk, as for every user.  Cells are shuffled, so that `--minutes` gives a fair part of
the grid; the cells that are left out are counted.  OUT is written after every cell; a further run with the
same OUT goes on where it ended.  --folder adds the Llama shape of 100 M random weights, which is written
there.
The machine should be idle; on a busy one --cpu-time takes the process's CPU time for all clocks, with
OMP_NUM_THREADS=1, since threads that wait would count.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from command_line import parser_of, write
from core import checkpoint
from lockstep import lockstep
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.prompts import PROMPTS, Prompt, rendered
from outrider.bench.questions import read

PLAIN, AUTO = "plain", "auto"
SMALL, GROWN, RANDOM = "builtin", "builtin-100m", "random-100m"
DRAFT = {"method": "draft_model", "model": "builtin-draft"}
FIXED: dict[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    **{f"draft {k}": {**DRAFT, "num_speculative_tokens": k} for k in (2, 4, 6)},
}
WITH_DRAFT = "auto, draft"
OPEN = ("random ids", "trap")  # kinds of token ids
KINDS = (
    "translation", "summary", "question", "arithmetic", "retrieval", "chat", "code", "German", *OPEN,
)  # fmt: skip
MOST_BATCHES = 16  # of prompts, in a cell
LENGTH, MEMORY = 1024, 1 << 28  # tokens of a request, and bytes of K/V of each setting: all have their own
TEMPERATURES, BATCHES = (0.0, 0.8, 1.0), (1, 4, 8, 16, 32)


class Cell(NamedTuple):
    model: str
    kind: str
    temperature: float
    batch: int


def prompts(kind: str, batch: int, tokenizer: Any) -> list[dict[str, list[int]]]:
    """So many prompts of a kind; where there are fewer, they are repeated with another beginning."""
    if kind in OPEN:
        return [{"prompt_token_ids": _ids(kind, i)} for i in range(batch)]
    texts = [prompt for prompt in PROMPTS if prompt.kind == kind]
    if not texts:
        questions = read(Path(__file__).with_name("questions.jsonl"))
        texts = [Prompt(kind, (q.turns[0],)) for q in questions if q.category == kind]
    made = []
    for i in range(batch):
        *turns, last = texts[i % len(texts)].turns
        lead = f"({i // len(texts) + 1}) " if i >= len(texts) else ""
        made.append(rendered(Prompt(kind, (*turns, lead + last)), tokenizer))
    return made


def _ids(kind: str, seed: int) -> list[int]:
    """Random ids; or a phrase that comes again and again and goes on differently each time."""
    r = random.Random(seed)
    if kind == "random ids":
        return [r.randrange(10, 4000) for _ in range(96)]
    phrase = [r.randrange(10, 4000) for _ in range(12)]
    return [token for _ in range(8) for token in (*phrase, r.randrange(10, 4000))]


def settings(model: str) -> dict[str, Mapping[str, Any] | None]:
    """Plain decoding first.  The draft model knows the built-in targets' vocabulary.

    On the small one its drafts lose, deep ones most: the shortest is enough.
    """
    fixed = {
        name: config
        for name, config in FIXED.items()
        if not name.startswith("draft") or model == GROWN or (model == SMALL and name == "draft 2")
    }
    own = {} if model == RANDOM else {WITH_DRAFT: {"method": "auto", "model": "builtin-draft"}}
    return {PLAIN: {"method": "off"}, AUTO: {"method": "auto"}, **own, **fixed}


def run(llm: LLM, cell: Cell, tokens: int, seconds: float) -> dict[str, Any]:
    """Seconds by setting, and the same over plain decoding."""
    lengths = random.Random(0).choices(range(tokens // 2, 3 * tokens // 2), k=MOST_BATCHES * cell.batch)
    params = [
        SamplingParams(temperature=cell.temperature, max_tokens=length, ignore_eos=True, seed=1)
        for length in lengths
    ]
    configs = settings(cell.model)
    asked = prompts(cell.kind, len(params), llm.get_tokenizer())
    whole = tokens * cell.batch  # of a batch
    plain = lockstep(llm, {PLAIN: configs[PLAIN]}, asked, params, cell.batch, whole)[PLAIN].seconds
    # the last ones stay open, so that the others are full
    batches = min(max(2, math.ceil(seconds / plain)), MOST_BATCHES - 3)
    sides = lockstep(llm, configs, asked, params, cell.batch, batches * whole)
    spent = {label: side.seconds for label, side in sides.items()}
    gc.collect()
    return {
        "cell": cell._asdict(),
        "batches": batches,
        "seconds": spent,
        "time over plain": {label: own / spent[PLAIN] for label, own in spent.items()},
        "of ideal": {label: side.of_ideal(sides[PLAIN]) for label, side in sides.items()},
        "same tokens": {label: side.agrees(sides[PLAIN]) for label, side in sides.items()},
    }


def best_fixed(times: Mapping[str, float], label: str) -> float:
    """Time of the best fixed setting of a cell with what an adaptive one has: the draft model, or none."""
    return min(
        time
        for name, time in times.items()
        if name in (PLAIN, *FIXED) and (label == WITH_DRAFT or not name.startswith("draft"))
    )


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By setting: mean and largest time over plain decoding; of the adaptive ones also `adaptive`."""
    times: dict[str, list[float]] = {}
    for cell in cells:
        for label, own in cell["time over plain"].items():
            times.setdefault(label, []).append(own)
    found: dict[str, Any] = {
        "cells": len(cells),
        "mean": {label: round(statistics.mean(own), 3) for label, own in times.items()},
        "largest": {label: round(max(own), 3) for label, own in times.items()},
        "same tokens": all(all(cell["same tokens"].values()) for cell in cells),
    }
    return found | {label: adaptive(cells, label) for label in (AUTO, WITH_DRAFT) if label in times}


def adaptive(cells: Sequence[dict[str, Any]], label: str) -> dict[str, Any]:
    """Part of the ideal speed-up, mean time over the best fixed setting, and the cells with too much time:
    over 1.02 of plain decoding, or 1.05 of the best.
    """
    ideal, over_best = list[float](), list[float]()
    slow: dict[str, list[Any]] = {"over 1.02 of plain": [], "over 1.05 of best": []}
    for cell in cells:
        times = cell["time over plain"]
        if label not in times:
            continue
        own, over = times[label], times[label] / best_fixed(times, label)
        ideal.append(cell["of ideal"][label])
        over_best.append(over)
        if own > 1.02:
            slow["over 1.02 of plain"].append([*cell["cell"].values(), own])
        if over > 1.05:
            slow["over 1.05 of best"].append([*cell["cell"].values(), over])
    means = {"of ideal, mean": ideal, "over best fixed, mean": over_best}
    return {name: round(statistics.mean(values), 3) for name, values in means.items()} | slow


def show(found: dict[str, Any], console: Console) -> None:
    table = Table("setting", "mean", "largest", title="time over plain decoding")
    for label, mean in found["mean"].items():
        table.add_row(label, f"{mean:.3f}", f"{found['largest'][label]:.3f}")
    console.print(table)
    console.print({name: value for name, value in found.items() if name not in ("mean", "largest")})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=[SMALL, GROWN])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--tokens", type=int, default=64, help="of a request, half as many more or less")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--cpu-time", action="store_true", help="in place of wall time, for a busy machine")
    given = parser.parse_args()
    if given.cpu_time:
        time.perf_counter = time.process_time
    models = {name: name for name in given.models}
    if given.folder:
        models[RANDOM] = str(checkpoint(given.folder / "llama100m"))
    grid = [Cell(*cell) for cell in itertools.product(models, given.kinds, given.temperatures, given.batches)]
    grid = [cell for cell in grid if cell.model != RANDOM or cell.kind in OPEN]  # it has no tokenizer
    random.Random(0).shuffle(grid)
    console, began = Console(), time.monotonic()
    cells = json.loads(given.json.read_text())["cells"] if given.json and given.json.exists() else []
    done = {Cell(**cell["cell"]) for cell in cells}
    llms = {
        name: LLM(
            path,
            max_num_seqs=max(given.batches),
            speculative_config=None,
            max_model_len=LENGTH,
            kv_cache_memory_bytes=MEMORY,
        )
        for name, path in models.items()
    }
    for cell in grid:
        if time.monotonic() - began > 60 * given.minutes:
            break
        if cell in done:
            continue
        cells.append(run(llms[cell.model], cell, given.tokens, given.seconds))
        ratio = cells[-1]["time over plain"]
        console.print(*cell, {label: round(value, 3) for label, value in ratio.items()})
        found = {"left out": len(grid) - len(cells), **summary(cells)}
        write(given.json, {"conditions": conditions(), "summary": found, "cells": cells})
    show({"left out": len(grid) - len(cells), **summary(cells)}, console)


if __name__ == "__main__":
    main()
