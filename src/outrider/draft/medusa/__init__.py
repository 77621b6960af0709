"""Medusa (arXiv 2401.10774): further heads beside the target's own predict the tokens after the next, from
one state.

    position            t        t+1      t+2      t+3             t = e-2, e = step.end
    state               f_t                                        the target emitted x_t+1, the pending
    token, from it head i: logits_i = W_i · ResBlock(… ResBlock(f_t))
                                 x_t+1    head 0   head 1 …        drafts for e, e+1 …

A head does not read the drafts of the heads before it.  All nodes of a level have the same candidates, and
a tree is a set of paths of ranks: how often rank j of head i was right decides which paths get a node.
Medusa-1 trains the heads alone, Medusa-2 the target with them; here they differ only in their files (see
layouts.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.draft.medusa.layouts import FORMAT, REFERENCE, counts
from outrider.draft.medusa.network import Network
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.choose import Chooser
from outrider.heads.layer import residual
from outrider.heads.outer import lm_logits
from outrider.heads.ranked import RankedDrafter, RankedOptions
from outrider.heads.reader import Reader
from outrider.heads.trees import BlockTree
from outrider.heads.vocabulary import listed_ids


class Packed:
    """The heads on the target's kernels.

    ids: int32 [Vd], the target's token of each of the heads'; None if they have all.  outputs: Vd.
    """

    def __init__(self, reader: Reader, target: Target) -> None:
        """reader: of a head under our names.  Raises ModelError where it does not fit the target."""
        head, self.backend, self.model = reader.head, reader.backend, target.decoder
        self.heads, blocks = counts(head)
        hidden = self.model.spec.hidden
        self.blocks = [
            reader.repeated([f"{i}.{j}.linear" for j in range(blocks)], hidden) for i in range(self.heads)
        ]
        names = ("lm_head", *(f"{i}.lm_head" for i in range(self.heads)))
        own = [name for name in names if f"{name}.weight" in head]
        mapped = own and "token_map" in head  # the target's lm_head has all tokens
        self.ids = listed_ids(head, "token_map", target.vocabulary) if mapped else None
        self.outputs = target.vocabulary if self.ids is None else len(self.ids)
        if self.ids is None:
            self.lm_heads = [reader.outer.linear(name, self.outputs, hidden) for name in own]
        else:
            self.lm_heads = [reader.some(name, self.ids, hidden) for name in own]
        vllm = head.config.get("model_type") == "medusa"
        self.scale = float(head.config.get("logit_scale", 1.0)) if vllm else 1.0

    def __call__(self, states: Tensor, levels: int) -> Tensor:
        """float32 [n, levels, Vd]: logits of the first heads for states [n, hidden]."""
        outputs = [residual(self.backend, states, blocks) for blocks in self.blocks[:levels]]
        if len(self.lm_heads) == self.heads:
            each = [lm_logits(self.model, x, weight) for x, weight in zip(outputs, self.lm_heads)]
            logits = torch.stack(each, dim=1)
        else:  # one lm head for all of them: its weights are read once
            logits = lm_logits(self.model, torch.cat(outputs), next(iter(self.lm_heads), None))
            logits = logits.view(levels, len(states), -1).transpose(0, 1)
        return logits if self.scale == 1 else logits * self.scale


class Medusa(RankedDrafter):
    FORMAT = FORMAT
    demo: ClassVar = {"Medusa": {"model": "builtin-medusa", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(RankedOptions):
        """nodes: None: all of a named or listed tree; of "own" as many as published, but 8 on a CPU."""

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.heads = Packed(self.reader, target)
        self.choose = Chooser(target, self.heads.ids)
        self.plan(self.heads.heads, self.heads.outputs, learns=True)
        if self.paths is not None:
            self.nodes = options.nodes or len(self.paths)

    @classmethod
    def claims(cls, head: Head) -> int:
        """1 for bare numbers, too, that the config contradicts."""
        other = head.config.get("model_type") not in (None, "medusa")
        return 1 if other and FORMAT.layout_of(head) is REFERENCE else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Four random heads of two blocks, and a wide and deep tree."""
        sizes = target.decoder.spec.hidden, target.vocabulary
        return cls(cls.Options(nodes=24), target, random_head(Network, *sizes, heads=4, blocks=2))

    def propose(self, batch: Batch) -> Draft:
        grown, rows = {}, self.ready(batch)
        shapes = {budget: self.shape(budget) for budget in {batch[r].budget for r in rows}}
        levels = max((len(path) for shape in shapes.values() for path in shape), default=0)
        if levels:
            for r, logits in zip(rows, self.heads(self.states(batch, rows), levels)):
                row, shape, stream = batch[r].row, shapes[batch[r].budget], self.target.stream_id
                tree = BlockTree(row, logits, shape, self.samples(row), stream, self.memory.accuracy)
                grown[r] = tree.grow(self.choose)
        return self.propose_for(batch, grown)
