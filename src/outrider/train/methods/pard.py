"""PARD (arXiv 2504.18583): a draft model that learns to draft all tokens in one forward.

Row (a, 0) of `DepthRows` is the token x_a, deeper ones are mask tokens.  Row (a, d) predicts x_a+d+1.  The
part of the anchors that a depth has is random: the publication's conditional drop-token.
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
from outrider.heads.depth_rows import DepthRows
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
            raise ConfigError(f"draft: {name!r} has recurrent layers, and is not trained: give another one.")
        fits(checkpoint, self.target.checkpoint)
        network = new_module(checkpoint.config)
        load_weights(network, checkpoint)
        return network

    def _share(self, depth: int) -> float:
        share: float = 1.0 if depth == 0 else max(self.options.kept**depth, self.options.least)
        return share

    def rows(self, sample: Sample) -> DepthRows:
        """Rows of one loss: all places, then parts of those that count."""
        count = len(sample.tokens)
        counted = sample.places(0, count)
        shuffled = counted[torch.randperm(len(counted), device=counted.device)]
        return DepthRows.of(count, shuffled, map(self._share, range(1, self.options.depths)))

    def loss(self, sample: Sample) -> Tensor:
        """Mean divergence over the rows whose place counts."""
        found = self.rows(sample)
        places = found.anchors + found.depths
        tokens = torch.where(found.depths == 0, sample.tokens[found.anchors], self.mask)
        rows = torch.arange(len(places), device=places.device)
        if sample.mask is not None:
            rows = rows[sample.mask.to(places.device)[places]]
        logits = row_logits(self.network, tokens, places, found.attended, rows)
        common = min(logits.shape[1], sample.logits.shape[1])  # one of them may be padded further
        sample = replace(sample, logits=sample.logits[:, :common])
        return self.distance(sample, logits[:, :common], places[rows])

    def files(self) -> Files:
        config, tensors = super().files()
        return {**config, MASK: self.mask, "spd_type": "pard"}, tensors
