"""Autoscaling on Ray Serve: one replica becomes two under load, and one again behind it.

    python benchmarks/ray_scaling.py [--clients 6] [--seconds 60] [--json OUT]

Streams of the requests of `ray_kills.py`, which have to be the offline API's while replicas come and go.
"""

from __future__ import annotations

import json
import time
from statistics import median
from typing import Any

import ray
from command_line import parser_of, write
from ray import serve
from ray_kills import Clients, conversations, start

SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "metrics_interval_s": 1,
    "look_back_period_s": 4,
    "upscale_delay_s": 2,
    "downscale_delay_s": 10,
}
QUIET = 120.0  # seconds for the second replica to end, at most


def running() -> int:
    """Replicas that accept requests."""
    deployments = serve.status().applications["scaling"].deployments
    return deployments["Model"].replica_states.get("RUNNING", 0)


def watch(seconds: float, began: float, until: int) -> list[tuple[float, int]]:
    """(seconds since `began`, replicas) at every change, until so many run or the time is over."""
    found, end = list[tuple[float, int]](), time.monotonic() + seconds
    while time.monotonic() < end and not (found and found[-1][1] == until):
        if not found or found[-1][1] != running():
            found.append((round(time.monotonic() - began, 1), running()))
        time.sleep(0.25)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    turns = [turn for turns in conversations() for turn in turns]
    start("scaling", SCALING)
    began, clients = time.monotonic(), Clients(turns, given.clients)
    changes = watch(given.seconds, began, 2)
    time.sleep(max(0.0, began + given.seconds - time.monotonic()))
    clients.stop()
    changes += watch(QUIET, began, 1)
    result: dict[str, Any] = {
        "clients": given.clients,
        "seconds": given.seconds,
        "replicas": changes,
        "streams": len(clients.seconds),
        "wrong": clients.wrong,
        "median_seconds": median(clients.seconds),
    }
    print(json.dumps(result, indent=1))
    write(given.json, result)
    serve.shutdown()
    ray.shutdown()
    raise SystemExit(bool(clients.wrong) or [count for _, count in changes][:2] != [1, 2])


if __name__ == "__main__":
    main()
