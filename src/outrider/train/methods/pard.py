"""PARD (arXiv 2504.18583): a draft model that learns to draft all tokens in one forward.

A row of the loss has an anchor a and a depth d.  Row (a, 0) is the token x_a, deeper ones are mask tokens:

    place             0      1      2      3            anchors 0 and 2, depths up to 2
    depth 0         (0,0)  (1,0)  (2,0)  (3,0)          x_a at position a, predicts x_a+1
    depth 1         (0,1)         (2,1)                 a mask at position a + 1, predicts x_a+2
    depth 2         (0,2)                               a mask at position a + 2, predicts x_a+3

Row (a, d) attends to the rows of depth 0 up to its anchor, and to those of its anchor up to itself, as in a
draft.  Conditional drop-token: every depth has a random part of the anchors of the depth before.  So the
rows that a row attends to are never dropped, and deep rows, which cost as much and count less, are few.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import Spec
from outrider.core.validate import Natural, Share, Text, whole
from outrider.draft.draft_model.one_pass import MASK
from outrider.drafting.vocab.mismatch import fits
from outrider.errors import ConfigError
from outrider.heads.sample import Sample
from outrider.models.differentiable import load_weights, new_module, row_logits
from outrider.train.base import Files
from outrider.train.methods.draft_model import DraftModel
from outrider.train.options import MOST_DEPTH

SHAPE = ("layers", "hidden", "inner", "heads", "kv_heads")


class Pard(DraftModel):
    @dataclass(frozen=True)
    class Options(DraftModel.Options):
        """draft: the autoregressive draft model to adapt; None: a fresh one, as `draft_model` begins.
        depths: tokens of a forward.  mask_token: id of the mask token; None: that of the draft, or the last
        one.  kept, least: share of a depth's anchors that have the next depth, too; least share of all.
        """

        draft: Text | None = None
        depths: Annotated[int, whole(2, MOST_DEPTH)] = 8
        mask_token: Natural | None = None
        kept: Share = 0.7
        least: Share = 0.2

        def __post_init__(self) -> None:
            super().__post_init__()
            given = [f.name for f in fields(self) if f.name in SHAPE and getattr(self, f.name) != f.default]
            if self.draft is not None and given:
                raise ConfigError(f"{', '.join(given)}: a given draft has its shape: leave it out, or draft.")

    base_rate = 1e-5
    drafts: ClassVar = {"method": "pard"}

    def logit_rows(self, tokens: int) -> int:
        return sum(int(tokens * self._share(depth)) for depth in range(self.options.depths))

    def build(self) -> Any:
        network = super().build() if self.options.draft is None else self._adapted()
        self.joins = False
        config, vocabulary = network.config, network.config.vocab_size
        if getattr(config, "sliding_window", None) is not None:
            raise ConfigError("pard: a model with a sliding window is not trained: give another draft.")
        self.mask, key = self.options.mask_token, "mask_token"
        if self.mask is None and (found := getattr(config, MASK, None)) is not None:
            self.mask, key = found, f"{MASK} of the draft"
        if self.mask is None:
            self.mask = vocabulary - 1
        if type(self.mask) is not int or not 0 <= self.mask < vocabulary:
            raise ConfigError(
                f"{key} {self.mask!r}: V of the draft is {vocabulary}; give a mask_token below it."
            )
        return network

    def _adapted(self) -> Any:
        """The draft of the options.  Raises ConfigError for one that is not the target's, or is packed."""
        name = str(Path(self.options.draft).expanduser())
        checkpoint = Checkpoint.open(name, None, self.target.checkpoint.trust_remote_code)
        if not isinstance(checkpoint.spec, Spec) or checkpoint.gguf is not None:
            raise ConfigError(f"draft: {name!r} is no model of the lean decoder's families in safetensors.")
        if checkpoint.spec.recurrent is not None:
            raise ConfigError(f"draft: {name!r} has recurrent layers, and cannot be a draft model.")
        fits(checkpoint, self.target.checkpoint)
        network = new_module(checkpoint.config)
        load_weights(network, checkpoint)
        return network

    def _share(self, depth: int) -> float:
        share: float = 1.0 if depth == 0 else max(self.options.kept**depth, self.options.least)
        return share

    def rows(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Anchors and depths of the rows of one loss: all places, then parts of those that count."""
        count, device = len(sample.tokens), sample.tokens.device
        anchors, counted = torch.arange(count, device=device), sample.places(0, count)
        shuffled = counted[torch.randperm(len(counted), device=device)]
        found, depths = [anchors], [torch.zeros_like(anchors)]
        for depth in range(1, self.options.depths):
            part = shuffled[: int(len(shuffled) * self._share(depth))]
            found.append(part[part + depth < count])
            depths.append(torch.full_like(found[-1], depth))
        return torch.cat(found), torch.cat(depths)

    def loss(self, sample: Sample) -> Tensor:
        """Mean divergence over the rows whose place counts."""
        anchors, depths = self.rows(sample)
        places, text = anchors + depths, depths == 0
        tokens = torch.where(text, sample.tokens[anchors], self.mask)
        before = text & (anchors <= anchors[:, None])
        own = (anchors == anchors[:, None]) & (depths <= depths[:, None])
        rows = torch.arange(len(places), device=places.device)
        if sample.mask is not None:
            rows = rows[sample.mask.to(places.device)[places]]
        logits = row_logits(self.network, tokens, places, before | own, rows)
        common = min(logits.shape[1], sample.logits.shape[1])  # one of them may be padded further
        sample = replace(sample, logits=sample.logits[:, :common])
        return self.distance(sample, logits[:, :common], places[rows])

    def files(self) -> Files:
        config, tensors = super().files()
        return {**config, MASK: self.mask, "spd_type": "pard"}, tensors
