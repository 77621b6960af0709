"""Guesses among the tokens that draft and target both have ("vocab_mismatch": "intersect"), after Timor et al. 2025
(arXiv 2502.05202): token-level intersection.

The draft is made to speak the target's ids: it is fed them, and its logits stand in the target's order, -inf where it has no such token.
So its law is a law over the target's vocabulary, the noise is that of the target's ids, and nothing else here knows of two vocabularies.

K/V stays position for position at the target's slots, so a target token must be one draft token.  What the draft has no token for is
read as the longest end of it that is one ("tokenization" as "ization"): what follows depends on the end most.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained
from outrider.drafting.vocab.spelling import pieces, special_ids, tokenizer_of
from outrider.errors import ConfigError
from outrider.models.base import Model
from outrider.sampling.processors import NEVER

LEAST = 0.02  # of the target's tokens: with fewer a draft can hardly say a word
ROLES = ("eos_token_id", "bos_token_id", "unk_token_id", "pad_token_id")


class Common(NamedTuple):
    """What two vocabularies share."""

    reads: list[int]  # target id -> the draft id that it is read as
    ours: Tensor  # draft ids of the common tokens, int64 [n], each once
    theirs: Tensor  # target ids of the same


def common(draft: Checkpoint, target: Checkpoint) -> Common:
    """Raises ConfigError where a tokenizer is missing, or where too little is common."""
    ours, theirs = tokenizer_of(draft, "draft"), tokenizer_of(target, "target")
    mine, own = _keys(ours, draft.spec.vocabulary), _keys(theirs, target.spec.vocabulary)
    ids = {
        key: i for i, key in enumerate(mine) if key
    }  # of two tokens for one text the later: SentencePiece's bytes come first
    pairs = {t: ids[key] for key, t in {key: t for t, key in enumerate(own) if key}.items() if key in ids}
    for role in ROLES:
        a, b = getattr(ours, role, None), getattr(theirs, role, None)
        if a is not None and b is not None and b not in pairs and a not in pairs.values():
            pairs[b] = a
    known = sum(map(bool, own))
    if len(pairs) < LEAST * known:
        raise ConfigError(
            f"the draft {draft.name!r} has only {len(pairs)} of the {known} tokens of the target {target.name!r}, fewer than {LEAST:.0%}: "
            'too few to guess among.  Choose another draft, or set "vocab_mismatch": "retokenize".'
        )
    blank = next((i for role in ("bos_token_id", *ROLES) if (i := getattr(ours, role, None)) is not None), 0)
    reads = [pairs[t] if t in pairs else _nearest(key, ids, blank) for t, key in enumerate(own)]
    return Common(reads, torch.tensor(list(pairs.values())), torch.tensor(list(pairs)))


def _keys(tokenizer: Any, size: int) -> list[bytes | str]:
    """Token id -> what makes it the same in another vocabulary: its text, or of a special token its name (a str)."""
    keys: list[bytes | str] = list(pieces(tokenizer, size))
    for i in special_ids(tokenizer):
        if i < size:
            keys[i] = tokenizer.convert_ids_to_tokens(i)
    return keys


def _nearest(key: bytes | str, ids: dict[bytes | str, int], blank: int) -> int:
    """The draft id for a target token that is not common; `blank` for one that has no text."""
    ends = (key[i:] for i in range(len(key))) if isinstance(key, bytes) else ()
    return next((ids[end] for end in ends if end in ids), blank)


class Translated:
    """A model as one that speaks another's ids."""

    def __init__(self, model: Model, words: Common) -> None:
        self.model, self.reads = model, words.reads
        self.ours, self.theirs = words.ours.to(model.device), words.theirs.to(model.device)
        self.backend, self.dtype, self.device = model.backend, model.dtype, model.device
        self.max_len, self.kv_cache_dtype, self.spec, self.exact = (
            model.max_len,
            model.kv_cache_dtype,
            model.spec,
            model.exact,
        )
        self.footprint, self.slot_bytes, self.pool = model.footprint, model.slot_bytes, model.pool
        self.skip_sublayers, self.layer_range = model.skip_sublayers, model.layer_range

    def forward(
        self, step_input: StepInput, pool: Pool, blocks: Any = None, x: Tensor | None = None
    ) -> Tensor:
        step_input.translate(self.reads)
        return self.model.forward(step_input, pool, blocks, x)

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        own = self.model.logits(x, rows)
        return own.new_full((len(rows), len(self.reads)), NEVER).index_copy_(
            1, self.theirs, own.index_select(1, self.ours)
        )

    fuses_chains = False  # a fused chain would pick among the model's own ids

    def draft_chain(self, *_: Any) -> Chained:
        raise AssertionError("fuses_chains is False")
