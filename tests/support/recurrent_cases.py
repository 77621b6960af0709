"""Inputs of the recurrences: forests of rows over scattered slots, and the calls on them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from kernel_cases import c_backend
from torch import Tensor

from outrider.backends.cpu import backend as cpu
from outrider.backends.recurrence import Path, Recurrence
from outrider.backends.torch.recurrence import TorchRecurrence

SLOTS = 7
BACKENDS = ["torch"] + ["C"] * (cpu.library() is not None)


def recurrence_of(name: str) -> Recurrence:
    return TorchRecurrence() if name == "torch" else c_backend().recurrence


def random_path(rng: random.Random, longest: int = 12, most_nodes: int = 8) -> Path:
    """Requests of a chunk of known tokens, of which the last may be saved, and a tree of draft nodes.

    States after any rows may be copied to slots that no request has.
    """
    parent: list[int] = []
    slot: list[int] = []
    save: list[int] = []
    slots = rng.sample(range(SLOTS), rng.randint(1, 4))
    for own in slots:
        before, known = -1, rng.randint(0, longest)
        for _ in range(known):
            parent.append(before)
            before = len(parent) - 1
        save += [0] * known
        if known and rng.random() < 0.8:
            save[-1] = 1
        own_rows = [before, -1] if rng.random() < 0.2 else [before]  # -1: beside the known tokens
        for _ in range(rng.randint(0 if known else 1, most_nodes)):
            parent.append(rng.choice(own_rows))
            own_rows.append(len(parent) - 1)
            save.append(0)
        slot += [own] * (len(parent) - len(slot))
    others = [other for other in range(SLOTS) if other not in slots]
    chosen = rng.sample(range(len(parent)), min(len(parent), rng.randint(0, len(others))))
    fresh = {own for own in slots if rng.random() < 0.3}
    return _shuffled(rng, parent, slot, save, fresh, dict(zip(chosen, others)))


def _shuffled(
    rng: random.Random,
    parent: list[int],
    slot: list[int],
    save: list[int],
    fresh: set[int],
    copies: dict[int, int],
) -> Path:
    """The same forest in another order in which parents come first; in the given one half of the time."""
    if rng.random() < 0.5:
        return Path(parent, slot, save, fresh, copies)
    place, order, left = {-1: -1}, [], [*range(len(parent))]
    while left:
        row = rng.choice([row for row in left if parent[row] in place])
        left.remove(row)
        place[row] = len(order)
        order.append(row)
    moved = ([values[row] for row in order] for values in (slot, save))
    copied = {place[row]: other for row, other in copies.items()}
    return Path([place[parent[row]] for row in order], *moved, fresh, copied)


class Case(NamedTuple):
    """One function with its inputs by row, and the memory that it updates."""

    call: Callable[[Recurrence, list[Tensor], Path, Tensor], Tensor]
    inputs: list[Tensor]  # [N, …]
    memory: Tensor  # [S, …]
    constants: tuple[Tensor, ...] = ()  # rates and skips of a scan

    def run(self, recurrence: Recurrence, path: Path) -> tuple[Tensor, Tensor]:
        """The outputs, and the memory after the call."""
        memory = self.memory.clone()
        return self.call(recurrence, self.inputs, path, memory), memory

    def alone(self, recurrence: Recurrence, path: Path) -> tuple[Tensor, Tensor]:
        """The same by calls with one row each: every path from its stored state on."""
        memory, outputs = self.memory.clone(), []
        for row in range(len(path)):
            own, rows = self.memory.clone(), path_of(path, row)
            for i, at in enumerate(rows):
                fresh = {path.slot[at]} & path.fresh if i == 0 else ()
                one = Path([-1], [path.slot[at]], [1], fresh)
                out = self.call(recurrence, [x[at : at + 1] for x in self.inputs], one, own)
            outputs.append(out)
            if path.save[row]:
                memory[path.slot[row]] = own[path.slot[row]]
            if path.copy[row] >= 0:
                memory[path.copy[row]] = own[path.slot[row]]
        return torch.cat(outputs), memory


def path_of(path: Path, row: int) -> list[int]:
    """Rows from the first without a parent to `row`."""
    rows = [row]
    while path.parent[rows[0]] >= 0:
        rows.insert(0, path.parent[rows[0]])
    return rows


def columns(rows: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors [rows, …] that are columns of one wide tensor."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.randn(rows, sum(sizes) + 3).to(dtype).split([*sizes, 3], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes)]


def conv_case(
    rows: int, channels: int, taps: int, bias: bool, act: bool, dtype: torch.dtype = torch.float32
) -> Case:
    weight, shift = torch.randn(taps, channels), torch.randn(channels) if bias else None

    def call(recurrence: Recurrence, inputs: list[Tensor], path: Path, memory: Tensor) -> Tensor:
        return recurrence.short_conv(inputs[0], weight, shift, "silu" if act else None, path, memory)

    tails = torch.randn(SLOTS, taps - 1, channels).to(dtype).float()
    return Case(call, columns(rows, (channels,), dtype=dtype), tails)


def delta_case(
    rows: int,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    by_dim: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """heads: of keys and values.  sizes: their dimensions.  by_dim: a decay of each dimension of keys."""
    (key_heads, heads_), (key_dim, dim) = heads, sizes
    qkv = columns(rows, (key_heads, key_dim), (key_heads, key_dim), (heads_, dim), dtype=dtype)
    g = -torch.rand(rows, heads_, *[key_dim] * by_dim) * 2
    gates = [g, torch.rand(rows, heads_)]

    def call(recurrence: Recurrence, inputs: list[Tensor], path: Path, memory: Tensor) -> Tensor:
        q, k, v, g, beta = inputs
        return recurrence.gated_delta(q, k, v, g, beta, path, memory)

    return Case(call, [*qkv, *gates], torch.randn(SLOTS, heads_, dim, key_dim))


def scan_case(
    rows: int,
    heads: int,
    groups: int,
    sizes: tuple[int, int],
    by_dim: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """sizes: dimensions of a head, and of a state.  by_dim: a rate of every dimension of the state."""
    dim, state_dim = sizes
    x, b, c = columns(rows, (heads, dim), (groups, state_dim), (groups, state_dim), dtype=dtype)
    a, d = -torch.rand(heads, *[state_dim] * by_dim) * 4, torch.randn(heads)

    def call(recurrence: Recurrence, inputs: list[Tensor], path: Path, memory: Tensor) -> Tensor:
        x, dt, b, c = inputs
        return recurrence.selective_scan(x, dt, a, b, c, d, path, memory)

    states = torch.randn(SLOTS, heads, dim, state_dim)
    return Case(call, [x, torch.rand(rows, heads) * 2, b, c], states, (a, d))
