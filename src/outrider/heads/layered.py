"""Heads with a layer for each level: layer k reads the output of layer k - 1 at the same position t, beside
a token one position further on.

    position of the target      t         t+1       t+2
    state                       f_t                            the target emitted x_t+1 from it
    layer 0 reads               (f_t,      x_t+1)              output a_t, draft for t+2
    layer 1 reads               (a_t,                x_t+2)    output b_t, draft for t+3
    …                                                          layer k reads token t+k+1, makes draft k+1

Its K/V is in the slot of that token, as in heads/recurrent.py, in a table that begins k + 1 slots later than
the target's.  After the pending token e-1, the first pairs of layer k that read a draft token are at e-1-k …
e-2.  All nodes of the tree down to level k go through it, each with the output of layer k-1 at its parent.
Only the last states differ from certain ones, so the last k states are read twice.

                                slot of x_e-1   of draft 1   of draft 2
    layer 0                     (f_e-2, x_e-1)                             → draft 1
    layer 1                     (a_e-3, x_e-1)  (a_e-2, d1)                → draft 2
    layer 2                     (b_e-4, x_e-1)  (b_e-3, d1)  (b_e-2, d2)   → draft 3

After the last layer that one recurs: (o, draft) at t+1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.device import take
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.errors import ModelError
from outrider.heads.layer import Pairs, Stack
from outrider.heads.layouts import BLOCK_NAMES
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Forwards, Reading, Recurrent
from outrider.heads.recurrent_net import Net
from outrider.heads.trees import LevelTree

FOREIGN = "family_block"  # of a head's config: its blocks are those of the target's family, by any names
BLOCK = re.compile(r"layers\.(\d+)\.(.+)")
OWN = re.compile(r"(enorm|hnorm|eh_proj|norm)\.(weight|bias)")  # of a layer, beside its block


def _foreign(head: Head) -> list[str]:
    """Stored names of tensors that only the target's family knows; none if blocks are Llama's or Qwen's."""
    names = [name for name, _, _ in _block_tensors(head)]
    if not head.config.get(FOREIGN):
        names = [name for name, _, part in _block_tensors(head) if not re.fullmatch(BLOCK_NAMES, part)]
    return [head.stored[name] for name in sorted(names)]


def _block_tensors(head: Head) -> Iterator[tuple[str, str, str]]:
    """Name, number of the layer, and name in it, of every tensor of a block."""
    for name in head:
        found = BLOCK.fullmatch(name)
        if found is not None and not OWN.fullmatch(found[2]):
            yield name, found[1], found[2]


class LayeredNet(Net):
    """Layers on the target's kernels: x = eh_proj [enorm(e); hnorm(g)], then a transformer block: Llama's or
    Qwen's, or one of the target's family, which runs as the target does.

    Their outputs are [n, hidden], before the last norm.  prenorm: states are taken before the last norm, the
    target's and the layers' own.
    """

    def __init__(self, reader: Reader, target: Target, prenorm: bool) -> None:
        super().__init__(reader, target)
        head, layers, hidden = self.head, self.model.spec.layers, self.model.spec.hidden
        self.prenorm, self.taps = prenorm, (layers,) if prenorm else (FINAL,)
        self.count = sum(name.endswith(".eh_proj.weight") for name in head)
        names = [f"layers.{i}" for i in range(self.count)]
        self.eh_proj = [reader.linear(f"{name}.eh_proj", hidden, 2 * hidden) for name in names]
        foreign = _foreign(head)
        self.stack: Any = self._family_layers(foreign[0]) if foreign else Stack(reader, target, names, hidden)
        shift = float(self.stack.unit_norms)

        def norm(name: str) -> Tensor:
            return reader.vector(f"{name}.weight", hidden) + shift

        eps = self.stack.eps
        self.pairs = [Pairs(self.model, norm(f"{name}.enorm"), norm(f"{name}.hnorm"), eps) for name in names]
        if "layers.0.norm.weight" in head:
            self.norms = [norm(f"{name}.norm") for name in names]
        else:  # the target's follows
            last = target.checkpoint.last_norm()
            self.norms = [last.to(self.backend.device).contiguous()] * self.count

    def _family_layers(self, foreign: str) -> Any:
        """The blocks of the target's family, which run as the target does.  foreign: a tensor of one.

        Raises ModelError for options and blocks that it does not know.
        """
        reader, head = self.reader, self.head
        if reader.bits or reader.ranks > 1:
            option = "quantization" if reader.bits else "draft_tensor_parallel_size"
            raise ModelError(
                f"{head.name!r} has {foreign}, and so runs as the target does: leave {option} out."
            )
        tensors = {f"{layer}.{part}": head.raw(name) for name, layer, part in _block_tensors(head)}
        try:
            return self.model.more_layers(tensors, self.count)
        except ModelError as error:
            raise ModelError(f"{head.name!r} has {foreign}, which is not supported: {error}") from error

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor, layer: int = 0) -> Tensor:
        x = self.backend.linear(self.pairs[layer](step_input, g), self.eh_proj[layer])
        out: Tensor = self.stack(x, step_input, pool, only=layer)
        return out

    def from_output(self, o: Tensor, layer: int = 0) -> Tensor:
        return o if self.prenorm else self.normed(o, layer)

    def normed(self, o: Tensor, layer: int = 0) -> Tensor:
        return self.backend.rms_norm(o, self.norms[layer], self.stack.eps)

    def logits(self, o: Tensor, layer: int = 0) -> Tensor:
        return self.model.head_logits(self.normed(o, layer))


class LayerForwards(Forwards):
    """Forwards of a step through several layers.

    roots: of every layer, its output [trees, hidden] at the last certain pair of each tree.  outputs [n,
    hidden]: of the deepest layer so far, at the nodes of all trees.  rows: slot of a root or node -> its row
    in roots and outputs, one after the other.
    """

    net: LayeredNet

    def __init__(self, drafter: Recurrent, readings: Sequence[Reading]) -> None:
        super().__init__(drafter, readings)
        trees = [reading.tree for reading in readings if reading.tree is not None]
        self.root_rows = {tree.table[tree.base - 1]: row for row, tree in enumerate(trees)}
        self.rows, self.roots = dict(self.root_rows), list[Tensor]()
        self.outputs = self.states.new_empty(0, drafter.hidden)

    def catch_up(self) -> Tensor:
        """Layer after layer; each ends one pair before the one below it, whose token is not known."""
        g = self.net.from_states(self.states)
        counts = [reading.cursor.count for reading in self.readings]  # pairs of this layer
        for layer in range(self.net.count):
            step_input = self._pairs_of(layer, counts)
            if not step_input.length:
                break
            o = self.net.forward(step_input.build(), self.pool, g, layer)
            ends = zip(self.readings, accumulate(counts))
            last_rows = [end - 1 for reading, end in ends if reading.tree is not None]
            self.roots.append(take(o, last_rows))
            g = torch.cat([part[:-1] for part in torch.split(self.net.from_output(o, layer), counts)])
            counts = [max(0, count - 1) for count in counts]
        return self.roots[0]

    def _pairs_of(self, layer: int, counts: Sequence[int]) -> StepInput:
        """The forward of a layer over the first `counts` pending pairs of every row, not built."""
        step_input = StepInput()
        for reading, count in zip(self.readings, counts):
            if count:
                first = reading.cursor.first
                tokens = reading.row.tokens[first + layer + 1 : first + layer + 1 + count]
                step_input.chain(reading.table[layer + 1 :], first, tokens)
        return step_input

    def logits(self, level: int, o: Tensor) -> Tensor:
        return self.net.logits(o, min(level, self.net.count - 1))

    def deepen(self, level: int, trees: Sequence[LevelTree], o: Tensor) -> Tensor:
        last = self.net.count - 1
        if level <= last:
            return self._through_layer(level, trees)
        step_input = StepInput()
        for tree in trees:
            table = tree.table[last:]
            for tokens, slots in tree.frontier_paths:
                step_input.node(table, tree.base - last, slots, tokens[-1])
        return self.follow(step_input.build(), o)

    def follow(self, step_input: StepInput, o: Tensor) -> Tensor:
        last = self.net.count - 1
        return self.net.forward(step_input, self.pool, self.net.from_output(o, last), last)

    @property
    def on_device(self) -> bool:
        return super().on_device and self.net.count == 1  # the slots of a second layer begin elsewhere

    def _through_layer(self, layer: int, trees: Sequence[LevelTree]) -> Tensor:
        """Output [n, hidden] of `layer` at the frontiers.  All nodes on the paths to them pass it."""
        step_input, frontier = StepInput(), list[int]()
        row_of = dict[int, int]()  # slot of a node -> its row of the forward
        parents = list[int]()  # of each of these rows: its parent's row in roots and outputs of layer - 1
        for tree in trees:
            table, root_slot = tree.table[layer:], tree.table[tree.base - 1]
            paths = tree.frontier_paths
            for token, slots in _distinct_nodes(paths):
                parents.append(self.rows[slots[-2] if len(slots) > 1 else root_slot])
                row_of[slots[-1]] = step_input.length
                step_input.node(table, tree.base - layer, slots, token)
            frontier += [row_of[slots[-1]] for _, slots in paths]
        below = torch.cat([self.roots[layer - 1], self.outputs])
        g = self.net.from_output(below[parents], layer - 1)
        self.outputs = self.net.forward(step_input.build(), self.pool, g, layer)
        self.rows = self.root_rows | {slot: len(self.root_rows) + row for slot, row in row_of.items()}
        return self.outputs[frontier]


def _distinct_nodes(paths: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[int, list[int]]]:
    """Token and path of slots of every node on these paths (tokens, slots), once each, parents first."""
    seen = set[int]()
    for tokens, slots in paths:
        for depth, (token, slot) in enumerate(zip(tokens, slots), start=1):
            if slot not in seen:
                seen.add(slot)
                yield token, slots[:depth]
