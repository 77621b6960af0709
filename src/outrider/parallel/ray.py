"""Start of the ranks of a model where Ray has placed them (the extra `ray`).

Ray reserves the resources of all ranks, a *bundle* for each, in one placement group.  The actor that loads
the model runs in the first bundle and is rank 0.  Every other rank is a task in a bundle of its own, with the
environment that a launcher would give it (see start.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util import get_current_placement_group, get_node_ip_address, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.errors import ConfigError
from outrider.parallel.start import run_rank


def bundle(actor: Mapping[str, Any]) -> dict[str, float]:
    """The resources of ray_actor_options, as those of a placement group.  Raises ConfigError for none."""
    known = {
        "CPU": actor.get("num_cpus", 1),
        "GPU": actor.get("num_gpus", 0),
        "memory": actor.get("memory", 0),
    }
    asked = {name: amount for name, amount in {**known, **actor.get("resources", {})}.items() if amount}
    if not asked:
        raise ConfigError("placement: give each rank num_cpus, num_gpus or resources in `actor`.")
    return asked


def start_ranks(actor: Mapping[str, Any]) -> None:
    """Start the other ranks of the placement group that this actor is in, and make its process rank 0.

    actor: ray_actor_options of every rank
    """
    group = get_current_placement_group()
    bundles = bundles_by_rank(placement_group_table(group)["bundles_to_node_id"])
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(len(bundles)),
        "MASTER_ADDR": get_node_ip_address(),
        "MASTER_PORT": str(port),
        "LOCAL_RANK": "0",  # Ray shows a task its own GPU only
    }
    task = ray.remote(max_retries=0, **actor)(_run_rank)
    for rank, index in enumerate(bundles[1:], start=1):
        place = PlacementGroupSchedulingStrategy(group, index)
        placed = task.options(name=f"rank {rank}", scheduling_strategy=place)
        placed.remote({**shared, "RANK": str(rank)})
    os.environ.update(shared, RANK="0")


def bundles_by_rank(nodes: Mapping[int, str]) -> Sequence[int]:
    """The bundle of every rank, such that ranks of one machine follow one another.

    Neighbouring ranks share a stage, and so the sums in every layer.  nodes: bundle -> machine.
    """
    return sorted(nodes, key=lambda index: (nodes[index] != nodes[0], nodes[index], index))


def _run_rank(environment: Mapping[str, str]) -> None:
    """Be a rank until its model ends."""
    os.environ.update(environment)
    run_rank()
