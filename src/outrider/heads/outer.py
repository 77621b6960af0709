"""Embeddings and lm_heads of heads: their own, or the target's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.drafting.vocab.mismatch import PADDING
from outrider.errors import ModelError
from outrider.heads.reader import Reader
from outrider.models.base import Model

Ids = Sequence[int] | Tensor  # of tokens: host numbers, or int64 on a device
CHUNK = 4096  # tokens whose embeddings are compared at once


def own_embedding(reader: Reader, target: Target, width: int) -> Any:
    """The packed embed_tokens of a head; None for the target's, which a copy need not be kept beside.

    Raises ModelError if the head's has too few tokens, or the target's another width.
    """
    head, wide = reader.head, target.decoder.embed([0]).shape[1]
    if "embed_tokens.weight" not in head:
        if wide != width:
            raise head.misfit(f"it has no embed_tokens, a width of {width}, and the target embeds in {wide}")
        return None
    rows = head.shape("embed_tokens.weight")[0]
    if rows < target.vocabulary:
        raise head.misfit(f"it embeds {rows} tokens, and the target has {target.vocabulary}")
    same = wide == width and _same(head.get("embed_tokens.weight", rows, width), target)
    return None if same else reader.outer.linear("embed_tokens", rows, width)


def _same(weight: Tensor, target: Target) -> bool:
    """Whether a head's embedding is a copy of the target's."""
    model = target.decoder
    for first in range(0, target.vocabulary, CHUNK):
        rows = model.embed(range(first, min(first + CHUNK, target.vocabulary)))
        if not torch.equal(rows.float().cpu(), weight[first : first + len(rows)].to(model.dtype).float()):
            return False
    return True


def embed(model: Model, ids: Ids, embedding: Any = None) -> Tensor:
    """Rows [n, width] of a head's own embedding; of the target's if it is None."""
    if isinstance(ids, Tensor):
        step_input = StepInput.of_ids([0] * len(ids))
        step_input.device_ids = ids
        embedded = model.backend.embed(model.embedding if embedding is None else embedding, step_input)
        return embedded if embedding is not None else embedded.to(model.backend.activations)
    if embedding is None:
        return model.embed(ids).to(model.backend.activations)
    return model.backend.embed(embedding, StepInput.of_ids(ids))


def own_lm_head(reader: Reader, target: Target, width: int, ids: Tensor | None) -> Any:
    """The packed lm_head of a head, its embedding if they are tied, or None for the target's.

    ids: int32 [Vd], the target's token of each of its rows; None for all.  Raises ModelError for an lm_head
    of other tokens, or if there is none and the target has another width.
    """
    head, name = reader.head, "lm_head"
    if "lm_head.weight" not in head:
        if not (head.config.get("tie_word_embeddings") and "embed_tokens.weight" in head):
            if (hidden := target.decoder.spec.hidden) == width:
                return None
            raise head.misfit(f"no lm_head, a width of {width}; the target's {hidden}")
        name = "embed_tokens"
    rows = head.shape(f"{name}.weight")[0]
    if rows + PADDING <= target.vocabulary if ids is None else rows != len(ids):
        tokens = "no d2t" if ids is None else f"a list of {len(ids)}"
        raise head.misfit(f"an lm_head of {rows} tokens, {tokens}; V is {target.vocabulary}")
    return reader.outer.linear(name, rows, width)


def lm_logits(model: Model, x: Tensor, lm_head: Any = None, ids: Tensor | None = None) -> Tensor:
    """float32 [n, Vd] of x [n, width], by a head's own lm_head; by the target's for `ids` if it is None."""
    if lm_head is not None:
        return model.backend.linear(x, lm_head).float()
    logits = model.head_logits(x)
    return logits if ids is None else logits[:, ids.long().to(logits.device)]


def checked_taps(head: Head, listed: Any, offset: int, layers: int, key: str) -> tuple[int, ...]:
    """Layer numbers plus an offset, as inputs of the target's layers.  Raises ModelError for others."""
    numbers = isinstance(listed, Sequence) and not isinstance(listed, str)
    if not numbers or not listed or not all(isinstance(tap, int) for tap in listed):
        raise ModelError(f"{key} of {head.name!r} must be a list of layer numbers, got {listed!r}.")
    taps = tuple(tap + offset for tap in listed)
    if not all(0 <= tap <= layers for tap in taps):
        has = f"the target has 0 … {layers} ({key}, tap_offset)"
        raise head.misfit(f"it reads the inputs of the layers {list(taps)}; {has}")
    return taps
