"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on the inputs of three layers of the target.

It predicts x_t+2 from the states at t and the token x_t+1, over a vocabulary of its own.  Its output
stands for the next state, and so continues from its own drafts.  K/V: see heads/recurrent.py;
trees: heads/trees.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outrider.checkpoints.heads import Head
from outrider.core.validate import Kind, check_fields, is_whole, optional, whole
from outrider.draft.eagle3 import layouts
from outrider.draft.eagle3.packed import Packed
from outrider.drafting.base import Drafter, Target
from outrider.errors import ConfigError
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Net, Recurrent, RecurrentOptions

LAYERS = Kind(
    "a list of layer numbers",
    lambda value: isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_whole, value)),
)


class Eagle3(Recurrent):
    demo: ClassVar = {"EAGLE-3": {"model": "builtin-eagle3", "tree": "chain", "num_speculative_tokens": 2}}

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """eagle_aux_hidden_state_layer_ids: the layers whose inputs the head reads, numbered as in vLLM.

        tap_offset: added to the file's layer numbers (SpecForge and SGLang number outputs, offset 1).
        None for both: as the file's producer numbers them; check this first if acceptance is low.
        """

        eagle_aux_hidden_state_layer_ids: Sequence[int] | None = None
        tap_offset: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            layers, offset = self.eagle_aux_hidden_state_layer_ids, self.tap_offset
            check_fields(self, {layouts.TAPS: optional(LAYERS), "tap_offset": optional(whole())})
            if layers is not None and offset is not None:
                raise ConfigError(
                    f"tap_offset moves what the file says, and {layouts.TAPS} replaces it: leave one of "
                    "them out."
                )

    def network(self) -> Net:
        head, options = layouts.translate(self.head), self.options
        self.reader = Reader(head, self.backend, self.reader.bits)
        layers = self.target.decoder.spec.layers
        facts = layouts.Facts.of(head, layers, options.eagle_aux_hidden_state_layer_ids, options.tap_offset)
        return Packed(self.reader, self.target, facts)

    @classmethod
    def claims(cls, head: Head) -> int:
        return layouts.claims_of(head)

    @classmethod
    def check(cls, head: Head) -> None:
        super().check(head)
        layouts.translate(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network over two thirds of the tokens."""
        from outrider.draft.eagle3.network import Network, Settings

        network = Network.random(Settings.fitting(target))
        return cls(cls.Options(), target, Head.of("example", network.config(), network.state_dict()))
