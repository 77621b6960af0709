"""Long contexts on a CPU: what a long prompt does to those who are being answered, and tokens/s far into a text.

    python benchmarks/long.py --folder DIR [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16, with room for 17,000 positions.
Stall: seven requests decode while an 8,000-token prompt is computed; the p99 of the gaps between a request's tokens, over its
value without the prompt.  Context: eight requests, or samples of one, far into
their texts, plainly and with n-gram look-up; K/V within 3 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from core import checkpoint, conditions, greedy, prompt, show
from rich.console import Console

from outrider import LLM, SamplingParams

ROOM = 17_000


def gaps(llm: LLM, long: int, tokens: int) -> tuple[list[float], float]:
    """Seconds between tokens of seven requests, and until the long prompt that comes after 20 of them has its first token."""
    asked = [prompt(64, i) for i in range(7)]
    last: dict[str, float] = {}
    found: list[float] = []
    first = 0.0
    stream = llm.stream(asked, greedy(tokens))
    for count, output in enumerate(stream):
        now = time.perf_counter()
        if output.request_id in last and (not long or count > 140):
            found.append(now - last[output.request_id])
        last[output.request_id] = now
        if count == 140 and long:
            began = now
            (request,) = llm._enter([prompt(long, 99)], greedy(1), None)  # joins while the seven are answered
            llm._admit([request])  # type: ignore[list-item]
        if count > 140 and long and request.finished:  # type: ignore[union-attr]
            first = now - began
            break
    stream.close()  # type: ignore[attr-defined]
    return found, first


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] * 1e3


def context_speed(llm: LLM, asked: list[Any], samples: int) -> dict[str, float]:
    """New tokens a second of eight samples far into their texts, plainly and with guesses: 48 tokens less 16, prompts cached."""

    def seconds(new: int, speculate: bool) -> float:
        began = time.perf_counter()
        llm.generate(
            asked,
            SamplingParams(temperature=0, max_tokens=new, n=samples, ignore_eos=True, speculate=speculate),
        )
        return time.perf_counter() - began

    first = seconds(1, False)  # fills the prefix cache
    speed = {
        name: round(8 * 32 / (seconds(48, on) - seconds(16, on)), 1)
        for name, on in (("plain", False), ("n-gram", True))
    }
    return {**speed, "prompts, s": round(first, 1)}


def run(folder: Path) -> dict[str, Any]:
    model = str(checkpoint(folder / "long", positions=ROOM))
    llm = LLM(model=model, max_num_seqs=8, kv_cache_memory_bytes=3 << 30)
    gaps(llm, 0, 40)
    idle, _ = gaps(llm, 0, 200)
    busy, first = gaps(llm, 8000, 8000)
    stall = {
        "idle p99, ms": round(p99(idle), 1), "p99 during the prompt, ms": round(p99(busy), 1), "ratio": round(p99(busy) / p99(idle), 2),
        "largest gap, ms": round(max(busy) * 1e3, 1), "first token of the long prompt, s": round(first, 1),
    }  # fmt: skip
    del llm
    llm = LLM(
        model=model, max_num_seqs=8, kv_cache_memory_bytes=3 << 30, speculative_config={"method": "ngram"}
    )
    far = {
        "8 x 8,000 tokens": context_speed(llm, [prompt(8000, i) for i in range(8)], 1),
        "8 samples of 16,000 tokens": context_speed(llm, [prompt(16_000, 77)], 8),
    }
    return {"stall": stall, "tokens/s of eight": far}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {"conditions": conditions(), **run(given.folder)}
    show(found, Console())
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
