"""Weights of a trained head, packed for the target's backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.backends.base import Backend
from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantize import reduced
from outrider.core.quantized import QuantizedWeight, join
from outrider.models.layers import fused


@dataclass(frozen=True)
class Reader:
    """Packs the weights of a head.  bits: 8 or 4, None to keep them.  ranks: that share its layers."""

    head: Head
    backend: Backend
    bits: int | None = None
    ranks: int = 1

    def vector(self, name: str, size: int) -> Tensor:
        return self.head.get(name, size).float().to(self.backend.device).contiguous()

    def optional(self, name: str, size: int) -> Tensor | None:
        """A vector; None if the file lacks it."""
        return self.vector(name, size) if name in self.head else None

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor.  Raises ModelError for one of another number of dimensions."""
        shape = self.head.shape(name)
        if len(shape) != 2:
            raise self.head.misfit(f"its {self.head.stored[name]} is {shape}, and a matrix is needed")
        return shape[0], shape[1]

    def linear(self, name: str, outputs: int, inputs: int) -> Any:
        """`name`.weight, and `name`.bias if the file has one."""
        return self.fused([(name, outputs)], inputs)

    @property
    def outer(self) -> Reader:
        """The reader for embeddings and lm_heads, which get at least 8 bits: they decide the tokens."""
        return replace(self, bits=self.bits and 8)

    def fused(self, parts: Sequence[tuple[str, int]], inputs: int) -> Any:
        """Several linears (name, outputs) of one input as one, their outputs side by side."""
        return fused(self.head, self.backend, parts, inputs, torch.float32, self.bits)

    def linear_with_bias(self, names: Sequence[str], outputs: int, inputs: int) -> Any:
        """Linears of one input as one, each of which must have a bias."""
        for name in names:
            self.head.get(f"{name}.bias", outputs)
        return self.fused([(name, outputs) for name in names], inputs)

    def shared_linears(self, names: Sequence[str], width: int) -> list[Any]:
        """Square linears; those that equal the one before are packed once."""
        packed = list[Any]()
        for before, name in zip([None, *names], names):
            parts = [part for part in ("weight", "bias") if f"{name}.{part}" in self.head]
            same = before is not None and all(
                torch.equal(self.head.raw(f"{before}.{part}"), self.head.raw(f"{name}.{part}"))
                for part in parts
            )
            packed.append(packed[-1] if same else self.linear(name, width, width))
        return packed

    def lm_head_for(self, name: str, ids: Tensor, inputs: int) -> Any:
        """An lm_head for the tokens `ids`.  Files with a row for every target token are cut to these."""
        stored, outer = self.head.shape(f"{name}.weight")[0], self.outer
        if stored == len(ids) or stored <= int(ids.max()):
            return outer.linear(name, len(ids), inputs)
        weight, which = self.head.linear(name, stored, inputs), ids.long()
        rows = (
            weight.mapped(lambda part: part[which]) if isinstance(weight, QuantizedWeight) else weight[which]
        )
        return self.backend.pack(join([reduced(rows, outer.bits)], torch.float32), None)
