"""Further decoder layers of a model of the lean decoder, with attention: those of a trained head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from outrider.backends.base import Backend, LayerKV
from outrider.cache.pool import Pool
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.stacked_experts import StackedExperts, has_stacked_experts
from outrider.checkpoints.weights import GivenWeights
from outrider.core.step_input import StepInput
from outrider.errors import ModelError
from outrider.models.layers import LayerReader
from outrider.models.placement import Precision


class LeanLayers:
    """Some layers, with K/V in a pool of their own.  eps: of their norms.

    unit_norms: a norm of the family multiplies with 1 + weight.
    """

    divided = None

    def __init__(
        self, spec: Spec, tensors: Mapping[str, Tensor], precision: Precision, backend: Backend, table: Tensor
    ) -> None:
        """spec: of such layers.  tensors: "{layer}.{name in it}" -> weight.  table: of rotations.

        Raises ModelError for tensors that are not those of such layers.
        """
        self.spec, self.precision, self.backend = spec, precision, backend
        self.eps, self.unit_norms = spec.eps, spec.variant.unit_norms
        weights = _Read(tensors)
        source = StackedExperts(weights) if has_stacked_experts(tensors) else weights
        reader, device = LayerReader(source, spec, precision.dtype, None), backend.device
        try:
            self.layers = [reader.layer(backend, i, str(i)) for i in range(spec.layers)]
        except ModelError as error:
            raise ModelError(
                f"layers of {spec.architecture} cannot be made from this file: {error}"
            ) from error
        if strange := sorted(tensors.keys() - weights.read):
            raise ModelError(
                f"layers of {spec.architecture} cannot be made from this file: it has "
                f"{', '.join(strange[:4])}, too."
            )
        self.packed = [backend.pack_layers(spec, [layer], table.to(device)) for layer in self.layers]

    @staticmethod
    def like(spec: Spec, tensors: Iterable[str], count: int) -> Spec:
        """The spec of `count` layers with attention, and with experts if there are tensors of some."""
        experts = spec.experts if any(".experts." in name for name in tensors) else None
        if experts is not None:
            experts = replace(experts, layers=(True,) * count)
        return replace(spec, layers=count, windows=(0,) * count, experts=experts, recurrent=None)

    def pool(self, slots: int) -> Pool:
        s, dtype = self.spec, self.precision.kv_dtype
        return Pool(s.layers, s.kv_heads, s.head_dim, slots, dtype, self.backend.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of K/V of one slot."""
        s = self.spec
        return Pool.bytes_per_slot(s.layers, s.kv_heads, s.head_dim, self.precision.kv_dtype)

    def __call__(self, x: Tensor, step_input: StepInput, pool: Pool, only: int) -> Tensor:
        """x [n, hidden] after layer `only`."""
        return self.backend.run_layers(self.packed[only], x, LayerKV(step_input, pool, only))


class _Read(GivenWeights):
    """Given tensors.  read: the names that were asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read = set[str]()

    def raw(self, name: str) -> Tensor:
        self.read.add(name)
        if name not in self:
            raise ModelError(f"it lacks {name}")
        return self.tensors[name]
