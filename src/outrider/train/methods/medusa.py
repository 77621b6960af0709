"""Medusa-1 (arXiv 2401.10774): heads on the last state, cross entropy with the text, decayed by head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.checkpoints.heads import Head
from outrider.core.validate import FLAG
from outrider.draft.medusa.layouts import FORMAT, REFERENCE, VLLM, counts
from outrider.draft.medusa.network import Network
from outrider.errors import ConfigError
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, refuse
from outrider.train.options import COUNT, TrainOptions


class Medusa(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  blocks: residual blocks of each.  own: each head has an lm_head,
        as in the reference; otherwise all use the target's.
        """

        KINDS: ClassVar = {"heads": COUNT, "blocks": COUNT, "own": FLAG}

        heads: int = 4
        blocks: int = 1
        own: bool = True

    base_rate = 1e-3
    logits = False

    def build(self) -> Network:
        options = self.options
        return Network.beside(self.outer, options.heads, options.blocks, options.own)

    def speculation(self, folder: Any, depth: int) -> dict[str, Any]:
        return super().speculation(folder, min(depth, self.options.heads))

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("reference", "vllm"))
        ours = FORMAT.translate(head)
        (heads, blocks), own = counts(ours), "0.lm_head.weight" in ours
        refuse(layout, [name for name in ("token_map", "lm_head.weight") if name in ours])
        if layout == "reference":
            config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": ""}
            named = {REFERENCE.published(name, blocks=blocks): ours.raw(name) for name in ours}
            return config if own else {**config, "version": "2"}, named
        if not own:
            raise ConfigError(
                "vLLM does not read heads without an lm_head of their own, and these use the target's."
            )
        vocabulary, hidden = ours.shape("0.lm_head.weight")
        out = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": hidden,
            "vocab_size": vocabulary,
            "num_heads": heads,
            "num_hidden_layers": blocks,
            "medusa_fc_bias": "0.0.linear.bias" in ours,
        }
        return out, {VLLM.published(name): ours.raw(name) for name in ours}
