"""Slices of a checkpoint's tensors, as one rank reads them.

    column parallel  q k v gate up embed lm_head   rows of the weight [O, K]: outputs are split
    row parallel     o down                        columns: inputs are split, results are added over ranks
    replicated       norms

Safetensors files are mapped, so that a rank reads the pages of its slice only.  Other formats are unpacked
one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outrider.checkpoints.spec import Spec
from outrider.checkpoints.weights import Source
from outrider.core.lora import LowRankUpdate
from outrider.core.quantized import QuantizedWeight
from outrider.parallel.layout import Share

ROW_PARALLEL = ("o", "down")


def splits(spec: Spec, share: Share) -> dict[str, tuple[int, range]]:
    """Projection -> all of its outputs, and those of this rank; of a row-parallel one, its inputs."""

    def of_heads(heads: int, own: range) -> tuple[int, range]:
        return heads * spec.head_dim, range(own.start * spec.head_dim, own.stop * spec.head_dim)

    q, kv = of_heads(spec.heads, share.heads), of_heads(spec.kv_heads, share.kv_heads)
    inner, vocabulary = (spec.inner, share.inner), (spec.vocabulary, share.vocabulary)
    outer = {"embed_tokens": vocabulary, "lm_head": vocabulary}
    return {"q": q, "k": kv, "v": kv, "o": q, "gate": inner, "up": inner, "down": inner, **outer}


@dataclass(frozen=True)
class SlicedSource:
    """`Source` of a rank's share of the tensors in `whole`, which is of a model of size `spec`."""

    whole: Source
    spec: Spec
    share: Share

    def __contains__(self, name: str) -> bool:
        added_once = name.endswith(".bias") and _projection(name.removesuffix(".bias")) in ROW_PARALLEL
        return name in self.whole and (self.share.first or not added_once)

    def get(self, name: str, *shape: int) -> Tensor:
        """A vector of this rank."""
        projection, found = _projection(name.rpartition(".")[0]), splits(self.spec, self.share)
        if projection not in found or projection in ROW_PARALLEL:
            return self.whole.get(name, *shape)
        full, own = found[projection]
        return self.whole.get(name, full)[own.start : own.stop]

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        projection = _projection(name)
        full, own = splits(self.spec, self.share)[projection]
        if projection in ROW_PARALLEL:
            return columns(self.whole.linear(name, outputs, full), own)
        return rows(self.whole.linear(name, full, inputs), own)


def slice_update(layer: Mapping[str, LowRankUpdate], spec: Spec, share: Share) -> dict[str, LowRankUpdate]:
    """A rank's share of an adapter's updates of one layer."""
    own: dict[str, LowRankUpdate] = {}
    for name, (a, b, scale) in layer.items():
        _, part = splits(spec, share)[name]
        if name in ROW_PARALLEL:
            own[name] = LowRankUpdate(a[:, part.start : part.stop].contiguous(), b, scale)
        else:
            own[name] = LowRankUpdate(a, b[part.start : part.stop].contiguous(), scale)
    return own


def rows(weight: Tensor | QuantizedWeight, own: range) -> Tensor | QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return weight.mapped(lambda part: part[own.start : own.stop])
    return weight[own.start : own.stop]


def columns(weight: Tensor | QuantizedWeight, own: range) -> Tensor | QuantizedWeight:
    """Inputs of a weight.  Groups that a border cuts become smaller, which is exact."""
    if not isinstance(weight, QuantizedWeight):
        return weight[:, own.start : own.stop]
    size = math.gcd(weight.group, own.start, own.stop)
    few = weight.regrouped(size)
    groups = slice(own.start // size, own.stop // size)
    offsets = None if few.offsets is None else few.offsets[:, groups].contiguous()
    values, scales = few.values[:, own.start : own.stop].contiguous(), few.scales[:, groups].contiguous()
    return QuantizedWeight(values, scales, offsets, few.bits, size)


def _projection(name: str) -> str:
    """'q' for 'model.layers.0.self_attn.q_proj', 'lm_head' for 'lm_head'."""
    return name.rpartition(".")[2].removesuffix("_proj")
