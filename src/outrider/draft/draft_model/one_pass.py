"""A draft model that drafts all tokens in one forward: PARD (arXiv 2504.18583).

It was trained with mask tokens, which follow the last known token in the forward that catches up:

    position            …  e-2     e-1   │   e      e+1     e+2      e = step.end, the number of known tokens
    token               … x_e-2   x_e-1  │  mask    mask    mask
    its logits are for            e      │  e+1     e+2     e+3

Masks attend to the known tokens and to the masks before them.  Their K/V is scratch, in the row's node slots:
the K/V of the tokens that are committed there replaces it.  All nodes of a depth share its logits, so given
the text, draft tokens of different depths are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.core.device import take
from outrider.core.row import Row
from outrider.core.step_input import StepInput
from outrider.core.validate import whole
from outrider.draft.draft_model.first import Part
from outrider.draft.draft_model.intersect import TranslatedModel
from outrider.drafting.base import Target
from outrider.drafting.stop import Stop
from outrider.drafting.trees.sampled import Tree
from outrider.errors import ConfigError, ModelError
from outrider.heads.choose import Chooser
from outrider.sampling.sampler import Sampler

MASK = "pard_token"  # key of the config: id of the mask token


class OnePassHost(Protocol):
    """Interface of the draft model."""

    target: Target
    checkpoint: Checkpoint
    decoder: Any
    sampler: Sampler
    vocabulary: int
    stop: Stop

    def samples(self, row: Row) -> bool: ...
    def logits_after(self, step_input: StepInput, rows: Sequence[int]) -> Tensor: ...
    def extend(self, tree: Tree, frontier: list[tuple[int, int]], logits: Tensor) -> None: ...


class OnePass:
    """Drafting in one forward.  mask: id of the mask token, as the decoder takes it."""

    def __init__(self, mask: int, host: OnePassHost) -> None:
        self.host = host
        self.mask = host.decoder.add(mask) if isinstance(host.decoder, TranslatedModel) else mask

    @cached_property
    def choose(self) -> Chooser:
        host = self.host
        own = {"decoder": host.decoder, "sampler": host.sampler, "vocabulary": host.vocabulary}
        return Chooser(replace(host.target, **own))

    @classmethod
    def of(cls, options: Any, host: OnePassHost) -> OnePass | None:
        """None for a draft model without a mask token, or if the options ask for one forward a token.

        Raises ConfigError if the options need a mask token and there is none, or do not go with it.  Raises
        ModelError for one outside of the vocabulary.
        """
        checkpoint, mask, name = host.checkpoint, options.mask_token_id, "mask_token_id"
        if mask is None:
            mask, name = getattr(checkpoint.config, MASK, None), MASK
        if options.parallel_drafting is False or (mask is None and options.parallel_drafting is None):
            return None
        if mask is None:
            raise ConfigError(
                f"parallel_drafting needs a PARD model, and the config of {checkpoint.name!r} has no {MASK}: "
                "give another draft model or its mask_token_id, or leave parallel_drafting out."
            )
        if options.drafter is not None:
            raise ConfigError(
                f"a drafter saves forwards of a draft model, and {checkpoint.name!r}, a PARD model, needs "
                "one a step: leave drafter out, or set parallel_drafting to False."
            )
        whole(0, checkpoint.spec.vocabulary - 1).check(mask, f"{name} of {checkpoint.name!r}", ModelError)
        return cls(mask, host)

    def add_masks(self, step_input: StepInput, part: Part) -> None:
        """Append the mask tokens of a row's draft, right after its known tokens."""
        masks = [self.mask] * (part.budget.depth - 1)
        part.view.chain(step_input, part.end, masks)

    def grow(self, step_input: StepInput, tips: Sequence[tuple[Tree, int]]) -> None:
        """Grow the trees to their full depth.  tips: each tree, and the row of the forward before it."""
        rows = list[int]()
        for tree, at in tips:
            rows += range(at, at + tree.budget.depth)
        logits, level = self.host.logits_after(step_input, rows), 0
        ranked = self._ranked([tree for tree, _ in tips], logits)
        for tree, _ in tips:
            for row in range(level, level + tree.budget.depth):
                if not tree.growing:
                    break
                if row in ranked:
                    tree.choose([(node, *best) for node in tree.frontier for best in ranked[row]])
                else:
                    self.host.extend(tree, [(node, row) for node in tree.frontier], logits)
            level += tree.budget.depth

    def _ranked(self, trees: Sequence[Tree], logits: Tensor) -> dict[int, list[tuple[int, float]]]:
        """Row of the logits -> its best tokens and their confidences, by one read of a device for all rows.

        Left out are rows whose tokens depend on those of the path, or are sampled from q.
        """
        rows, depths, found, level = list[Row](), list[int](), list[int](), 0
        for tree in trees:
            depth = tree.budget.depth
            if self.choose.stays_on_device([tree.row]) and not self.host.samples(tree.row):
                rows += [tree.row] * depth
                depths += range(depth)
                found += range(level, level + depth)
            level += depth
        if not found or self.host.stop.active:
            return {}
        chosen = logits if len(found) == len(logits) else take(logits, found)
        tokens, confidences = self.choose.next_tokens(rows, depths, chosen, trees[0].siblings)
        best = torch.stack([tokens.double(), confidences.double()], -1).tolist()
        return {row: [(int(token), p) for token, p in level if token >= 0] for row, level in zip(found, best)}
