"""ReDrafter (arXiv 2403.09919): a recurrent head, cross entropy with the text over five steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Flag
from outrider.draft.redrafter import CONVERTED, FORMAT, Network, blocks
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain
from outrider.train.options import TrainOptions


class ReDrafter(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers: residual blocks.  exit_dim: their width; None: twice the target's.  rnn: otherwise states
        are sums of embeddings.
        """

        layers: Count = 2
        exit_dim: Count | None = None
        rnn: Flag = True

    base_rate = 1e-3
    logits, joins = False, True
    drafts: ClassVar = {"beam_width": 1}

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        return Network(spec.hidden, spec.vocabulary, options.layers, options.exit_dim, options.rnn)

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("reference", "tensorrt-llm"))
        ours = FORMAT.translate(head)
        tensors, count = dense(ours), blocks(ours)
        if layout == "tensorrt-llm":
            tensors = {
                f"drafter.{CONVERTED.published(name, blocks=count)}": tensors[name] for name in tensors
            }
        return plain(head.config), tensors
