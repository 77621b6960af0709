"""Which rank holds which part of a model.

    rank = stage * tensor + index       stage: consecutive layers     index: slice of every linear

Rank 0 schedules, drafts and verifies.  It holds the embedding, as all ranks of the first stage do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from outrider.checkpoints.spec import Spec
from outrider.errors import ConfigError

GROUP = 32  # inputs of a linear are split at multiples of it where possible: quantized weights have groups


@dataclass(frozen=True)
class Layout:
    """tensor: ranks of a stage; pipeline: stages; sizes: their numbers of layers, by default nearly equal."""

    tensor: int = 1
    pipeline: int = 1
    sizes: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: int, pipeline: int, layers: str | None) -> Layout:
        """layers: of every stage, such as "0,32".  Raises ConfigError for another number of stages."""
        if layers is None:
            return Layout(tensor, pipeline)
        found = [part.strip() for part in layers.split(",")]
        if len(found) != pipeline or not all(part.isdecimal() for part in found):
            raise ConfigError(
                f"pipeline_layers must be as many numbers of layers as pipeline_parallel_size, {pipeline}, "
                f"such as {','.join('8' * pipeline)}: got {layers!r}."
            )
        return Layout(tensor, pipeline, tuple(map(int, found)))

    @property
    def even(self) -> Layout:
        """The same ranks, with nearly equal stages."""
        return Layout(self.tensor, self.pipeline)

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def index(self, rank: int) -> int:
        return rank % self.tensor

    def rank(self, stage: int, index: int = 0) -> int:
        return stage * self.tensor + index

    def linked(self, rank: int, other: int) -> bool:
        """Whether two ranks send each other tensors that are not summed."""
        return rank == 0 or other == 0 or abs(rank - other) == self.tensor

    def peers(self, stage: int) -> range:
        """The ranks of a stage."""
        return range(stage * self.tensor, (stage + 1) * self.tensor)

    def layers(self, total: int) -> list[range]:
        """The layers of every stage."""
        if self.sizes:
            return [range(first, last) for first, last in pairwise(accumulate(self.sizes, initial=0))]
        return split(total, self.pipeline)

    def stage_of(self, layer: int, total: int) -> int:
        """The stage that has the residual stream before a layer; after the last one, the last stage."""
        return next((s for s, held in enumerate(self.layers(total)) if layer in held), self.pipeline - 1)

    def check(self, spec: Spec, option: str = "tensor_parallel_size") -> None:
        """Raise ConfigError if a model cannot be divided so.  option: that asks for the ranks of a stage."""
        if self.sizes and sum(self.sizes) != spec.layers:
            raise ConfigError(
                f"pipeline_layers {','.join(map(str, self.sizes))} are {sum(self.sizes)} layers, and the "
                f"model has {spec.layers}."
            )
        if not self.sizes and spec.layers < self.pipeline:
            raise ConfigError(
                f"pipeline_parallel_size {self.pipeline} is more than the {spec.layers} layers of the model: "
                "lower it."
            )
        kv, parts = spec.kv_heads, self.tensor
        if spec.heads % parts or (kv % parts and parts % kv):
            fits = [n for n in range(1, spec.heads + 1) if not spec.heads % n and (not kv % n or not n % kv)]
            raise ConfigError(
                f"{option} {parts} does not divide {spec.heads} attention heads with {kv} K/V "
                f"heads: choose one of {', '.join(map(str, fits))}."
            )


@dataclass(frozen=True)
class Share:
    """The slice of every layer that one rank of a stage holds.

    spec:       sizes of the slice; `layers` and `windows` are those of the model
    heads, kv_heads, inner, vocabulary: the parts of the model's
    first:      whether it adds the biases of row-parallel linears
    """

    spec: Spec
    heads: range
    kv_heads: range
    inner: range
    vocabulary: range
    first: bool

    @staticmethod
    def of(spec: Spec, parts: int, index: int) -> Share:
        """Share `index` of `parts`.  With fewer K/V heads than parts, neighbours hold the same head."""
        heads = split(spec.heads, parts)[index]
        group = spec.heads // spec.kv_heads
        kv_heads = range(heads.start // group, (heads.stop - 1) // group + 1)
        inner = split(spec.inner, parts, GROUP)[index]
        vocabulary = vocabulary_ranges(spec, parts)[index]
        own = replace(
            spec, heads=len(heads), kv_heads=len(kv_heads), inner=len(inner), vocabulary=len(vocabulary)
        )
        return Share(own, heads, kv_heads, inner, vocabulary, index == 0)


def vocabulary_ranges(spec: Spec, parts: int) -> Sequence[range]:
    """The tokens whose embeddings and logits each rank of a stage computes."""
    return split(spec.vocabulary, parts)


def split(total: int, parts: int, unit: int = 1) -> list[range]:
    """Neighbouring ranges of nearly equal length, with borders at multiples of `unit` if that fits."""
    if total % unit or total // unit < parts:
        unit = 1
    borders = [total // unit * i // parts * unit for i in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(borders)]
