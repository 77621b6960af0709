"""Whether a draft speaks the target's language."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.errors import ConfigError
from outrider.models.hub import Checkpoint

PADDING = 512  # vocabularies whose sizes differ by less than this, and whose tokens agree, differ in padding only


def fits(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuses a draft that speaks another language.  Sizes may differ by padding where the tokens themselves agree."""
    ours, theirs = draft.spec.vocabulary, target.spec.vocabulary
    if ours != theirs and abs(ours - theirs) >= PADDING:
        raise ConfigError(f"{_sizes(draft, target)}: they do not share a tokenizer.  {_CURE}")
    a, b = draft.tokenizer, target.tokenizer
    if a is not None and b is not None:
        different = next(_differences(a.get_vocab(), b.get_vocab(), min(ours, theirs)), None)
        if different:
            raise ConfigError(f"{_sizes(draft, target)}, and their tokenizers disagree: {different}.  {_CURE}")


_CURE = 'Choose a draft of the same family, or set "vocab_mismatch": "allow" to guess among the common ids.'


def _sizes(draft: Checkpoint, target: Checkpoint) -> str:
    return (
        f"the draft {draft.name!r} has a vocabulary of {draft.spec.vocabulary}, the target {target.name!r} one of {target.spec.vocabulary}"
    )


def _differences(a: dict[str, int], b: dict[str, int], limit: int) -> Iterator[str]:
    for token, i in a.items():
        j = b.get(token)
        if i < limit and j != i:
            yield f"{token!r} is {i} in the draft and {'missing' if j is None else j} in the target"
