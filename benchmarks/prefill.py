"""Prefill beside llama.cpp, in turns: tokens/s of one prompt, weights in bfloat16, 8 and 4 bits.

    python benchmarks/prefill.py --folder DIR --gguf BF16 Q8_0 Q4_0 [--tokens N] [--rounds N] [--json OUT]

DIR gets (or holds) the checkpoint of core.py.  The GGUF files are the same weights.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import peers
from command_line import parser_of, write
from core import checkpoint, conditions, greedy, prompt, seconds
from quantized import FORMS
from rich.console import Console

from outrider import LLM


def speed(llm: LLM, tokens: int, repeats: int = 5) -> float:
    """Prompt tokens a second until the first new token: the median of `repeats`."""
    times = []
    for _ in range(repeats):
        llm.engine.forget_prefixes()
        times.append(seconds(lambda: llm.generate(prompt(tokens), greedy(1))))
    return tokens / statistics.median(times)


def compare(model: Path, form: str, gguf: Path, tokens: int, rounds: int) -> dict[str, Any]:
    llm = LLM(model=str(model), max_num_batched_tokens=512, speculative_config=None, **FORMS[form])
    speed(llm, tokens)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(speed(llm, tokens))
        result = peers.prefill(str(gguf), tokens, peers.DEFAULT)
        if result["status"] != "ok":
            return {"outrider": ours, "llama.cpp": result}
        theirs.append(result["tokens_per_s"])
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {"outrider": ours, "llama.cpp": theirs, "ratio": ratio}


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, nargs=3, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model = checkpoint(given.folder / "llama100m")
    found: dict[str, Any] = {"conditions": conditions(), "tokens": given.tokens}
    for form, gguf in zip(FORMS, given.gguf):
        found[form] = compare(model, form, gguf, given.tokens, given.rounds)
    Console().print_json(json.dumps(found))
    write(given.json, found)
