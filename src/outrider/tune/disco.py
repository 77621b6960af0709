"""A stop classifier for a pair of models: guesses that the target has judged, on prompts of the user's, and a network fitted to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outrider.bench.measure import Prompts
from outrider.core.params import SamplingParams
from outrider.draft.draft_model import DraftModel
from outrider.drafting import disco
from outrider.errors import ConfigError
from outrider.llm import LLM

LEAST = 200  # draft tokens, fewer than which teach a network of some 130 weights nothing
APART = 5  # every so manieth prompt is held out

Pairs = list[tuple[list[float], bool]]  # (features of a guess, whether it was right)


class Fitted(NamedTuple):
    """The network, how many guesses it was fitted to, how many were held out, and for how many of those it or the more frequent answer
    was right."""

    classifier: disco.Classifier
    seen: int
    held_out: int
    right: int
    most: int


def record(
    llm: LLM, draft: str, prompts: Prompts, params: SamplingParams, levels: int, tick: Callable[[], None]
) -> list[Pairs]:
    """What became of the guesses of `draft`, chains of so many levels, prompt by prompt."""
    asked = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": levels,
        "assistant_confidence_threshold": 0.0,
    }
    twin = llm.variant(asked)
    drafter = twin.engine.drafter
    assert isinstance(drafter, DraftModel)
    found: list[Pairs] = []
    for _, prompt in prompts:
        pairs: Pairs = []
        drafter.stop.pairs = pairs
        twin.generate(prompt, params)
        found.append(pairs)
        tick()
    return found


def fit(recorded: list[Pairs], seed: int = 0) -> Fitted:
    """The held-out prompts are every APARTth, none where there are fewer.  Raises ConfigError for fewer than LEAST draft tokens."""
    held = [pair for pairs in recorded[APART - 1 :: APART] for pair in pairs]
    seen = [pair for i, pairs in enumerate(recorded) if i % APART != APART - 1 for pair in pairs]
    if len(seen) < LEAST:
        raise ConfigError(
            f"{len(seen)} draft tokens were judged, and a stop classifier needs {LEAST} or more: give more --prompts, or raise -n."
        )
    classifier = disco.fit(seen, seed=seed)
    hits = sum(classifier.accepts(features) == good for features, good in held)
    good = sum(good for _, good in held)
    return Fitted(classifier, len(seen), len(held), hits, max(good, len(held) - good))
