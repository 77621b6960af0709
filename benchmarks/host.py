"""Host time of propose and observe, for every method without weights: batch 1, context 64 and 4,000 tokens;
and the calls of a step, plain and with a draft model, which do not depend on the machine's load.

    python benchmarks/host.py --folder DIR [--json OUT]

DIR gets (or holds) the checkpoint: a random Llama of 5 M weights with room for 4,200 positions.  So there is
a forward in between, which evicts the caches of the processor but is short.  The prompt repeats itself, so
that look-ups find something.  The datastore is made of 400,000 tokens.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from command_line import parser_of, write
from core import checkpoint
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.draft.datastore.corpus import build

VOCABULARY, CONTEXTS, NEW = 16384, (64, 4000), 128
BATCHES = (1, 8, 32)
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "max_position_embeddings": 4200,
}  # fmt: skip
# milliseconds a step
BARS = {"lookahead": 0.4, "recycle": 0.4, "ngram": 0.15, "suffix": 0.15, "datastore": 0.5}


def prompt(length: int) -> dict[str, list[int]]:
    """Phrases of 40 tokens in random order, each as often as the others."""
    rng = random.Random(0)
    phrases = [[rng.randrange(5, VOCABULARY) for _ in range(40)] for _ in range(max(1, length // 160))]
    text = [token for _ in range(length // 40 + 1) for token in rng.choice(phrases)]
    return {"prompt_token_ids": text[:length]}


def corpus(folder: Path) -> str:
    """A datastore that holds the phrases among others."""
    store = folder / "store"
    if not store.is_file():
        with tempfile.TemporaryDirectory() as parts:
            text = np.random.default_rng(0).integers(5, VOCABULARY, 400_000)
            for at in range(0, len(text) - 4000, 20_000):
                text[at : at + 4000] = prompt(4000)["prompt_token_ids"]
            np.save(Path(parts) / "corpus.npy", text)
            build([str(Path(parts) / "corpus.npy")], str(store), None, VOCABULARY)
    return str(store)


def host_ms(llm: LLM, config: dict[str, Any], context: int) -> dict[str, float]:
    """Medians over the decode steps of three answers: milliseconds of propose and observe."""
    llm.use(config)
    drafter = llm.engine.drafter
    times: dict[str, list[float]] = {"propose": [], "observe": []}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any) -> Any:
            began = time.perf_counter()
            result = function(*given)
            times[name].append((time.perf_counter() - began) * 1e3)
            return result

        return wrapper

    for name in times:
        setattr(drafter, name, timed(name, getattr(drafter, name)))
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    steps: list[tuple[float, float]] = []
    for _ in range(3):
        llm.engine.forget_prefixes()
        for kept in times.values():
            kept.clear()
        output = llm.generate(prompt(context), params)[0]
        decoding = output.speculation.steps - 1
        steps += list(zip(times["propose"][-decoding:], times["observe"][-decoding:]))
    both = [sum(step) for step in steps]
    return {
        "ms a step": round(statistics.median(both), 4),
        "propose": round(statistics.median(p for p, _ in steps), 4),
        "observe": round(statistics.median(o for _, o in steps), 4),
        "p99": round(statistics.quantiles(both, n=100)[98], 4),
    }


def calls_a_step(llm: LLM, config: dict[str, Any] | None, rows: int) -> dict[str, float]:
    """Calls of Python functions and of builtins in a decode step of so many rows."""
    llm.use(config)
    engine, counts, steps = llm.engine, {"call": 0, "c_call": 0}, 0
    step = type(engine).step

    def count(frame: Any, event: str, what: Any) -> None:
        if event in counts:
            counts[event] += 1

    def counted() -> Any:
        nonlocal steps
        if engine.decode.steps < 16:  # the first ones
            return step(engine)
        steps += 1
        sys.setprofile(count)
        try:
            return step(engine)
        finally:
            sys.setprofile(None)

    engine.step = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    llm.generate([prompt(64)] * rows, params)
    del engine.step
    return {"python": round(counts["call"] / steps, 1), "builtins": round(counts["c_call"] / steps, 1)}


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    llm = LLM(model=str(checkpoint(given.folder / "host", **SIZES)), max_num_seqs=1, speculative_config=None)
    table = Table(
        "method",
        *(f"{context:,} tokens" for context in CONTEXTS),
        "bar",
        title="propose + observe, ms a step",
    )
    figures: dict[str, Any] = {}
    for method, bar in BARS.items():
        config = (
            {"method": method, "datastore": corpus(given.folder)}
            if method == "datastore"
            else {"method": method}
        )
        figures[method] = {str(context): host_ms(llm, config, context) for context in CONTEXTS}
        table.add_row(
            method, *(f"{figures[method][str(context)]['ms a step']:.3f}" for context in CONTEXTS), f"{bar}"
        )
    Console().print(table)
    folder = str(given.folder / "host")
    llm = LLM(model=folder, max_num_seqs=max(BATCHES), speculative_config=None)
    table = Table(
        "step", *(f"{rows} rows" for rows in BATCHES), title="calls of Python functions + of builtins"
    )
    calls: dict[str, Any] = {}
    draft = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    for label, config in {"plain": None, "draft model": draft}.items():
        calls[label] = {str(rows): calls_a_step(llm, config, rows) for rows in BATCHES}
        table.add_row(label, *(f"{each['python']} + {each['builtins']}" for each in calls[label].values()))
    Console().print(table)
    write(given.json, {"conditions": conditions(), "bars, ms": BARS, "host": figures, "calls": calls})
