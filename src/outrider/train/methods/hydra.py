"""Hydra and Hydra++ (arXiv 2402.05109): heads in sequence, cross entropy with the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Flag
from outrider.draft.hydra import BLOCK, FORMAT, PREFIX, Network
from outrider.errors import ConfigError
from outrider.heads.layouts import numbers
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain
from outrider.train.options import Fraction, TrainOptions

LM_HEAD = "hydra_lm_head."


class Hydra(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """heads: number of future tokens.  layers: of each head's MLP.  prefix: a layer over the text before
        the heads (Hydra++).  own: each head has an lm_head, as in the reference; otherwise all use the
        target's.  inner: of the prefix layer; None: the target's.
        """

        heads: Count = 4
        layers: Count = 4
        prefix: Flag = True
        own: Flag = True
        dropout: Fraction = 0.2
        inner: Count | None = None

    base_rate = 5e-4

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        self.most, self.joins = options.heads, not options.prefix and not options.dropout
        network = Network(
            spec.hidden,
            spec.vocabulary,
            options.heads,
            options.layers,
            self.sizes if options.prefix else None,
            options.dropout,
            options.own,
        )
        network.start(self.outer)
        return network

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("reference",))
        ours = FORMAT.translate(head)
        if not any(name.startswith(LM_HEAD) for name in ours):
            raise ConfigError(
                "the reference's heads have an lm_head each, and these use the target's: train the head with "
                "own=True."
            )
        tensors, heads = dense(ours), numbers(ours, BLOCK)
        prefix = any(name.startswith(PREFIX) for name in ours)
        named: dict[str, Tensor] = {}
        layers = 1
        for i in heads:
            slots = sorted(numbers(ours, f"hydra_mlp.{i}.{{slot}}.{{rest}}", field="slot"))
            layers = len(slots)
            if layers == 2:  # one module for all further blocks
                layers = max(2, ours.config.get("hydra_num_layers", 2))
            for block in range(layers):
                ours_at = f"hydra_mlp.{i}.{slots[min(block, len(slots) - 1)]}."
                slot = 2 * block + 1 if prefix else block
                for name, tensor in tensors.items():
                    if name.startswith(ours_at):
                        named[f"hydra_mlp.{i}.{slot}.{name.removeprefix(ours_at)}"] = tensor
            out = f"{LM_HEAD}{i}.1" if prefix else f"{LM_HEAD}{i}"
            named |= {f"{out}.{kind}": tensors[f"{LM_HEAD}{i}.{kind}"] for kind in ("weight", "bias")}
        named |= {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        config = {
            **plain(head.config),
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
            "hydra_num_heads": len(heads),
            "hydra_num_layers": layers,
            "grounded_heads": True,
        }
        return config, named
