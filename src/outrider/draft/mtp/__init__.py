"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608): layers that a target was trained and ships with.

    position of the target      t         t+1       t+2
    state                       f_t                            the target said x_t+1 from it
    layer 0 reads               (f_t,      x_t+1)              says a_t, and the guess for t+2
    layer 1 reads               (a_t,                x_t+2)    says b_t, and the guess for t+3
    …                                                          layer k reads token t+k+1, and makes guess k+1

So layer k reads what layer k-1 said at the same t beside a token that is one further on.  Its K/V lies in the slot of that token, as
everywhere (see heads/recurrent.py), in a table that begins k + 1 slots later than the target's.  Behind the pending token e-1 the first
pairs of layer k that read a guess stand at e-1-k … e-2: all nodes of the tree down to level k go through it, each with what layer k-1
said at its parent.  Of those only the states at the end differ from certain ones, which is why the last k states are read twice.

                                slot of x_e-1   of guess 1   of guess 2
    layer 0                     (f_e-2, x_e-1)                             → guess 1
    layer 1                     (a_e-3, x_e-1)  (a_e-2, g1)                → guess 2
    layer 2                     (b_e-4, x_e-1)  (b_e-3, g1)  (b_e-2, g2)   → guess 3

Behind the last layer that one recurs, as does the only one of a file that has one (FastMTP, arXiv 2509.18362): (o, guess) at t+1.

Engines zero the embedding at position 0, for they place pairs at their tokens, and before token 0 there is no state.  Here no pair has
token 0, so nothing is zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step_input import StepInput
from outrider.draft.mtp.layouts import claims_of, translate
from outrider.draft.mtp.network import Network
from outrider.draft.mtp.packed import Packed
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError, ModelError
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Net, Recurrent, RecurrentOptions, Turn
from outrider.heads.trees import Growing

RECURRING = 3  # levels where one layer does them all


class Mtp(Recurrent):
    demo: ClassVar = {"MTP layer": {"model": "builtin-mtp", "tree": "chain", "num_speculative_tokens": 2}}

    net: Packed

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """model: the target's own layers unless given.  prenorm: whether the layers read states before the last norm (None: as those who
        made the file do)."""

        prenorm: bool | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.prenorm is not None and not isinstance(self.prenorm, bool):
                raise ConfigError(f"prenorm must be True, False or None, got {self.prenorm!r}.")

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, _own(target) if head is None and not options.model else head)
        count = len(self.net.layers)
        self.depth, self.overlap = RECURRING if count == 1 else count, count - 1
        self.needs = self.needs._replace(lookbehind=count)
        self.roots: list[Tensor] = []  # of every layer: what it says of the last certain pair of each tree
        self.order: dict[Growing, int] = {}  # of the trees
        self.inner = torch.empty(
            0
        )  # what the layer that went last says of nodes, and where: of each tree, slots from the root -> row
        self.where: dict[Growing, dict[tuple[int, ...], int]] = {}

    @classmethod
    def claims(cls, head: Head) -> int:
        return claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, always the same, and a tree that is wide and deeper than they are many."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = Network.like(target, layers=2)
        drafter = cls(
            cls.Options(nodes=24, top_k=3), target, Head.of("example", network.config(), network.state_dict())
        )
        drafter.depth = 4
        return drafter

    def network(self) -> Net:
        head, layout = translate(self.head)
        wide, needed = head.shape("layers.0.eh_proj.weight"), (self.hidden, 2 * self.hidden)
        if wide != needed:
            raise ModelError(
                f"{head.name!r} does not fit the target: its eh_proj is {wide}, and the target's hidden size needs {needed}."
            )
        self.head = head
        prenorm = layout.prenorm if self.options.prenorm is None else self.options.prenorm
        return Packed(Reader(head, self.kernels, self.reader.bits), self.target, prenorm)

    def _catch_up(self, turns: Sequence[Turn]) -> Tensor:
        """Layer after layer; each ends one pair before the one below it, whose token is not known."""
        grown = [turn.tree for turn in turns if turn.tree is not None]
        self.roots, self.order, self.where = [], {tree: i for i, tree in enumerate(grown)}, {}
        g, counts = self.net.enter(self._states(turns)), [turn.pending_states.count for turn in turns]
        for layer in range(len(self.net.layers)):
            step_input, ends = StepInput(), list[int]()
            for turn, count in zip(turns, counts):
                if count:
                    at = turn.pending_states.first + layer + 1
                    step_input.chain(
                        turn.slots[layer + 1 :], turn.pending_states.first, turn.row.tokens[at : at + count]
                    )
                ends.append(step_input.length)
            if not step_input.length:
                break
            o = self.net.forward(step_input.build(), self.pool, g, layer)
            self.roots.append(o[[end - 1 for end, turn in zip(ends, turns) if turn.tree is not None]])
            below = {end - 1 for end, count in zip(ends, counts) if count}
            g = self.net.again(o, layer)[[i for i in range(step_input.length) if i not in below]]
            counts = [max(0, count - 1) for count in counts]
        return self.roots[0]

    def _logits(self, o: Tensor, level: int) -> Tensor:
        return self.net.logits(o, min(level, len(self.net.layers) - 1))

    def _deeper(self, level: int, trees: Sequence[Growing], o: Tensor) -> Tensor:
        last = len(self.net.layers) - 1
        if level <= last:
            return self._inner(level, trees)
        step_input = StepInput()
        for tree in trees:
            table = tree.table[last:]
            for said, slots in tree.tips:
                step_input.node(table, tree.base - last, slots, said[-1])
        return self.net.forward(step_input.build(), self.pool, self.net.again(o, last), last)

    def _inner(self, layer: int, trees: Sequence[Growing]) -> Tensor:
        """[n, hidden] of the nodes that the trees go on with, once all nodes above them went through `layer`, too."""
        step_input, above, tips = StepInput(), list[int](), list[int]()
        before, roots = self.where, self.roots[layer - 1]
        self.where = {}
        for tree in trees:
            table, here = tree.table[layer:], self.where.setdefault(tree, {})
            for said, slots in tree.tips:
                for end in range(1, len(slots) + 1):
                    path = tuple(slots[:end])
                    if path in here:
                        continue
                    here[path] = step_input.length
                    above.append(len(roots) + before[tree][path[:-1]] if end > 1 else self.order[tree])
                    step_input.node(table, tree.base - layer, path, said[end - 1])
                tips.append(here[tuple(slots)])
        g = torch.cat([roots, self.inner]) if before else roots
        self.inner = self.net.forward(
            step_input.build(), self.pool, self.net.again(g[above], layer - 1), layer
        )
        return self.inner[tips]


def _own(target: Target) -> Head:
    """The target's own checkpoint."""
    checkpoint = target.checkpoint
    if checkpoint.gguf is not None:
        raise ModelError(
            f"{checkpoint.name!r} is a GGUF file, whose prediction layers are not read: give a folder with them as 'model'."
        )
    return replace(Head.open(str(checkpoint.folder)), name=checkpoint.name)
