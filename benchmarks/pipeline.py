"""Time per token of a pipeline: with and without speculation, with overlapping steps and one after another.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--stages 2] [--rounds 5] [--json OUT]

Each stage is a process with one thread; the draft model runs in the first one's.  Runs alternate, and a
round's times are compared with that round's plain ones, steps one after another.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from command_line import parser_of, write

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions

CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft model": {"model": "builtin-draft", "num_speculative_tokens": 3},
    "auto": {"method": "auto", "model": "builtin-draft"},
}
TOKENS = 96


def milliseconds(llm: LLM, requests: int) -> float:
    """Milliseconds between two tokens of a request, the first one left out."""
    llm.engine.forget_prefixes()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([f"The future of AI is {i}" for i in range(requests)], params)
    times = [output.outputs[0].token_times for output in outputs]
    return 1e3 * sum((each[-1] - each[0]) / (TOKENS - 1) for each in times) / requests


def measure(llm: LLM, stages: int, rounds: int) -> list[dict[str, Any]]:
    cases = [
        (requests, name, overlap) for requests in (1, 4, 8) for name in CONFIGS for overlap in (1, stages)
    ]
    found: dict[tuple[int, str, int], list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for requests, name, overlap in cases:
            llm.use(CONFIGS[name])
            llm.engine.overlap = overlap
            found[requests, name, overlap].append(milliseconds(llm, requests))
    rows = []
    for (requests, name, overlap), times in found.items():
        ratios = [plain / own for plain, own in zip(found[requests, "plain", 1], times)]
        row = {"requests": requests, "method": name, "steps in flight": overlap}
        rows.append({**row, "ms per token": median(times), "speed-up": median(ratios)})
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.stages)  # shared by the ranks: one each
    llm = LLM("builtin", pipeline_parallel_size=given.stages, max_num_seqs=8, max_model_len=256)
    milliseconds(llm, 8)
    rows = measure(llm, given.stages, given.rounds)
    for row in rows:
        print(*(f"{value:.3f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    write(given.json, {"conditions": conditions(), "rows": rows})


if __name__ == "__main__":
    main()
