"""Static trees published with Medusa and EAGLE, as numbers of children per node.

A node is its path of ranks.  The children of a node have the ranks 0, 1, …  For example, "root:2 0:1" has the
nodes (0,), (1,) and (0, 0).
"""

from __future__ import annotations

Path = tuple[int, ...]

MEDUSA = {
    "mc_sim_7b_63": (
        "root:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 "
        "20:1 000:2"
    ),
    "vicuna_7b_stage2": (
        "root:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 "
        "001:1 002:1 010:1"
    ),
    "vicuna_7b_stage1": (
        "root:10 0:10 1:7 2:4 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 05:1 10:2 20:1 000:1"
    ),
    "vicuna_7b_stage1_ablation": (
        "root:10 0:10 1:4 2:2 3:2 4:1 5:1 6:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 "
        "001:1 002:1 010:1"
    ),
    "vicuna_13b_stage2": (
        "root:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 "
        "002:1 010:1 100:1"
    ),
    "vicuna_13b_stage1": (
        "root:10 0:10 1:7 2:4 3:2 4:2 5:1 6:1 7:1 8:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:1"
    ),
    "vicuna_33b_stage2": (
        "root:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 "
        "001:1 010:1"
    ),
    "vicuna_33b_stage1": (
        "root:10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1"
    ),
    "zephyr_stage2": (
        "root:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1"
    ),
}
# 25 nodes, despite its name.
EAGLE = {"mc_sim_7b_63": "root:4 0:3 1:2 2:2 3:1 00:3 01:2 02:2 10:1 000:3 0000:2"}


def chain_paths(levels: int) -> list[Path]:
    """A chain, as a tree with one node per level."""
    return [(0,) * level for level in range(1, levels + 1)]


def paths(text: str) -> list[Path]:
    """Nodes of a published tree, breadth first."""
    found: list[Path] = []
    for entry in text.split():
        path, _, children = entry.partition(":")
        parent = () if path == "root" else tuple(map(int, path))
        found.extend((*parent, rank) for rank in range(int(children)))
    return sorted(found, key=len)
