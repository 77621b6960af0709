"""`Recurrence` in torch: any device, and the reference of the C kernels.

Rows are computed level by level: the tokens without a parent in the path, then their children, and so on.
Only the states of the level before are kept.  The levels go to a device once per step, and nothing is read
back.  On a CPU every row is computed alone, as torch's functions compute the last elements of a tensor in
another way than those before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.backends.recurrence import Activation, Path
from outrider.core.device import Numbers

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "sigmoid": torch.sigmoid}


class Level(NamedTuple):
    """Rows of one depth, and where their parents are in the level before; all int64.

    parents: [n], indices of the level before.  In the first level slots.
    fresh:   [n], 1 in the first level if the slot has no state yet
    saved:   indices of the level whose states are stored in the slots `to`, copies included
    """

    rows: Tensor
    parents: Tensor
    fresh: Tensor
    saved: Tensor
    to: Tensor


class Windows(NamedTuple):
    """For each row the inputs before it: indices of [stored tails of the `slots` | inputs | a row of zeros].

    before: [N, K-1], the oldest first
    saved:  rows whose last K-1 inputs are stored in the slots `to`, copies included
    """

    slots: Tensor
    before: Tensor
    saved: Tensor
    to: Tensor


def levels_of(path: Path, device: torch.device) -> list[Level]:
    """The levels of a path on a device, made once."""

    def make(path: Path) -> list[Level]:
        depths: list[list[int]] = []
        depth_of, index = [0] * len(path), [0] * len(path)
        for row, before in enumerate(path.parent):
            depth = depth_of[row] = 0 if before < 0 else depth_of[before] + 1
            if depth == len(depths):
                depths.append([])
            index[row] = len(depths[depth])
            depths[depth].append(row)
        parts: list[list[int]] = []
        for depth, rows in enumerate(depths):
            stores = _stores(path, rows)
            parents = [index[path.parent[row]] if depth else path.slot[row] for row in rows]
            fresh = [int(depth == 0 and path.slot[row] in path.fresh) for row in rows]
            saved = [index[row] for row, _ in stores]
            parts += [rows, parents, fresh, saved, [slot for _, slot in stores]]
        moved = _on(parts, device)
        return [Level(*moved[at : at + 5]) for at in range(0, len(moved), 5)]

    return path.derived((levels_of, device), make)


def windows_of(path: Path, taps: int, device: torch.device) -> Windows:
    """The windows of a convolution along a path on a device, made once."""

    def make(path: Path) -> Windows:
        slots = sorted({*path.slot})
        place = {slot: i * (taps - 1) for i, slot in enumerate(slots)}
        first, zeros = len(slots) * (taps - 1), len(slots) * (taps - 1) + len(path)
        before: list[list[int]] = []
        for row, parent in enumerate(path.parent):
            if parent >= 0:
                before.append([*before[parent], first + parent][1:])
            elif path.slot[row] in path.fresh:
                before.append([zeros] * (taps - 1))
            else:
                stored = place[path.slot[row]]
                before.append([*range(stored, stored + taps - 1)])
        stores = _stores(path, range(len(path)))
        flat = [index for window in before for index in window]
        moved = _on([slots, flat, [row for row, _ in stores], [slot for _, slot in stores]], device)
        return Windows(moved[0], moved[1].view(len(path), taps - 1), *moved[2:])

    return path.derived((windows_of, taps, device), make)


def _stores(path: Path, rows: Iterable[int]) -> list[tuple[int, int]]:
    """(row, slot that its state is written to), of those among `rows` that are saved or copied."""
    stores = list[tuple[int, int]]()
    for row in rows:
        if path.save[row]:
            stores.append((row, path.slot[row]))
        if path.copy[row] >= 0:
            stores.append((row, path.copy[row]))
    return stores


def _on(parts: list[list[int]], device: torch.device) -> list[Tensor]:
    """Lists of numbers on a device, by one copy."""
    flat = [number for part in parts for number in part]
    return [*torch.split(Numbers.of(flat, len(flat)).on(device), [len(part) for part in parts])]


def by_row(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """A function of rows [n, …]; on a CPU of one row after the other."""
    if inputs[0].device.type != "cpu" or len(inputs[0]) < 2:
        return compute(*inputs)
    return torch.cat([compute(*[x[row : row + 1] for x in inputs]) for row in range(len(inputs[0]))])


def normalized(x: Tensor) -> Tensor:
    """x / |x| along the last dimension."""
    wide = x.float()
    return wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)


class TorchRecurrence:
    """`Recurrence` in torch."""

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Literal["silu"] | None,
        path: Path,
        tails: Tensor,
    ) -> Tensor:
        taps, channels = weight.shape
        slots, before, saved, to = windows_of(path, taps, x.device)
        wide, stored = x.float(), tails[slots].float().view(-1, channels)
        seen = torch.cat([stored, wide, wide.new_zeros(1, channels)])
        y = seen.new_zeros(len(x), channels) if bias is None else bias.float().expand(len(x), channels)
        for tap in range(taps - 1):
            y = y + seen[before[:, tap]] * weight[tap].float()
        y = y + wide * weight[taps - 1].float()
        rows = len(stored) + saved
        tails[to] = seen[torch.cat([before[saved, 1:], rows[:, None]], dim=1)].to(tails)
        return (y if activation is None else by_row(ACTIVATIONS[activation], y)).to(x.dtype)

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        repeats, scale = v.shape[1] // k.shape[1], q.shape[-1] ** -0.5

        def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> _Stepped:
            q = normalized(q).mul(scale).repeat_interleave(repeats, dim=1)[:, :, None]
            k = normalized(k).repeat_interleave(repeats, dim=1)[:, :, None]
            decay = g.float().exp()
            state = state * (decay[..., None, None] if decay.dim() == 2 else decay[:, :, None])
            delta = (v.float() - (state * k).sum(-1)) * beta.float()[..., None]
            state = state + delta[..., None] * k
            return state, (state * q).sum(-1)

        return _scan(step, (q, k, v, g, beta), path, states).to(q.dtype)

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, path: Path, states: Tensor
    ) -> Tensor:
        heads = x.shape[1]
        repeats, rates = heads // b.shape[1], a.float().view(heads, -1)

        def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> _Stepped:
            wide, dt = x.float(), dt.float()[..., None]
            b, c = (part.float().repeat_interleave(repeats, dim=1)[:, :, None] for part in (b, c))
            state = state * (dt * rates).exp()[:, :, None] + (wide * dt)[..., None] * b
            return state, (state * c).sum(-1) + wide * d.float()[:, None]

        return _scan(step, (x, dt, b, c), path, states).to(x.dtype)

    def sigmoid(self, x: Tensor) -> Tensor:
        return by_row(torch.sigmoid, x.float())

    def softplus(self, x: Tensor, bias: Tensor, low: float = 0.0, high: float = float("inf")) -> Tensor:
        return by_row(F.softplus, x.float() + bias.float()).clamp(low, high)

    def gate(self, x: Tensor, z: Tensor, activation: Activation) -> Tensor:
        return (x.float() * by_row(ACTIVATIONS[activation], z.float())).to(x.dtype)

    def gated_norm(
        self,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        activation: Activation = "silu",
        group: int = 0,
        gate_first: bool = False,
    ) -> Tensor:
        width = weight.shape[0]
        wide, gates = x.float().reshape(-1, width), z.float().reshape(-1, width)
        gates = by_row(ACTIVATIONS[activation], gates)
        if gate_first:
            wide = wide * gates
        groups = wide.view(len(wide), -1, group or width)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
        wide = groups.view(-1, width) * weight.float()
        return (wide if gate_first else wide * gates).view(x.shape).to(x.dtype)


_Stepped = tuple[Tensor, Tensor]  # states after the rows of a level, and their outputs


def _scan(step: Callable[..., _Stepped], inputs: tuple[Tensor, ...], path: Path, states: Tensor) -> Tensor:
    """Outputs float32 [N, …] of a recurrence along a path.

    step: (states of the parents [n, …], inputs [n, …] of the rows), for the rows of one level
    """
    levels = levels_of(path, states.device)
    outputs, order = [], []
    current = states
    for depth, level in enumerate(levels):
        before = current[level.parents]
        if depth == 0:
            empty = level.fresh.bool().view(-1, *[1] * (states.dim() - 1))
            before = before.masked_fill(empty, 0.0)
        current, out = _stepped(step, before, [x[level.rows] for x in inputs])
        if len(level.to):
            states[level.to] = current[level.saved]
        outputs.append(out)
        order.append(level.rows)
    if not outputs:
        return states.new_empty(0, *states.shape[1:3])
    found = torch.cat(outputs)
    return torch.empty_like(found).index_copy_(0, torch.cat(order), found)


def _stepped(step: Callable[..., _Stepped], before: Tensor, inputs: list[Tensor]) -> _Stepped:
    """One step of a level; on a CPU of one row after the other."""
    if before.device.type != "cpu" or len(before) < 2:
        return step(before, *inputs)
    rows = [step(before[i : i + 1], *[x[i : i + 1] for x in inputs]) for i in range(len(before))]
    return torch.cat([state for state, _ in rows]), torch.cat([out for _, out in rows])
