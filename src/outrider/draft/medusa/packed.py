"""Medusa's heads on the target's kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.draft.medusa.layouts import counts
from outrider.drafting.base import Target
from outrider.errors import ModelError
from outrider.heads.reader import Reader
from outrider.models.fallback.row_invariant import by_rows


class Packed:
    """ids: int32 [Vd], the target's token of each of the heads'; None if they have all.  outputs: Vd."""

    def __init__(self, reader: Reader, target: Target) -> None:
        """reader: of a head with normalized names.  Raises ModelError where it does not fit the target."""
        self.head, self.reader, self.backend = reader.head, reader, reader.backend
        self.model, self.hidden = target.decoder, target.decoder.spec.hidden
        self.heads, blocks = counts(self.head)
        self.blocks = [self._blocks(i, blocks) for i in range(self.heads)]
        own = [
            name
            for name in ("lm_head", *(f"{i}.lm_head" for i in range(self.heads)))
            if f"{name}.weight" in self.head
        ]
        self.ids = (
            token_map(self.head, target.vocabulary) if own else None
        )  # the target's lm head has all tokens
        self.outputs = target.vocabulary if self.ids is None else len(self.ids)
        self.lm_heads = [self._lm_head(name) for name in own]
        self.scale = (
            float(self.head.config.get("logit_scale", 1.0))
            if self.head.config.get("model_type") == "medusa"
            else 1.0
        )

    def __call__(self, states: Tensor, levels: int) -> Tensor:
        """float32 [n, levels, Vd]: logits of the first heads for states [n, hidden]."""
        outputs = [self._through(states, blocks) for blocks in self.blocks[:levels]]
        if len(self.lm_heads) == self.heads:
            each = [self.backend.linear(x, weight) for x, weight in zip(outputs, self.lm_heads)]
            logits = torch.stack(each, dim=1)
        else:  # one lm head for all of them: its weights are read once
            rows = torch.cat(outputs)
            if self.lm_heads:
                logits = self.backend.linear(rows, self.lm_heads[0])
            else:
                logits = self.model.head_logits(rows)
            logits = logits.view(levels, len(states), -1).transpose(0, 1)
        return logits.float() if self.scale == 1 else logits.float() * self.scale

    def _through(self, x: Tensor, blocks: list[object]) -> Tensor:
        for block in blocks:
            x = x + by_rows(F.silu, self.backend.linear(x, block))
        return x

    def _blocks(self, i: int, count: int) -> list[object]:
        """Pack the blocks of a head; one that equals the first is kept once."""
        first, packed = f"{i}.0.linear", list[object]()
        for name in (f"{i}.{j}.linear" for j in range(count)):
            parts = [part for part in ("weight", "bias") if f"{first}.{part}" in self.head]
            same = packed and all(
                torch.equal(self.head.raw(f"{first}.{part}"), self.head.raw(f"{name}.{part}"))
                for part in parts
            )
            packed.append(packed[0] if same else self.reader.linear(name, self.hidden, self.hidden))
        return packed

    def _lm_head(self, name: str) -> object:
        if self.ids is None:
            return self.reader.outer.linear(name, self.outputs, self.hidden)
        return self.reader.some(name, self.ids, self.hidden)


def token_map(head: Head, vocabulary: int) -> Tensor | None:
    """int32 [Vd]: the target's token of each of the head's.  Raises ModelError for unknown ids."""
    if "token_map" not in head:
        return None
    ids = head.raw("token_map")
    if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
        raise ModelError(
            f"token_map of {head.name!r} is {ids.dtype} {tuple(ids.shape)}; a list of token ids is needed."
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(set(ids.tolist())) < len(ids):
        raise ModelError(
            f"{head.name!r} does not fit the target: its token_map names {len(ids)} tokens in "
            f"{int(ids.min())} … {int(ids.max())}, and the target has {vocabulary} (each may be named "
            "once)."
        )
    return ids.to(torch.int32)
