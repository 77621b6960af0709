"""Medusa (arXiv 2401.10774): further heads beside the target's own predict the tokens after the next, from
one state.

    position            t        t+1      t+2      t+3             t = e-2, e = step.end
    state               f_t                                        the target emitted x_t+1, the pending
    token, from it head i: logits_i = W_i · ResBlock(… ResBlock(f_t))
                                 x_t+1    head 0   head 1 …        drafts for e, e+1 …

A head does not read the drafts of the heads before it.  All nodes of a level have the same candidates, and
a tree is a set of paths of ranks: how often rank j of head i was right decides which paths get a node.
Medusa-1 trains the heads alone, Medusa-2 the target with them; here they differ only in their files.

Published files.

    layout                        block j of head i                 its matrix to the vocabulary
    reference v0.1; TGI           {i}.{j}.linear.weight, .bias      {i}.{n}.weight, n the number of blocks
    "version 2" heads; TGI's V2   the same                          none: the target's lm_head for all heads
    Medusa-1.0, Medusa-2          medusa_head.{i}.{j}.linear.…      medusa_head.{i}.{n}.weight, a whole model
    vLLM                          blocks.{i}.layers.{j}.…           lm_heads.{i}.weight, or one; token_map
    ours, while loading           {i}.{j}.linear.…                  {i}.lm_head.weight, or one; token_map

The tensors, not the config, give the number of heads: a published config has 2 for a file with 5.  The
reference repeats one module as the blocks of a head.  Its files hold this block under n names, or under one
of them if the writer drops aliases.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.checkpoints.fields import MOST_STEPS
from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL, Batch
from outrider.core.tree import Draft
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.choose import Chooser
from outrider.heads.device_trees import grow_blocks
from outrider.heads.layer import residual
from outrider.heads.layouts import HeadFormat, Layout, fill, matching, numbers, parse, unchanged
from outrider.heads.outer import lm_logits
from outrider.heads.parts import ResidualBlock
from outrider.heads.ranked import RankedDrafter, RankedOptions
from outrider.heads.reader import Reader
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.trees import BlockTree
from outrider.heads.vocabulary import mapped_ids

BLOCK, WEIGHT, LM_HEAD = "{i}.{j}.linear.{kind}", "{i}.{j}.linear.weight", "{i}.lm_head.weight"
MATRIX = "{i}.{blocks}.weight"
REFERENCE = Layout("reference", (BLOCK,), ((BLOCK, BLOCK), (MATRIX, LM_HEAD)))
WITH_TARGET = Layout(
    "Medusa-1.0",
    (f"medusa_head.{BLOCK}",),
    ((f"medusa_head.{BLOCK}", BLOCK), (f"medusa_head.{MATRIX}", LM_HEAD)),
    beside_target=True,
)
VLLM = Layout(
    "vLLM",
    ("blocks.{i}.layers.{j}.{kind}",),
    (
        ("blocks.{i}.layers.{j}.{kind}", BLOCK),
        ("lm_heads.{i}.weight", LM_HEAD),
        *unchanged("lm_head.weight", "token_map"),
    ),
    ("medusa_heads.",),
)


def _with_all_blocks(head: Head) -> Head:
    """The head with every block under its own name.  Raises ModelError for a missing tensor."""
    stored, heads, blocks = dict(head.stored), counts(head)[0], _blocks_per_head(head)
    if len(numbers(head, BLOCK, field="j")) == 1:  # aliases were dropped, if there were any
        for name, own in head.stored.items():
            if block := parse(BLOCK, name):
                stored |= {fill(BLOCK, {**block, "j": str(j)}): own for j in range(blocks)}
    if head.config.get("original_lm_head") and "0.lm_head.weight" in stored:
        stored["lm_head.weight"] = stored["0.lm_head.weight"]
        stored = {name: own for name, own in stored.items() if not name.endswith(".lm_head.weight")}
    found = replace(head, stored=stored)
    for pattern in (WEIGHT, BLOCK.replace("{kind}", "bias"), LM_HEAD):
        if any(matching(found, pattern)):
            for i, j in itertools.product(range(heads), range(blocks)):
                found.shape(pattern.format(i=i, j=j))  # raises if it is missing
    return found


def counts(head: Head) -> tuple[int, int]:
    """The number of heads, and of blocks of each, by our names."""
    heads, blocks = (1 + max(numbers(head, BLOCK, field=field)) for field in "ij")
    return heads, blocks


def _blocks_per_head(head: Head) -> int:
    """The number that the matrix to the vocabulary has; without one, the number of blocks in the file, or
    the config's settings of one."""
    stored = counts(head)[1]
    last = numbers(head.stored.values(), MATRIX, f"medusa_head.{MATRIX}", field="blocks")
    if not last:
        announced: int = head.config.get("medusa_num_layers", 1)
        return announced if stored == 1 else stored
    if len(last) > 1 or not stored <= min(last) <= MOST_STEPS:
        named = ", ".join(map(str, sorted(last)))
        raise ModelError(f"{head.name!r} has heads of {stored} blocks whose last layer is number {named}.")
    return min(last)


FORMAT = HeadFormat(
    (REFERENCE, WITH_TARGET, VLLM),
    hidden=((WEIGHT, 1),),
    vocabulary=(LM_HEAD, "lm_head.weight"),
    numbered=("{i}.{rest}",),
    kinds="medusa",
    keys=("medusa_num",),
    finish=_with_all_blocks,
)


def reference_config(heads: int, blocks: int, own: bool) -> dict[str, Any]:
    """own: every head has an lm_head."""
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": ""}
    return config if own else {**config, "version": "2"}


DECAY = 0.8  # weight of a head's loss relative to the head before it


class Network(nn.ModuleList):
    """Network for training, with the reference's names and config: heads of one repeated residual block
    and a linear.  own=False: the target's lm_head serves all.
    """

    def __init__(
        self, hidden: int, vocabulary: int, heads: int = 5, blocks: int = 1, own: bool = True
    ) -> None:
        super().__init__()
        for _ in range(heads):
            repeated = [ResidualBlock(hidden, hidden)] * blocks
            lm_head = [nn.Linear(hidden, vocabulary, bias=False)] if own else []
            self.append(nn.Sequential(*repeated, *lm_head))
        self.blocks, self.own = blocks, own

    @classmethod
    def beside(cls, outer: TargetWeights, heads: int = 5, blocks: int = 1, own: bool = True) -> Network:
        """The reference's initial weights: every head predicts what the target's lm_head does."""
        vocabulary, hidden = outer.lm_head.shape
        network = cls(hidden, vocabulary, heads, blocks, own)
        for name, parameter in network.named_parameters():
            parameter.data.copy_(torch.zeros(()) if ".linear." in name else outer.lm_head)
        return network

    def config(self) -> dict[str, Any]:
        return reference_config(len(self), self.blocks, self.own)

    def logits(self, i: int, states: Tensor, outer: TargetWeights) -> Tensor:
        """[n, V] of head i for the target's states [n, hidden]."""
        x: Tensor = self[i](states)
        return x if self.own else outer.logits(x)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy of each head with the text, weighted by DECAY; head i predicts x_t+i+2 from f_t."""
        states, total = sample.states[FINAL], outer.lm_head.new_zeros(())
        for i in range(len(self)):
            rows = sample.places(i + 1, max(0, len(states) - i - 2))
            logits = self.logits(i, states[rows], outer)
            if i == 0:
                sample.record(logits, 2 + rows)
            total = total + DECAY**i * sample.text_loss(logits, i + 2 + rows)
        return total


class MedusaHeads:
    """The heads on the target's kernels.  ids: int32 [Vd], the target's tokens; None: all.  outputs: Vd."""

    ids: Tensor | None = None

    def __init__(self, reader: Reader, target: Target) -> None:
        """reader: of a head under our names.  Raises ModelError where it does not fit the target."""
        head, self.backend, self.model = reader.head, reader.backend, target.decoder
        self.heads, blocks = counts(head)
        hidden, numbers = self.model.spec.hidden, range(self.heads)
        self.blocks: list[list[Any]] = []
        for i in numbers:
            self.blocks.append(reader.shared_linears([f"{i}.{j}.linear" for j in range(blocks)], hidden))
        names = ["lm_head", *(f"{i}.lm_head" for i in numbers)]
        names = [name for name in names if f"{name}.weight" in head]
        if names and "token_map" in head:  # otherwise the target's lm_head serves, which has all tokens
            self.ids = mapped_ids(head, target.vocabulary)
            self.lm_heads = [reader.lm_head_for(name, self.ids, hidden) for name in names]
        else:
            self.lm_heads = [reader.outer.linear(name, target.vocabulary, hidden) for name in names]
        self.outputs = target.vocabulary if self.ids is None else len(self.ids)
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
        """nodes: None: all of a named or listed tree; of "own" as many as published, but 7 on a CPU."""

    def __init__(self, options: Options, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        self.heads = MedusaHeads(self.reader, target)
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
        rows = self.ready(batch)
        shapes = {budget: self.shape(budget) for budget in {batch[r].budget for r in rows}}
        levels = max([len(path) for shape in shapes.values() for path in shape], default=0)
        if not levels:
            return self.propose_for(batch, {})
        trees = dict[int, BlockTree]()
        for r, logits in zip(rows, self.heads(self.states(batch, rows), levels)):
            row, shape = batch[r].row, shapes[batch[r].budget]
            trees[r] = BlockTree(row, logits, shape, self.samples(row), self.target.stream_id)
            trees[r].accuracy = self.memory.accuracy
        grow_blocks([*trees.values()], self.choose)
        return self.propose_for(batch, {r: tree.draft_tree for r, tree in trees.items()})
