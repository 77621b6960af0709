"""Drafting among the tokens that draft and target share ("vocab_mismatch": "intersect"), after Timor et al.
2025 (arXiv 2502.05202): token-level intersection.

The draft model is wrapped so that it takes and gives the target's ids.  Its logits are in the target's order,
-inf where it has no such token.  So q is a distribution over the target's vocabulary, the noise is that of
the target's ids, and no other module of this package handles two vocabularies.

K/V stays at the target's slots, position for position, so one target token must be one draft token.  A target
token that the draft does not have is replaced by its longest suffix that is a draft token ("tokenization" by
"ization"), because the next token depends on the end most.
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

MIN_SHARED = 0.02  # of the target's tokens; a draft with fewer can hardly form words
ROLES = ("eos_token_id", "bos_token_id", "unk_token_id", "pad_token_id")


class SharedTokens(NamedTuple):
    """Tokens of draft and target.

    draft_id_of: target id -> draft id in its place.  draft_ids, target_ids: int64 [n], the shared ones.
    """

    draft_id_of: list[int]
    draft_ids: Tensor
    target_ids: Tensor


def shared_tokens(draft: Checkpoint, target: Checkpoint) -> SharedTokens:
    """Raise ConfigError if a tokenizer is missing or too few tokens are shared."""
    draft_tokenizer, target_tokenizer = tokenizer_of(draft, "draft"), tokenizer_of(target, "target")
    draft_keys = _keys(draft_tokenizer, draft.spec.vocabulary)
    target_keys = _keys(target_tokenizer, target.spec.vocabulary)
    # Of two tokens for one text the later one: SentencePiece's byte tokens come first.
    draft_id = {key: i for i, key in enumerate(draft_keys) if key}
    target_id = {key: i for i, key in enumerate(target_keys) if key}
    pairs = {i: draft_id[key] for key, i in target_id.items() if key in draft_id}
    _add_roles(pairs, draft_tokenizer, target_tokenizer)
    count = sum(map(bool, target_keys))
    if len(pairs) < MIN_SHARED * count:
        raise ConfigError(
            f"the draft {draft.name!r} has only {len(pairs)} of the {count} tokens of the target "
            f"{target.name!r}, fewer than {MIN_SHARED:.0%}: too few to draft with.  Choose another draft, or "
            'set "vocab_mismatch": "retokenize".'
        )
    special = [getattr(draft_tokenizer, role, None) for role in ("bos_token_id", *ROLES)]
    blank = next((i for i in special if i is not None), 0)
    draft_id_of: list[int] = []
    for i, key in enumerate(target_keys):
        draft_id_of.append(pairs[i] if i in pairs else _longest_suffix(key, draft_id, blank))
    return SharedTokens(draft_id_of, torch.tensor(list(pairs.values())), torch.tensor(list(pairs)))


def _add_roles(pairs: dict[int, int], draft_tokenizer: Any, target_tokenizer: Any) -> None:
    """Pair special tokens of one role, such as EOS, whose names differ.  pairs: target id -> draft id"""
    for role in ROLES:
        of_draft, of_target = getattr(draft_tokenizer, role, None), getattr(target_tokenizer, role, None)
        if of_draft is None or of_target is None:
            continue
        if of_target not in pairs and of_draft not in pairs.values():
            pairs[of_target] = of_draft


def _keys(tokenizer: Any, size: int) -> list[bytes | str]:
    """Token id -> identity across vocabularies: its bytes, or the name (a str) of a special token."""
    keys: list[bytes | str] = list(pieces(tokenizer, size))
    for i in special_ids(tokenizer):
        if i < size:
            keys[i] = tokenizer.convert_ids_to_tokens(i)
    return keys


def _longest_suffix(key: bytes | str, draft_id: dict[bytes | str, int], blank: int) -> int:
    """The draft id of the longest suffix that is a draft token; `blank` if there is none."""
    suffixes = (key[i:] for i in range(len(key))) if isinstance(key, bytes) else ()
    return next((draft_id[suffix] for suffix in suffixes if suffix in draft_id), blank)


class TranslatedModel:
    """A model that takes and gives the ids of another vocabulary."""

    def __init__(self, model: Model, shared: SharedTokens) -> None:
        self.model, self.draft_id_of, self.vocabulary = model, shared.draft_id_of, len(shared.draft_id_of)
        self.draft_ids, self.target_ids = (ids.to(model.device) for ids in shared[1:])
        self.backend, self.device = model.backend, model.device
        self.footprint, self.pool = model.footprint, model.pool

    def add(self, draft_id: int) -> int:
        """A new id, beyond those of the target, for a token that only the draft model has."""
        self.draft_id_of = [*self.draft_id_of, draft_id]
        return len(self.draft_id_of) - 1

    def forward(self, step_input: StepInput, pool: Pool) -> Tensor:
        step_input.translate(self.draft_id_of)
        return self.model.forward(step_input, pool)

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        own = self.model.logits(x, rows)
        logits = own.new_full((len(rows), self.vocabulary), NEVER)
        return logits.index_copy_(1, self.target_ids, own.index_select(1, self.draft_ids))

    fuses_chains = False  # a fused chain would pick among the model's own ids

    def draft_chain(self, *_: Any) -> Chained:
        raise AssertionError("fuses_chains is False")
