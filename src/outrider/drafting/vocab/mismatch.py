"""Whether a draft speaks the target's language, and what to do where it does not."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.checkpoints.hub import Checkpoint
from outrider.errors import ConfigError, unknown

PADDING = (
    512  # vocabularies whose sizes differ by less than this, and whose tokens agree, differ in padding only
)

MISMATCH = ("refuse", "allow", "intersect", "retokenize")


def check_mismatch(vocab_mismatch: str, siblings: int, ruled: bool, **lookbehind: int) -> None:
    """ruled: whether a rule stops the draft, or a drafter of its own speeds it up."""
    if vocab_mismatch not in MISMATCH:
        raise ConfigError(unknown("vocab_mismatch", vocab_mismatch, MISMATCH))
    if vocab_mismatch == "retokenize" and siblings > 1:
        raise ConfigError(
            f'siblings must be 1 where "vocab_mismatch" is "retokenize", which guesses chains; got {siblings}.'
        )
    if vocab_mismatch == "retokenize" and ruled:
        raise ConfigError(
            'early stops and a drafter for the draft need common tokens: leave them out, or choose "intersect".'
        )
    for name, value in lookbehind.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")


def fits(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuses a draft that speaks another language.  Sizes may differ by padding where the tokens themselves agree."""
    ours, theirs = draft.spec.vocabulary, target.spec.vocabulary
    if ours != theirs and abs(ours - theirs) >= PADDING:
        raise ConfigError(f"{_sizes(draft, target)}: they do not share a tokenizer.  {_CURE}")
    a, b = draft.tokenizer, target.tokenizer
    if a is not None and b is not None:
        different = next(_differences(a.get_vocab(), b.get_vocab(), min(ours, theirs)), None)
        if different:
            raise ConfigError(
                f"{_sizes(draft, target)}, and their tokenizers disagree: {different}.  {_CURE}"
            )


_CURE = (
    'Choose a draft of the same family, or set "vocab_mismatch": "intersect" to guess among the tokens that both have, "retokenize" to '
    'guess text, or "allow" if both mean the same by an id.'
)


def _sizes(draft: Checkpoint, target: Checkpoint) -> str:
    return f"the draft {draft.name!r} has a vocabulary of {draft.spec.vocabulary}, the target {target.name!r} one of {target.spec.vocabulary}"


def _differences(a: dict[str, int], b: dict[str, int], limit: int) -> Iterator[str]:
    for token, i in a.items():
        j = b.get(token)
        if i < limit and j != i:
            yield f"{token!r} is {i} in the draft and {'missing' if j is None else j} in the target"
