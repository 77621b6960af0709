"""DFlash (arXiv 2602.06036): one pass of a few layers drafts a whole block.  See heads/blocks.py."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

from outrider import draft
from outrider.checkpoints.heads import Head
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.block_layouts import ARCHITECTURE, SLIDING, block_format, kind_of
from outrider.heads.block_parts import BlockNetwork
from outrider.heads.blocks import BlockDrafter, BlockOptions
from outrider.heads.layouts import flat

TYPE = "dflash"
# in names of other methods' tensors
OTHERS = re.compile(r"markov|confidence_head|prefix_gru|embed_proj|candidate_selector|layer_fusion|_conv\.")


class Network(BlockNetwork):
    """A plain block, in the format of speculators."""

    def config(self) -> dict[str, Any]:
        return self.speculators(TYPE, ARCHITECTURE)


class DFlash(BlockDrafter):
    FORMAT = block_format(TYPE)
    demo: ClassVar = {"DFlash": {"model": "builtin-dflash", "num_speculative_tokens": 3}}
    Options = BlockOptions

    @classmethod
    def is_own(cls, head: Head) -> bool:
        named = kind_of(head)
        other = named != TYPE and named in draft.names()
        return not other and not any(map(OTHERS.search, head))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, one with a window, on the first and the last states; a tree of 8."""
        head = random_head(Network.like, target, taps=(1, target.decoder.spec.layers), block=5)
        kinds = {"layer_types": ["full_attention", SLIDING], "sliding_window": 9}
        config = {**flat(head.config), **kinds, "sliding_window_non_causal": True}
        return cls(cls.Options(nodes=8), target, replace(head, config=config))
