"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608): layers trained and
shipped with a target.

    position of the target      t         t+1       t+2
    state                       f_t                            the target emitted x_t+1 from it
    layer 0 reads               (f_t,      x_t+1)              output a_t, draft for t+2
    layer 1 reads               (a_t,                x_t+2)    output b_t, draft for t+3
    …                                                          layer k reads token t+k+1, makes draft k+1

Layer k reads the output of layer k-1 at the same t, beside a token one position further on.  Its K/V is
in the slot of that token, as in heads/recurrent.py, in a table that begins k + 1 slots later than the
target's.  After the pending token e-1, the first pairs of layer k that read a draft token are at e-1-k …
e-2.  All nodes of the tree down to level k go through it, each with the output of layer k-1 at its parent.
Only the last states differ from certain ones, so the last k states are read twice.

                                slot of x_e-1   of draft 1   of draft 2
    layer 0                     (f_e-2, x_e-1)                             → draft 1
    layer 1                     (a_e-3, x_e-1)  (a_e-2, d1)                → draft 2
    layer 2                     (b_e-4, x_e-1)  (b_e-3, d1)  (b_e-2, d2)   → draft 3

After the last layer that one recurs, as does the only layer of a file with one (FastMTP, arXiv
2509.18362): (o, draft) at t+1.

Other engines zero the embedding at position 0, because they place pairs at their tokens and no state
precedes token 0. Here no pair has token 0, so nothing is zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.validate import FLAG, check_fields, optional
from outrider.draft.mtp.layouts import FORMAT
from outrider.draft.mtp.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.layer import Pairs, Stack
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Forwards, Net, Reading, Recurrent, RecurrentOptions
from outrider.heads.trees import KVTree

RECURRENT_DEPTH = 3  # levels that a single layer drafts


class Packed(Net):
    """Layers on the target's kernels: x = eh_proj [enorm(e); hnorm(g)], then a transformer block.

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
        self.stack = Stack(reader, target, names, hidden)
        enorms, hnorms = (
            [reader.vector(f"{name}.{norm}.weight", hidden) for name in names] for norm in ("enorm", "hnorm")
        )
        self.pairs = [Pairs(self.model, *norms, self.stack.sizes.eps) for norms in zip(enorms, hnorms)]
        if "layers.0.norm.weight" in head:
            self.norms = [reader.vector(f"{name}.norm.weight", hidden) for name in names]
        else:  # the target's follows
            last = target.checkpoint.tensors().get("model.norm.weight", hidden)
            self.norms = [last.float().to(self.backend.device).contiguous()] * self.count

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor, layer: int = 0) -> Tensor:
        x = self.backend.linear(self.pairs[layer](step_input, g), self.eh_proj[layer])
        return self.stack.blocks[layer](x, step_input, pool, layer)

    def from_output(self, o: Tensor, layer: int = 0) -> Tensor:
        return o if self.prenorm else self.normed(o, layer)

    def normed(self, o: Tensor, layer: int = 0) -> Tensor:
        return self.backend.rms_norm(o, self.norms[layer], self.stack.sizes.eps)

    def logits(self, o: Tensor, layer: int = 0) -> Tensor:
        return self.model.head_logits(self.normed(o, layer))


class LayerForwards(Forwards):
    """Forwards of a step through several layers.

    roots: of every layer, its output [trees, hidden] at the last certain pair of each tree.  outputs [n,
    hidden]: of the deepest layer so far, at the nodes of all trees; rows: slot of a node -> its row there.
    """

    net: Packed

    def __init__(self, drafter: Mtp, readings: Sequence[Reading]) -> None:
        super().__init__(drafter, readings)
        trees = [reading.tree for reading in readings if reading.tree is not None]
        self.tree_rows = {id(tree): row for row, tree in enumerate(trees)}
        self.roots: list[Tensor] = []
        self.outputs: Tensor | None = None
        self.rows: dict[int, int] = {}

    def catch_up(self) -> Tensor:
        """Layer after layer; each ends one pair before the one below it, whose token is not known."""
        g, counts = self.net.from_states(self.states), [reading.cursor.count for reading in self.readings]
        for layer in range(self.net.count):
            step_input, last = StepInput(), list[int]()
            for reading, count in zip(self.readings, counts):
                if count:
                    first, token = reading.cursor.first, reading.cursor.first + layer + 1
                    step_input.chain(
                        reading.table[layer + 1 :], first, reading.row.tokens[token : token + count]
                    )
                last.append(step_input.length - 1)
            if not step_input.length:
                break
            o = self.net.forward(step_input.build(), self.pool, g, layer)
            self.roots.append(
                o[[row for row, reading in zip(last, self.readings) if reading.tree is not None]]
            )
            ended = {row for row, count in zip(last, counts) if count}
            g = self.net.from_output(o, layer)[[row for row in range(step_input.length) if row not in ended]]
            counts = [max(0, count - 1) for count in counts]
        return self.roots[0]

    def logits(self, level: int, o: Tensor) -> Tensor:
        return self.net.logits(o, min(level, self.net.count - 1))

    def deepen(self, level: int, trees: Sequence[KVTree], o: Tensor) -> Tensor:
        last = self.net.count - 1
        if level <= last:
            return self._through_layer(level, trees)
        step_input = StepInput()
        for tree in trees:
            table = tree.table[last:]
            for tokens, slots in tree.frontier_paths:
                step_input.node(table, tree.base - last, slots, tokens[-1])
        return self.net.forward(step_input.build(), self.pool, self.net.from_output(o, last), last)

    def _through_layer(self, layer: int, trees: Sequence[KVTree]) -> Tensor:
        """Pass the frontiers and all nodes above them through `layer`; its output [n, hidden] at the
        frontiers.
        """
        step_input, frontier, rows = StepInput(), list[int](), dict[int, int]()
        below = self.roots[layer - 1]
        parents: list[
            int
        ] = []  # for every node, the row of its parent among the roots and the nodes of the layer below
        for tree in trees:
            table = tree.table[layer:]
            for tokens, slots in tree.frontier_paths:
                for depth, (token, slot) in enumerate(zip(tokens, slots), 1):
                    if slot in rows:  # it is on the path of another node, too
                        continue
                    rows[slot] = step_input.length
                    at_root = depth == 1
                    parents.append(
                        self.tree_rows[id(tree)] if at_root else len(below) + self.rows[slots[depth - 2]]
                    )
                    step_input.node(table, tree.base - layer, slots[:depth], token)
                frontier.append(rows[slots[-1]])
        g = below if self.outputs is None else torch.cat([below, self.outputs])
        g = self.net.from_output(g[parents], layer - 1)
        self.outputs, self.rows = self.net.forward(step_input.build(), self.pool, g, layer), rows
        return self.outputs[frontier]


class Mtp(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"MTP layer": {"model": "builtin-mtp", "tree": "chain", "num_speculative_tokens": 2}}
    net: Packed

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """model: the target's own layers unless given.  prenorm: whether the layers read states before the
        last norm (None: as the file's producer does)."""

        prenorm: bool | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            check_fields(self, {"prenorm": optional(FLAG)})

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, _own(target) if head is None and not options.model else head)
        count = self.net.count
        self.depth, self.overlap = RECURRENT_DEPTH if count == 1 else count, count - 1
        self.needs = self.needs._replace(lookbehind=count)

    def forwards(self, readings: Sequence[Reading]) -> Forwards:
        return LayerForwards(self, readings)

    @classmethod
    def claims(cls, head: Head) -> int:
        """0 for a whole language model, 2 for layers of Qwen3-Next, which are refused by name."""
        if "model.norm.weight" in head:
            return 0
        return 2 if "mtp.fc.weight" in head else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a wide tree that is deeper than their number."""
        head = random_head(Network.like, target, layers=2)
        drafter = cls(cls.Options(nodes=24, top_k=3), target, head)
        drafter.depth = 4
        return drafter

    def network(self) -> Packed:
        own: bool = self.head.config["prenorm"]
        return Packed(self.reader, self.target, own if self.options.prenorm is None else self.options.prenorm)


def _own(target: Target) -> Head:
    """The target's own checkpoint."""
    checkpoint = target.checkpoint
    if checkpoint.gguf is not None:
        raise ModelError(
            f"{checkpoint.name!r} is a GGUF file, whose prediction layers are not read: give a folder with "
            "them as 'model'."
        )
    return replace(Head.open(str(checkpoint.folder)), name=checkpoint.name)
