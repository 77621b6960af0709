"""Autoscaling on Ray Serve: one replica becomes two under load, and one again behind it.

    python benchmarks/ray_scaling.py [--clients 6] [--seconds 60] [--json OUT]

Streams of the requests of `ray_kills.py`, which have to be the offline API's while replicas come and go.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray
from ray import serve
from ray_kills import CONFIG, MODEL, OPTIONS, PORT, Clients, conversations

from outrider.serve.options import ServerOptions
from outrider.serve.ray import deployment

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    turns = [turn for turns in conversations() for turn in turns]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
    serve.start(http_options={"port": PORT})
    app = deployment(
        MODEL, speculative_config=CONFIG, replicas=SCALING, threads=1,
        server=ServerOptions(), actor={"num_cpus": 0.1}, **OPTIONS,
    )  # fmt: skip
    serve.run(app, name="scaling")
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
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    serve.shutdown()
    ray.shutdown()
    raise SystemExit(bool(clients.wrong) or [count for _, count in changes][:2] != [1, 2])


if __name__ == "__main__":
    main()
