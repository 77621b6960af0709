"""A draft on another machine than its target: time a token by the round trip between the two.

    OMP_NUM_THREADS=1 python benchmarks/apart.py [--trips 0 2 5 10 20] [--rounds 5] [--json OUT]

Two processes of one thread: rank 0 drafts and schedules, rank 1 has all layers of the target
(`pipeline_layers`).  Every result comes to rank 0 so many milliseconds late, which stands for both ways of a
network.  Beside it, in one process of one thread: the target alone, and with the draft beside it.

A step of a lone request takes what it takes without a network, and the trip.  So drafting at a distance pays
below a trip of `tokens a step * plain - step`, which is printed beside what was measured.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from command_line import parser_of, write

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.parallel import group

TARGET, TOKENS, DEPTH = "builtin-100m", 96, 3
CONFIG = {"model": "builtin-draft", "num_speculative_tokens": DEPTH}
REQUESTS = (1, 4)


class Network:
    """Delays what `group` resolves by `trip` seconds, in order."""

    def __init__(self) -> None:
        self.trip, self.resolve = 0.0, group._resolve
        self.late: queue.SimpleQueue[tuple[float, Any, Any]] = queue.SimpleQueue()
        group._resolve = self.send
        threading.Thread(target=self.run, daemon=True).start()

    def send(self, future: Any, result: Any) -> None:
        if self.trip:
            self.late.put((time.perf_counter() + self.trip, future, result))
        else:
            self.resolve(future, result)

    def run(self) -> None:
        while True:
            due, future, result = self.late.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            self.resolve(future, result)


def measure(llm: LLM, requests: int) -> tuple[float, float]:
    """Milliseconds between two tokens of a request, the first one left out; tokens of a step."""
    llm.engine.forget_prefixes()
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([f"The future of AI is {i}" for i in range(requests)], params)
    times = [output.outputs[0].token_times for output in outputs]
    steps = [output.speculation.tokens_per_step for output in outputs]
    return 1e3 * sum((each[-1] - each[0]) / (TOKENS - 1) for each in times) / requests, sum(steps) / requests


def rounds(trips: Sequence[float], count: int) -> list[dict[str, Any]]:
    """Medians by place of the draft, round trip and requests.  Places alternate in each round."""
    network, options = Network(), {"max_num_seqs": max(REQUESTS), "max_model_len": 256}
    torch.set_num_threads(1)
    one = LLM(TARGET, **options)
    layers = one.engine.decoder.spec.layers
    torch.set_num_threads(2)  # shared by the ranks
    two = LLM(TARGET, pipeline_parallel_size=2, pipeline_layers=f"0,{layers}", **options)
    two.use(CONFIG)
    cases: list[tuple[str, float]] = [("plain", 0.0), ("beside", 0.0), *(("apart", trip) for trip in trips)]
    found: dict[tuple[str, float, int], list[tuple[float, float]]] = {}
    for _ in range(count + 1):
        for place, trip in cases:
            if place != "apart":
                one.use(CONFIG if place == "beside" else None)
            network.trip = trip / 1e3
            for requests in REQUESTS:
                own = measure(two if place == "apart" else one, requests)
                found.setdefault((place, trip, requests), []).append(own)
            network.trip = 0.0
    rows = []
    for (place, trip, requests), figures in found.items():
        later = figures[1:]  # the first round warms
        row: dict[str, Any] = {"draft": place, "trip_ms": trip, "requests": requests}
        row |= {"token_ms": median(ms for ms, _ in later), "tokens_per_step": later[-1][1]}
        rows.append(row)
    return rows


def border(rows: Sequence[dict[str, Any]]) -> float:
    """The trip in ms below which a lone request is faster with its draft apart than without, by the rule."""
    lone = {(row["draft"], row["trip_ms"]): row for row in rows if row["requests"] == 1}
    near = min((row for (place, _), row in lone.items() if place == "apart"), key=lambda row: row["trip_ms"])
    steps = near["tokens_per_step"]
    return float(steps * (lone["plain", 0.0]["token_ms"] - near["token_ms"]) + near["trip_ms"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trips", type=float, nargs="+", default=[0, 2, 5, 10, 20], help="milliseconds")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = rounds(given.trips, given.rounds)
    for row in rows:
        print(*(f"{value:.2f}" if isinstance(value, float) else value for value in row.values()), sep="  ")
    print(f"border: {border(rows):.1f} ms")
    write(given.json, {"conditions": conditions(), "border_ms": border(rows), "rows": rows})


if __name__ == "__main__":
    main()
