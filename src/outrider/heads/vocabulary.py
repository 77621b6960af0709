"""A head's vocabulary: its size, and the target's token of each of its entries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.drafting.vocab.mismatch import PADDING
from outrider.errors import ModelError

# Tensors with a row for each token.
TOKEN_ROWS = re.compile(
    r"((draft_)?model\.|(mtp_)?layers\.\d+\.)*(embed_tokens\.weight|t2d)|input_embed_fn\.weight"
)
SIZED_PARTS = ("model", "transformer_layer_config", "text_config")  # of configs, with a vocab_size


def check_size(head: Head, vocabulary: int) -> None:
    """Raise ModelError for a head of another number of tokens, by its tensors or config, padding aside."""
    sizes = {name: (head.shape(name) or (0,))[0] for name in head if TOKEN_ROWS.fullmatch(name)}
    for name, size in (sizes or _announced_size(head.config)).items():
        if abs(size - vocabulary) >= PADDING:
            raise head.misfit(f"its {name} is for {size} tokens, and the target has {vocabulary}")


def _announced_size(config: Mapping[str, Any]) -> dict[str, int]:
    """The vocab_size of a config, or of a part of it; empty if none is there."""
    for part in (config, *map(config.get, SIZED_PARTS)):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return {"vocab_size": part["vocab_size"]}
    return {}


def target_ids(head: Head, vocabulary: int) -> Tensor | None:
    """int32 [Vd], ascending: the target's token of each of the head's; None if it has all tokens.

    `d2t` int64 [Vd] holds offsets: entry i is token i + d2t[i].  In some files it holds the tokens
    themselves.  `t2d` bool [V], a mask of the head's tokens, distinguishes the two.  Without it, a list that
    ascends from entry to entry holds tokens: offsets repeat wherever the head has neighbours.
    Raises ModelError where d2t and t2d contradict each other, or the target has no such tokens.
    """
    if "d2t" not in head and "t2d" not in head:
        return None
    known = _column(head, "t2d").bool().nonzero().flatten() if "t2d" in head else None
    ids = known if "d2t" not in head else _read(head, known, vocabulary)
    assert ids is not None
    if not _valid(ids, vocabulary):
        raise head.misfit(f"its vocabulary reaches token {_last(ids)}, the target has {vocabulary}")
    return None if len(ids) == vocabulary else ids.to(torch.int32)


def mapped_ids(head: Head, vocabulary: int) -> Tensor:
    """int32 [Vd]: the target's tokens in vLLM's `token_map`, different ones in any order.

    Raises ModelError for other lists.
    """
    ids = _column(head, "token_map").long()
    first, last = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
    if not 0 <= first <= last < vocabulary or len({*ids.tolist()}) < len(ids):
        listed = f"its token_map names {len(ids)} tokens in {first} … {last}"
        raise head.misfit(f"{listed}, and the target has {vocabulary} (each may be named once)")
    return ids.to(torch.int32)


def _read(head: Head, known: Tensor | None, vocabulary: int) -> Tensor:
    table = _column(head, "d2t").long()
    offset = table + torch.arange(len(table))
    if known is not None:
        if not (torch.equal(offset, known) or torch.equal(table, known)):
            raise ModelError(
                f"d2t and t2d of {head.name!r} contradict each other: {len(table)} and {len(known)} "
                "tokens, not the same ones."
            )
        return known
    ids = table if bool((table.diff() > 0).all()) else offset
    if not _valid(ids, vocabulary):
        raise ModelError(
            f"d2t of {head.name!r} is neither an offset nor a list of ascending ids below {vocabulary}, "
            "the target's vocabulary."
        )
    return ids


def _column(head: Head, name: str) -> Tensor:
    """A list of whole numbers.  Raises ModelError for another tensor."""
    column = head.raw(name)
    if column.dim() != 1 or column.is_floating_point():
        raise ModelError(
            f"{name} of {head.name!r} is {column.dtype} {tuple(column.shape)}; a list of whole numbers is "
            "needed."
        )
    return column


def _valid(ids: Tensor, vocabulary: int) -> bool:
    return len(ids) > 0 and int(ids[0]) >= 0 and _last(ids) < vocabulary and bool((ids.diff() > 0).all())


def _last(ids: Tensor) -> int:
    return int(ids[-1]) if len(ids) else -1
