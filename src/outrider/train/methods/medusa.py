"""Medusa (arXiv 2401.10774): heads on the last state, cross entropy with the text, decayed by head.

Medusa-1 trains the heads alone.  With `joint`, Medusa-2, the target changes too: train/joint.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from outrider.checkpoints.heads import Head
from outrider.core.row import LoRARequest
from outrider.core.validate import Count, Flag
from outrider.draft.medusa import FORMAT, REFERENCE, VLLM, Network, counts, reference_config
from outrider.errors import ConfigError
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, refuse
from outrider.train.joint import Joint
from outrider.train.options import TrainOptions

ADAPTER = "adapter"  # folder beside the heads
NUMBER = 1 << 30  # of the adapter in evaluations
RANK = 16


class Medusa(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  blocks: residual blocks of each.  own: each head has an lm_head,
        as in the reference; otherwise all use the target's.  joint: the target learns too, by a LoRA adapter
        in the folder "adapter": its texts change.  rank: of that adapter; None: 16.
        """

        heads: Count = 4
        blocks: Count = 1
        own: Flag = True
        joint: Flag = False
        rank: Count | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.rank is not None and not self.joint:
                raise ConfigError(f'rank ({self.rank}) is of the adapter that "joint": true trains: add it.')

        @property
        def engine(self) -> dict[str, Any]:
            return {"enable_lora": True, "max_lora_rank": self.rank or RANK} if self.joint else {}

    base_rate = 1e-3
    logits = False

    def build(self) -> nn.Module:
        options = self.options
        self.most, self.logits, self.joins = options.heads, options.joint, not options.joint
        heads = Network.beside(self.outer, options.heads, options.blocks, options.own)
        return Joint(heads, self.target, options.rank or RANK) if options.joint else heads

    @property
    def head(self) -> Any:
        return self.network.heads if self.options.joint else self.network

    def start_from(self, folder: Path) -> None:
        super().start_from(folder)
        if self.options.joint and (folder / ADAPTER).is_dir():
            self.network.load_adapter(folder / ADAPTER)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.options.joint:
            self.network.save_adapter(folder / ADAPTER)

    def adapter(self, folder: Path) -> LoRARequest | None:
        return LoRARequest(ADAPTER, NUMBER, str(folder / ADAPTER)) if self.options.joint else None

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("reference", "vllm"))
        ours = FORMAT.translate(head)
        (heads, blocks), own = counts(ours), "0.lm_head.weight" in ours
        refuse(layout, [name for name in ("token_map", "lm_head.weight") if name in ours])
        if layout == "reference":
            named = {REFERENCE.published(name, blocks=blocks): ours.raw(name) for name in ours}
            return reference_config(heads, blocks, own), named
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
