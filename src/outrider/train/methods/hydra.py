"""Hydra and Hydra++ (arXiv 2402.05109): heads in sequence, cross entropy with the target's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            heads=options.heads,
            layers=options.layers,
            prefix=self.sizes if options.prefix else None,
            dropout=options.dropout,
            own=options.own,
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
        named = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        layers = 1
        for i in heads:
            slots = _block_slots(ours, i)
            layers = len(slots)
            named |= _published_head(tensors, i, slots, prefix)
        config = {
            **plain(head.config),
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
            "hydra_num_heads": len(heads),
            "hydra_num_layers": layers,
            "grounded_heads": True,
        }
        return config, named


def _published_head(
    tensors: Mapping[str, Tensor], i: int, slots: Sequence[int], prefix: bool
) -> dict[str, Tensor]:
    """Head i under the reference's names.  slots: of its blocks, in our names."""
    named = {}
    for block, own_slot in enumerate(slots):
        own, slot = f"hydra_mlp.{i}.{own_slot}.", 2 * block + 1 if prefix else block
        for name, tensor in tensors.items():
            if name.startswith(own):
                named[f"hydra_mlp.{i}.{slot}.{name.removeprefix(own)}"] = tensor
    out = f"{LM_HEAD}{i}.1" if prefix else f"{LM_HEAD}{i}"
    for kind in ("weight", "bias"):
        named[f"{out}.{kind}"] = tensors[f"{LM_HEAD}{i}.{kind}"]
    return named


def _block_slots(head: Head, i: int) -> list[int]:
    """The slot of each block of head i, in our names."""
    slots = sorted(numbers(head, f"hydra_mlp.{i}.{{slot}}.{{rest}}", field="slot"))
    if len(slots) != 2:
        return slots
    blocks = max(2, head.config.get("hydra_num_layers", 2))  # one module for all further blocks
    return [slots[0], *[slots[1]] * (blocks - 1)]
