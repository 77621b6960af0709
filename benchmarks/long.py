"""Long contexts on a CPU: a long prompt beside decoding requests, and tokens/s far into a text.

    python benchmarks/long.py --folder DIR [--prompt TOKENS] [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16, with room for 17,000
positions.

Prefill beside decoding: seven requests decode while an 8,000-token prompt is computed.  Measured are the time
to its first token over its value alone, and the p99 of the gaps between a request's tokens over its value
without the prompt.

Context: eight requests, or samples of one, far into their texts, with plain decoding and with n-gram look-up;
K/V within 3 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from core import checkpoint, conditions, greedy, prompt, seconds, show
from rich.console import Console

from outrider import LLM, SamplingParams

ROOM = 17_000


def gaps(llm: LLM, long: int, tokens: int) -> tuple[list[float], float]:
    """Seconds between tokens of seven requests, and to the first token of a long prompt that joins them."""
    last: dict[str, float] = {}
    found: list[float] = []
    first: list[float] = []

    def answer_long_prompt() -> None:
        first.append(seconds(lambda: llm.generate(prompt(long, 99), greedy(1))))

    other = threading.Thread(target=answer_long_prompt)
    stream = llm.stream([prompt(64, i) for i in range(7)], greedy(tokens))
    for count, output in enumerate(stream):
        now = time.perf_counter()
        if output.request_id in last and (not long or count > 140):
            found.append(now - last[output.request_id])
        last[output.request_id] = now
        if count == 140 and long:
            other.start()
        if first:
            break
    stream.close()  # type: ignore[attr-defined]
    return found, first[0] if first else 0.0


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98] * 1e3


def context_speed(llm: LLM, asked: list[Any], samples: int) -> dict[str, float]:
    """New tokens a second of eight samples far into their texts, plain and speculative: 48 tokens less 16."""

    def took(new: int, speculate: bool) -> float:
        began = time.perf_counter()
        llm.generate(
            asked,
            SamplingParams(temperature=0, max_tokens=new, n=samples, ignore_eos=True, speculate=speculate),
        )
        return time.perf_counter() - began

    first = took(1, False)  # fills the prefix cache
    speed = {
        name: round(8 * 32 / (took(48, on) - took(16, on)), 1)
        for name, on in (("plain", False), ("n-gram", True))
    }
    return {**speed, "prompts, s": round(first, 1)}


def prefill_beside_decoding(model: str, long: int, slowdown: float | None) -> dict[str, float]:
    """Slowdowns of both sides, with this max_decode_slowdown."""
    llm = LLM(model=model, max_num_seqs=8, kv_cache_memory_bytes=3 << 30, max_decode_slowdown=slowdown)
    gaps(llm, 0, 40)
    idle, _ = gaps(llm, 0, 200)
    alone = seconds(lambda: llm.generate(prompt(long, 98), greedy(1)))
    llm.engine.forget_prefixes()
    busy, first = gaps(llm, long, 16_000)
    return {
        "idle p99, ms": round(p99(idle), 1),
        "p99 during the prompt, ms": round(p99(busy), 1),
        "p99 over idle": round(p99(busy) / p99(idle), 2),
        "largest gap, ms": round(max(busy) * 1e3, 1),
        "first token alone, s": round(alone, 2),
        "first token, s": round(first, 2),
        "first token over alone": round(first / alone, 2),
    }


def run(folder: Path, long: int) -> dict[str, Any]:
    model = str(checkpoint(folder / "long", positions=ROOM))
    stall = {f"max_decode_slowdown {s}": prefill_beside_decoding(model, long, s) for s in (None, 1.5)}
    if long < 8000:
        return {"prefill beside decoding": stall}
    llm = LLM(
        model=model, max_num_seqs=8, kv_cache_memory_bytes=3 << 30, speculative_config={"method": "ngram"}
    )
    far = {
        "8 x 8,000 tokens": context_speed(llm, [prompt(8000, i) for i in range(8)], 1),
        "8 samples of 16,000 tokens": context_speed(llm, [prompt(16_000, 77)], 8),
    }
    return {"prefill beside decoding": stall, "tokens/s of eight": far}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=8000, help="fewer tokens: a short trial, pacing only")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {"conditions": conditions(), **run(given.folder, given.prompt)}
    show(found, Console())
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
