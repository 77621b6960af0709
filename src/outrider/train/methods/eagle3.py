"""EAGLE-3 (arXiv 2503.01840): cross entropy with the target on the head's own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from outrider.core.validate import Kind, optional
from outrider.draft.eagle3.layouts import default_taps, exported
from outrider.draft.eagle3.network import Network
from outrider.errors import ConfigError
from outrider.train.base import Method
from outrider.train.options import COUNT, POSITIVE, TAPS, TrainOptions

OBJECTIVE = Kind("kl or acceptance", lambda value: value in ("kl", "acceptance"))


class Eagle3(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """draft_vocab_size: the most frequent tokens of the answers; all, if the target has no more.
        test_steps, decay: steps of the training-time test, and the weight of each relative to the one before.
        objective: "kl", or "acceptance": -log of the expected acceptance (LK losses, arXiv 2602.23881).
        taps: the layers whose inputs are read; None: the published three.  inner: of the MLP; None: the
        target's.
        """

        KINDS: ClassVar = {
            "draft_vocab_size": COUNT,
            "test_steps": COUNT,
            "decay": POSITIVE,
            "objective": OBJECTIVE,
            "taps": optional(TAPS),
            "inner": optional(COUNT),
        }

        draft_vocab_size: int = 32000
        test_steps: int = 7
        decay: float = 0.8
        objective: str = "kl"
        taps: Sequence[int] | None = None
        inner: int | None = None

    export = staticmethod(exported)
    base_rate = 1e-4

    def build(self) -> Network:
        options, layers = self.options, self.target.decoder.spec.layers
        self.wanted = within(options.taps or sorted(set(default_taps(layers))), layers)
        network = Network(
            self.sizes,
            self.target.vocabulary,
            self.wanted,
            frequent(self.counts, options.draft_vocab_size),
            self.target.checkpoint.spec.context,
            steps=options.test_steps,
            decay=options.decay,
            acceptance=options.objective == "acceptance",
        )
        network.lm_head.weight.data.copy_(self.outer.lm_head[network.ids])
        return network


def within(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """The taps.  Raises ConfigError for one that the target does not have."""
    if not all(0 <= tap <= layers for tap in taps):
        raise ConfigError(f"taps must be in 0 … {layers}, the layers of the target: got {list(taps)}.")
    return tuple(taps)


def frequent(counts: Tensor, most: int) -> tuple[int, ...] | None:
    """The `most` most frequent tokens, ascending; None if that is all of them."""
    if most >= len(counts):
        return None
    order = torch.sort(counts, descending=True, stable=True).indices
    return tuple(sorted(order[:most].tolist()))
