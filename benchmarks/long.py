"""Long contexts on a CPU: a long prompt beside decoding requests, and tokens/s far into a text.

    python benchmarks/long.py --folder DIR [--prompt TOKENS] [--json OUT]

DIR gets (or holds) the checkpoint: the Llama shape of 100 M weights, random, bfloat16, with room for 17,000
positions.

Prefill beside decoding: seven requests decode while an 8,000-token prompt is computed.  Measured are the time
to its first token over its value alone, and the p99 of the gaps between a request's tokens over its value
without the prompt.  The seven texts grow meanwhile, and with them the decode steps.  So the last tenth
of the prompt's time is compared with the steps right after it.

Context: eight requests, or samples of one, far into their texts, with plain decoding and with n-gram look-up;
K/V within 3 GiB.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from core import checkpoint, conditions, greedy, prompt, seconds, show
from rich.console import Console

from outrider import LLM, SamplingParams

ROOM = 17_000
SETTLED = 100  # tokens of each request before the prompt joins, and after its first token


@dataclass
class Gaps:
    """Seconds between the tokens of seven requests, in three parts of their time.

    before: no prompt.  early: the first tenth of the long prompt's time.  late: its last tenth.
    after: no prompt again, at the context lengths of the last tenth.
    """

    before: list[float]
    early: list[float]
    late: list[float]
    after: list[float]
    first_token: float


def gaps(llm: LLM, long: int, tokens: int) -> Gaps:
    """Gaps of seven requests, which a long prompt joins after their first 100 tokens."""
    last: dict[str, float] = {}
    found: list[tuple[float, float]] = []  # (end of the gap, gap)
    joined: list[float] = []  # when the prompt came, and when its first token did

    def answer_long_prompt() -> None:
        llm.generate(prompt(long, 99), greedy(1))
        joined.append(time.perf_counter())

    other = threading.Thread(target=answer_long_prompt)
    left = 7 * SETTLED
    stream = llm.stream([prompt(64, i) for i in range(7)], greedy(tokens))
    for count, output in enumerate(stream):
        now = time.perf_counter()
        if output.request_id in last:
            found.append((now, now - last[output.request_id]))
        last[output.request_id] = now
        if count == 7 * SETTLED:
            joined.append(now)
            other.start()
        left -= len(joined) == 2
        if not left:
            break
    stream.close()  # type: ignore[attr-defined]
    began, ended = joined
    tenth = (ended - began) / 10

    def between(start: float, end: float) -> list[float]:
        return [gap for at, gap in found if start < at - gap and at <= end]

    return Gaps(
        between(0, began),
        between(began, began + tenth),
        between(ended - tenth, ended),
        between(ended, float("inf")),
        ended - began,
    )


def p99(values: list[float]) -> float:
    """99th percentile, in milliseconds."""
    return round(statistics.quantiles(values, n=100)[98] * 1e3, 1)


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
    llm = LLM(
        model=model,
        speculative_config=None,
        max_num_seqs=8,
        kv_cache_memory_bytes=3 << 30,
        max_decode_slowdown=slowdown,
    )
    llm.generate([prompt(64, i) for i in range(8)], greedy(40))  # warm
    alone = seconds(lambda: llm.generate(prompt(long, 98), greedy(1)))
    llm.engine.forget_prefixes()
    found = gaps(llm, long, 16_000)
    return {
        "p99 before the prompt, ms": p99(found.before),
        "p99 in its first tenth, ms": p99(found.early),
        "p99 in its last tenth, ms": p99(found.late),
        "p99 after it, ms": p99(found.after),
        "slowdown at the beginning": round(p99(found.early) / p99(found.before), 2),
        "slowdown at the end": round(p99(found.late) / p99(found.after), 2),
        "median slowdown at the end": round(
            statistics.median(found.late) / statistics.median(found.after), 2
        ),
        "first token alone, s": round(alone, 2),
        "first token, s": round(found.first_token, 2),
        "first token over alone": round(found.first_token / alone, 2),
    }


def run(folder: Path, long: int) -> dict[str, Any]:
    model = str(checkpoint(folder / "long", max_position_embeddings=ROOM))
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
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=8000, help="fewer tokens: a short trial, pacing only")
    given = parser.parse_args()
    found = {"conditions": conditions(), **run(given.folder, given.prompt)}
    show(found, Console())
    write(given.json, found)
