"""Plans by simulation (simulation.py): replicas of models on machines of a data sheet, random arrivals.

    python benchmarks/scale.py [--trace benchmarks/acceptance.json] [--json OUT]
    python benchmarks/scale.py --distances [--json OUT]                  a draft on another machine only
    python benchmarks/scale.py --record benchmarks/acceptance.json       accepted lengths of real runs
    python benchmarks/scale.py --validate PROCESSES [--json OUT]         real processes against the simulation

Requests arrive at random (Poisson) and go to the replica with the fewest open ones.  `Machine` gives the
seconds of a step.  Hardware figures are data sheets' times an efficiency, not measurements; accepted lengths
were recorded.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from scale_real import record, validate
from simulation import CHUNK, MOST_DEPTH, Cost, Replica, Request, Trace, best_depth, simulate

from outrider.bench.conditions import conditions


@dataclass(frozen=True)
class Machine(Cost):
    """A model on `devices` tensor parallel devices, by a roofline.

    params, draft_params: weights of target and draft.  layers, hidden, kv_bytes: of one token, all layers
    bandwidth, flops, link: of a device, in bytes, operations and bytes a second, times `efficiency`
    latency: seconds of one sum over the devices.  launch: seconds of a step on the host
    distance: seconds to the machine that drafts and schedules and back; None: the target's own
    """

    name: str
    params: float
    layers: int
    hidden: int
    kv_bytes: float
    devices: int = 1
    draft_params: float = 1e9
    bytes_per_weight: float = 2.0
    bandwidth: float = 3.35e12
    flops: float = 9.9e14
    link: float = 4.5e11
    efficiency: float = 0.6
    latency: float = 10e-6
    launch: float = 1e-3
    dollars: float = 2.5  # of a device, an hour
    distance: float | None = None

    def forward(self, rows: int, context: int) -> float:
        speed = self.devices * self.efficiency
        read = (self.params * self.bytes_per_weight + context * self.kv_bytes) / (self.bandwidth * speed)
        computed = 2 * self.params * rows / (self.flops * speed)
        sums = 0.0
        if self.devices > 1:
            sums = 2 * self.layers * (self.latency + 4 * rows * self.hidden / (self.link * self.efficiency))
        return max(read, computed) + sums + self.launch

    def draft(self, depth: int, batch: int, prompt: int = 0) -> float:
        """Seconds of chains on one device."""
        read = self.draft_params * self.bytes_per_weight / (self.bandwidth * self.efficiency)
        token = 2 * self.draft_params / (self.flops * self.efficiency)
        return depth * (max(read, token * batch) + 30e-6) + token * prompt

    def step(self, rows: int, context: int, depth: int, batch: int, prompt: int = 0) -> float:
        """As `Cost.step`.  With a draft on another machine, each of the two has half of the requests at a
        time, as a pipeline of two stages."""
        if self.distance is None:
            return super().step(rows, context, depth, batch, prompt)
        if rows < 2 + depth:
            return super().step(rows, context, depth, batch, prompt) + self.distance
        target = self.forward(-(-rows // 2), context // 2)
        draft = self.draft(depth, -(-batch // 2), prompt // 2) if depth else 0.0
        return max(2 * target, 2 * draft, target + draft + self.distance)


MACHINES = [
    Machine("8B on 1", 8e9, 32, 4096, 131_072, draft_params=1e9),
    Machine("70B on 4", 70e9, 80, 8192, 327_680, 4, draft_params=1e9),
    Machine("405B on 8", 405e9, 126, 16384, 516_096, 8, draft_params=8e9, bytes_per_weight=1.0),
]


def arrivals(trace: Trace, rate: float, count: int, seed: int = 0) -> list[Request]:
    """Requests at `rate` a second: prompts of 50 to 2,000 tokens, outputs of 50 to 500."""
    rng, now, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        run = rng.choice(trace.runs)
        start = rng.randrange(len(run))
        prompt = int(50 * 40 ** rng.random())
        made.append(Request(now, prompt, rng.randint(50, 500), [*run[start:], *run[:start]]))
    return made


def capacity(cost: Cost, most: int) -> float:
    """Requests a second of one replica without speculation, its batch full, with their prompts."""
    seconds = 275 * cost.forward(most, most * 675) / most + 530 / CHUNK * cost.forward(CHUNK, 530)
    return 1 / seconds


MODES = {"plain": 0, "fixed 4": 4, "adaptive": None}


def table(trace: Trace, machines: Sequence[Machine], most: int, seconds: float) -> list[dict[str, Any]]:
    """Figures by machine, number of replicas, load and mode."""
    gains, found = trace.emitted_by_depth(), []
    for machine in machines:
        full = capacity(machine, most)
        for count, loads in ((1, (0.1, 0.5, 1.0, 1.5, 2.0)), (10, (0.5,)), (100, (0.5,)), (1000, (0.5,))):
            for load in loads:
                for mode, depth in MODES.items():
                    replicas = [Replica(machine, gains, depth, most) for _ in range(count)]
                    rate = load * full * count
                    figures = simulate(replicas, arrivals(trace, rate, int(rate * seconds * (1 + 9 / count))))
                    dollars = machine.dollars * machine.devices * count / 3600
                    cost = 1e6 * dollars / figures.tokens_per_second
                    row = {"machine": machine.name, "replicas": count, "load": load, "mode": mode}
                    row |= {**vars(figures), "dollars_per_million": cost}
                    found.append(row)
                    show(row)
    return found


def show(row: dict[str, Any]) -> None:
    texts = [f"{value:9.3f}" if isinstance(value, float) else f"{value!s:>10}" for value in row.values()]
    print(*texts, flush=True)


DISTANCES = (1, 3, 8, 12, 20)  # ms


def distances(trace: Trace, machine: Machine, most: int) -> list[dict[str, Any]]:
    """Figures with the draft on another machine, by the round trip to it, beside those without.

    Of a lone request at a time, and under load.
    """
    gains, found = trace.emitted_by_depth(), list[dict[str, Any]]()
    places: list[tuple[str, Machine, int | None]] = [
        ("plain", machine, 0),
        ("beside", machine, None),
        *((f"{ms} ms", replace(machine, distance=ms / 1e3), None) for ms in DISTANCES),
    ]
    for batch, load, count in ((1, 0.3, 200), (most, 0.3, 400), (most, 1.0, 400)):
        requests = arrivals(trace, load * capacity(machine, batch), count)
        for place, cost, depth in places:
            figures = simulate([Replica(cost, gains, depth, batch)], copy.deepcopy(requests))
            row = {"machine": machine.name, "rows": batch, "load": load, "draft": place, **vars(figures)}
            found.append(row)
            show(row)
    return found


def borders(trace: Trace, machine: Machine) -> dict[str, Any]:
    """The batch from which drafting stops to pay, and the largest distance of a draft that still pays."""
    gains = trace.emitted_by_depth()
    batch = next((n for n in range(1, 2049) if best_depth(machine, gains, n, 675 * n) == 0), None)
    depth = best_depth(machine, gains, 1, 675)
    own = machine.draft(depth, 1)
    plain = machine.forward(1, 675)
    spent = machine.forward(1 + depth, 675) + own
    return {
        "machine": machine.name,
        "batch": batch,
        "depth": depth,
        "draft_ms": 1e3 * own,  # a larger distance than this makes a draft beside the target faster
        "most_distance_ms": 1e3 * (gains[depth] * plain - spent),
        "gain": gains[depth] * plain / spent,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, default=Path(__file__).with_name("acceptance.json"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--validate", type=int, metavar="PROCESSES")
    parser.add_argument("--distances", action="store_true")
    parser.add_argument("--batch", type=int, default=64, help="most rows of a replica")
    parser.add_argument(
        "--seconds", type=float, default=20, help="that 1,000 replicas run; one runs ten times as long"
    )
    given = parser.parse_args()
    if given.record:
        given.record.write_text(json.dumps({"depth": MOST_DEPTH, "runs": record(MOST_DEPTH)}) + "\n")
        return
    if given.validate:
        found = validate(given.validate)
        print(found)
        write(given.json, {"conditions": conditions(), "rows": found})
        return
    trace = Trace(json.loads(given.trace.read_text())["runs"])
    print("tokens a step by depth:", *(f"{gain:.2f}" for gain in trace.emitted_by_depth()))
    edges = [borders(trace, machine) for machine in MACHINES]
    for edge in edges:
        print(edge)
    away = [row for machine in MACHINES for row in distances(trace, machine, given.batch)]
    rows = [] if given.distances else table(trace, MACHINES, given.batch, given.seconds)
    write(given.json, {"conditions": conditions(), "borders": edges, "distances": away, "rows": rows})


if __name__ == "__main__":
    main()
