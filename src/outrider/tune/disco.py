"""Fitting a stop classifier to a pair of models: collect draft tokens that the target judged, then fit the
network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outrider.bench.measure import Prompts
from outrider.core.params import SamplingParams
from outrider.draft import PLAIN_MODEL, detect
from outrider.draft.draft_model import DraftModel
from outrider.drafting import disco
from outrider.errors import ConfigError
from outrider.llm import LLM

MIN_TOKENS = 200  # draft tokens that a network of some 130 weights needs
HOLD_OUT = 5  # one prompt in this many is held out

Pairs = list[tuple[list[float], bool]]  # (features of a node, whether it was accepted)


class Fitted(NamedTuple):
    """fitted, held_out: numbers of draft tokens.

    right: held-out ones that the network judged rightly.  majority: the same for the more frequent answer
    alone.
    """

    classifier: disco.Classifier
    fitted: int
    held_out: int
    right: int
    majority: int


def record(
    llm: LLM, draft: str, prompts: Prompts, params: SamplingParams, depth: int, tick: Callable[[str], None]
) -> list[Pairs]:
    """Draft chains of `depth` tokens with the model `draft`.  Returns the judged nodes of each prompt.

    Raises ConfigError for a head.
    """
    if (method := detect(draft)) != PLAIN_MODEL:
        raise ConfigError(f"{draft!r} is a head for {method!r}: only draft models have a stop classifier.")
    config = {
        "method": PLAIN_MODEL,
        "model": draft,
        "num_speculative_tokens": depth,
        "assistant_confidence_threshold": 0.0,
    }
    variant = llm.variant(config)
    drafter = variant.engine.drafter
    assert isinstance(drafter, DraftModel)
    recorded: list[Pairs] = []
    for kind, prompt in prompts:
        drafter.stop.pairs = []
        variant.generate(prompt, params)
        recorded.append(drafter.stop.pairs)
        tick(kind)
    return recorded


def fit(recorded: list[Pairs], seed: int = 0) -> Fitted:
    """Fit to all but every HOLD_OUT-th prompt.  Raises ConfigError for fewer than MIN_TOKENS draft tokens."""
    train, held_out = Pairs(), Pairs()
    for number, pairs in enumerate(recorded, 1):
        (train if number % HOLD_OUT else held_out).extend(pairs)
    if len(train) < MIN_TOKENS:
        raise ConfigError(
            f"{len(train)} draft tokens were judged, and a stop classifier needs {MIN_TOKENS} or more: "
            "give more --prompts, or raise -n."
        )
    classifier = disco.fit(train, seed=seed)
    right = sum(classifier.accepts(features) == accepted for features, accepted in held_out)
    accepted = sum(accepted for _, accepted in held_out)
    return Fitted(classifier, len(train), len(held_out), right, max(accepted, len(held_out) - accepted))
