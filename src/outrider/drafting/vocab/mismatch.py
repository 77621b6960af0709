"""Comparison of the draft's vocabulary with the target's."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.checkpoints.hub import Checkpoint
from outrider.errors import ConfigError

# Vocabularies whose sizes differ by less than this, and whose tokens agree, differ in padding only.
PADDING = 512

MISMATCH = ("refuse", "allow", "intersect", "retokenize")

_CURE = (
    'Choose a draft of the same family, or set "vocab_mismatch": "intersect" to draft among the tokens that '
    'both have, "retokenize" to draft text, or "allow" if both mean the same by an id.'
)


def check_mismatch(vocab_mismatch: str, siblings: int, needs_shared: bool) -> None:
    """Raise ConfigError for what "retokenize" lacks.  needs_shared: a stop rule or staged drafter is set."""
    if vocab_mismatch == "retokenize" and siblings > 1:
        raise ConfigError(
            f'siblings must be 1 where "vocab_mismatch" is "retokenize", which drafts chains; got {siblings}.'
        )
    if vocab_mismatch == "retokenize" and needs_shared:
        raise ConfigError(
            "early stops and a drafter for the draft need common tokens: leave them out, or choose "
            '"intersect".'
        )


def fits(draft: Checkpoint, target: Checkpoint) -> None:
    """Raise ConfigError for a draft with another vocabulary.  If the tokens agree, the padding may differ."""
    sizes = draft.spec.vocabulary, target.spec.vocabulary
    what = (
        f"the draft {draft.name!r} has a vocabulary of {sizes[0]}, "
        f"the target {target.name!r} one of {sizes[1]}"
    )
    if abs(sizes[0] - sizes[1]) >= PADDING:
        raise ConfigError(f"{what}: they do not share a tokenizer.  {_CURE}")
    if draft.tokenizer is not None and target.tokenizer is not None:
        vocabularies = draft.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        different = next(_differences(*vocabularies, min(sizes)), None)
        if different:
            raise ConfigError(f"{what}, and their tokenizers disagree: {different}.  {_CURE}")


def _differences(draft: dict[str, int], target: dict[str, int], limit: int) -> Iterator[str]:
    """Descriptions of the tokens with other ids, among the first `limit` ids of the draft."""
    for token, i in draft.items():
        j = target.get(token)
        if i < limit and j != i:
            yield f"{token!r} is {i} in the draft and {'missing' if j is None else j} in the target"
