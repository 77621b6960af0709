"""Options of layer skipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from outrider.core.validate import SHARE, Checked, Count, Flag, Kind, Share, Text, either, whole
from outrider.errors import ConfigError

NAME = Kind("the name of a set or a file", lambda value: isinstance(value, str))
Threshold = Annotated[float | str, either(SHARE, "auto")]
Siblings = Annotated[int | str, either(whole(1, 64), "confidence")]


@dataclass(frozen=True)
class LayerSkipOptions(Checked):
    """Options of layer skipping.

    At most one of these names the parts to skip.  Without any, it is the published set of this very model if
    there is one, otherwise every second layer between the first and the last.

    skip_attention, skip_mlp: numbers of layers, from 0.
    layers: the name of a published set, or a file of `outrider tune layerskip`.
    early_exit: draft with this many first layers only.
    exit_head: folder of a trained exit, which names its layer: early_exit with a norm of its own.

    exit_threshold: stop after a token less probable than this.  "auto" starts at 0.8 for greedy rows and 0.5
        for others.  None never stops.
    adapt_threshold: move the threshold with the share of accepted tokens.
    siblings: tokens at each depth, of which the best is continued; "confidence": more, the less sure the
        draft is.

    search: find the set while serving, from the last context_window tokens of a request.  It starts with the
        given set, or with every second layer.
    skip_ratio: share of the sublayers between the first and the last layer that the search skips.
    opt_interval: steps from one candidate set to the next.
    bayes_interval: one candidate in this many is chosen by Bayesian optimization, the others at random.
    max_score, max_tolerance_iter, max_opt_iter: the search ends when a set scores above max_score, after
        max_tolerance_iter candidates without improvement, or after max_opt_iter candidates.
    """

    skip_attention: Sequence[int] | None = None
    skip_mlp: Sequence[int] | None = None
    layers: Annotated[str, NAME] | None = None
    early_exit: int | None = None
    exit_head: Text | None = None
    exit_threshold: Threshold | None = "auto"
    adapt_threshold: Flag = True
    siblings: Siblings = 1
    search: Flag = False
    skip_ratio: Share = 0.45
    context_window: Count = 32
    opt_interval: Count = 1
    bayes_interval: Count = 25
    max_opt_iter: Count = 1000
    max_tolerance_iter: Count = 300
    max_score: Share = 0.95

    def __post_init__(self) -> None:
        self._check_set()
        super().__post_init__()

    def _check_set(self) -> None:
        """Raise ConfigError for two ways to name the set."""
        given = {
            "skip_attention and skip_mlp": self.skip_attention is not None or self.skip_mlp is not None,
            "layers": self.layers is not None,
            "early_exit": self.early_exit is not None,
            "exit_head": self.exit_head is not None,
        }
        if sum(given.values()) > 1:
            names = " / ".join(name for name, is_given in given.items() if is_given)
            raise ConfigError(f"{names}: give one of these.")
        if self.search and (given["early_exit"] or given["exit_head"]):
            raise ConfigError("search looks for sublayers to skip: give it no early_exit and no exit_head.")
