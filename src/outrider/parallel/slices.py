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
from outrider.core.lora import Low
from outrider.core.quantized import QuantizedWeight
from outrider.parallel.layout import Share

ROW_PARALLEL = ("o", "down")


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
        outputs = self._outputs(_projection(name.rpartition(".")[0]))
        if outputs is None:
            return self.whole.get(name, *shape)
        full, own = outputs
        return self.whole.get(name, full)[own.start : own.stop]

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        projection = _projection(name)
        if projection in ROW_PARALLEL:
            full, own = inputs_of(projection, self.spec, self.share)
            return columns(self.whole.linear(name, outputs, full), own)
        split = self._outputs(projection)
        assert split is not None, name
        full, own = split
        return rows(self.whole.linear(name, full, inputs), own)

    def _outputs(self, projection: str) -> tuple[int, range] | None:
        """All outputs of a column-parallel projection, and those of this rank; None for others."""
        spec, share = self.spec, self.share
        if projection in ("embed_tokens", "lm_head"):
            return spec.vocabulary, share.vocabulary
        return outputs_of(projection, spec, share)


def slice_update(layer: Mapping[str, Low], spec: Spec, share: Share) -> dict[str, Low]:
    """A rank's share of an adapter's updates of one layer."""
    own: dict[str, Low] = {}
    for name, low in layer.items():
        if name in ROW_PARALLEL:
            _, part = inputs_of(name, spec, share)
            own[name] = Low(low.a[:, part.start : part.stop].contiguous(), low.b, low.scale)
        else:
            split = outputs_of(name, spec, share)
            assert split is not None, name
            _, part = split
            own[name] = Low(low.a, low.b[part.start : part.stop].contiguous(), low.scale)
    return own


def outputs_of(projection: str, spec: Spec, share: Share) -> tuple[int, range] | None:
    if projection in ("gate", "up"):
        return spec.inner, share.inner
    if projection == "q":
        return spec.heads * spec.head_dim, _scaled(share.heads, spec.head_dim)
    if projection in ("k", "v"):
        return spec.kv_heads * spec.head_dim, _scaled(share.kv_heads, spec.head_dim)
    return None


def inputs_of(projection: str, spec: Spec, share: Share) -> tuple[int, range]:
    if projection == "down":
        return spec.inner, share.inner
    return spec.heads * spec.head_dim, _scaled(share.heads, spec.head_dim)


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


def _scaled(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)
