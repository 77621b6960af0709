"""Cost of a head of one layer per level, and of a draft tree of 60 nodes beside it.

    python benchmarks/heads.py --folder DIR [--json OUT]

DIR gets (or holds) the target: the Llama shape of 100 M weights, random, bfloat16.  The heads are random, of
one such layer.

A level is `forward`, `logits` and the picks of one row, and of ten, 64 tokens into a text.  It is compared
with the time of reading its weights at the bandwidth of a linear over 256 MiB.  Both are measured
alternately, so that the caches of the processor hold neither.

The tree is a dynamic one of EAGLE-2's size, from picks that are given.  It is compared with the same tree
including the picks of all its levels from given logits.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of, write
from core import checkpoint
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.backends.candidates import Candidates, TopEntries
from outrider.bench.conditions import conditions
from outrider.checkpoints.heads import Head
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.tree import Budget
from outrider.draft.eagle import Eagle
from outrider.draft.eagle import Network as EagleNetwork
from outrider.draft.eagle3 import Eagle3
from outrider.draft.eagle3 import Network as Eagle3Network
from outrider.drafting.base import Target
from outrider.heads.choose import Chooser
from outrider.heads.layer import Sizes
from outrider.heads.recurrent import Recurrent
from outrider.heads.trees import DynamicTree
from outrider.sampling.sampler import GREEDY

TEXT, ROWS, DEPTH, NODES, TOP_K = 64, (1, 10), 6, 60, 10
BARS = {"a level, of its weights' time": 1.3, "a tree without network and picks, ms": 0.3}


def drafters(target: Target) -> dict[str, Recurrent]:
    """A head of each kind: EAGLE's reads its target's lm_head, EAGLE-3's has one of its own."""
    s = target.decoder.spec
    sizes = (s.hidden, s.inner, s.heads, s.kv_heads, s.head_dim)
    taps = (2, s.layers // 2, s.layers - 3)
    eagle, eagle3 = (
        EagleNetwork(Sizes(*sizes), s.vocabulary),
        Eagle3Network(Sizes(*sizes), s.vocabulary, taps),
    )
    options = {"nodes": NODES, "top_k": TOP_K}
    return {
        "eagle": Eagle(
            Eagle.Options(**options), target, Head.of("random", eagle.config(), eagle.state_dict())
        ),
        "eagle3": Eagle3(
            Eagle3.Options(**options), target, Head.of("random", eagle3.config(), eagle3.state_dict())
        ),
    }


def packed(thing: Any) -> Iterator[tuple[int, int]]:
    """(id, bytes) of the packed weights that a network, or a layer of its stack, reads in a level."""
    for name, value in vars(thing).items():
        if name == "stack":
            for layer in value.layers:
                yield from packed(layer)
        elif hasattr(value, "outputs") and name not in ("embedding", "fc"):
            yield id(value), value.data.nbytes


def bytes_read(drafter: Recurrent) -> int:
    """By a level of one row; EAGLE-3's fc only reads the target's states, EAGLE's reads every pair."""
    net: Any = drafter.net
    fc = net.fc.data.nbytes if isinstance(drafter, Eagle) else 0
    head = 0 if net.lm_head is not None else net.model.lm_head.data.nbytes
    return sum(dict(packed(net)).values()) + fc + head


def milliseconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def level_ms(
    drafter: Recurrent, rows: int, sweep: Callable[[], Any], swept: int, repeats: int = 40
) -> dict[str, float]:
    """swept: bytes that the sweep reads."""
    net, hidden, ids = drafter.net, drafter.hidden, drafter.choose.ids
    pool, table, g = net.stack.pool(TEXT + rows), array("i", range(TEXT + rows)), torch.randn(rows, hidden)
    times, sweeps = [], []
    for _ in range(repeats):
        sweeps.append(milliseconds(sweep))
        step_input, state = StepInput(), g.clone()
        for i in range(rows):
            step_input.node(table, TEXT, [TEXT + i], 100 + i)
        step_input.build()
        candidates = drafter.backend.candidates(TOP_K, rows, 2)
        if rows > 1:
            candidates.grow(torch.randn(1, TOP_K), GREEDY, 0, None, None)  # the level before

        def level(
            step_input: StepInput = step_input,
            state: torch.Tensor = state,
            candidates: Candidates = candidates,
        ) -> None:
            candidates.grow(net.logits(net.forward(step_input, pool, state)), GREEDY, 0, ids, None)

        times.append(milliseconds(level))
    least = bytes_read(drafter) / (swept / statistics.median(sweeps))
    took = statistics.median(times)
    return {"ms": round(took, 3), "its weights, ms": round(least, 3), "ratio": round(took / least, 2)}


class Known(Chooser):
    """Has picked beforehand."""

    def __init__(self, target: Target, logits: torch.Tensor) -> None:
        super().__init__(target)
        picks = target.decoder.backend.pick_rows
        self.picked = {rows: TopEntries(*picks(logits[:rows], GREEDY, [0] * rows, TOP_K)) for rows in ROWS}

    def widen(
        self, candidates: Candidates, row: Row, paths: Sequence[Sequence[int]], logits: torch.Tensor
    ) -> tuple[list[int], list[int]]:
        return candidates.widen(self.picked[len(paths)])


def tree_ms(drafter: Recurrent, target: Target, repeats: int = 200) -> dict[str, float]:
    """Milliseconds of tree building without network and picks, level by level; and with the picks."""
    params = SamplingParams(temperature=0, max_tokens=1000)
    row = Row("0", 0, list(range(TEXT + 1)), TEXT, params, params.distribution, 0, (), 4096, frozenset())
    table, ready = array("i", range(TEXT + 2 * NODES)), torch.randn(TOP_K, target.vocabulary) * 3
    known = Known(target, ready)

    def build(choose: Chooser) -> None:
        tree = DynamicTree(row, table, TEXT, Budget(DEPTH, NODES), TOP_K)
        while tree.sources:
            tree.add_level(choose, ready[: len(tree.sources)])
            if tree.sources:
                step_input = StepInput()
                tree.add_to(step_input)
                step_input.build()
        assert len(tree.draft_tree.tokens) == NODES

    both = (partial(build, known), partial(build, drafter.choose))
    times = [[milliseconds(call) for call in both] for _ in range(repeats)]
    alone, whole = (round(statistics.median(column), 3) for column in zip(*times))
    return {"ms": alone, "with picks": whole}


def run(folder: Path) -> dict[str, Any]:
    llm = LLM(model=str(checkpoint(folder / "llama100m")), speculative_config=None)
    target, backend = llm.engine.target, llm.engine.decoder.backend
    big, x = backend.pack(torch.randn(1 << 15, 1 << 12)), torch.randn(1, 1 << 12)
    found: dict[str, Any] = {}

    def sweep() -> None:
        backend.linear(x, big)

    sweeps = [milliseconds(sweep) for _ in range(40)]
    found["reading, GB/s"] = round(big.data.nbytes / statistics.median(sweeps) / 1e6, 1)
    for name, drafter in drafters(target).items():
        levels = {f"a level of {rows}": level_ms(drafter, rows, sweep, big.data.nbytes) for rows in ROWS}
        found[name] = {
            "MB": round(bytes_read(drafter) / 1e6, 1),
            **levels,
            f"a tree of {NODES}": tree_ms(drafter, target),
        }
    return found


def show(found: dict[str, Any], console: Console) -> None:
    console.print(f"a big linear reads {found['reading, GB/s']} GB/s")
    table = Table("head", "what", "ms", "at the speed of reading", "ratio", "bar", title="heads")
    for name in ("eagle", "eagle3"):
        for what, figures in found[name].items():
            if what == "MB":
                table.add_row(name, f"{figures} MB", "", "", "", "")
            elif "ratio" in figures:
                table.add_row(
                    "",
                    what,
                    *(str(value) for value in figures.values()),
                    str(BARS["a level, of its weights' time"]),
                )
            else:
                figure = f"{figures['ms']} (with picks {figures['with picks']})"
                table.add_row("", what, figure, "", "", f"{BARS['a tree without network and picks, ms']} ms")
    console.print(table)


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    with torch.inference_mode():
        found = run(given.folder)
    show(found, Console())
    write(given.json, {"conditions": conditions(), "bars": BARS, "heads": found})
