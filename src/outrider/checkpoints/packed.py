"""Checkpoints with integers in their safetensors: AWQ, GPTQ and compressed-tensors ("pack-quantized"), unpacked.

    method               values                        zero points                      scales
    awq (gemm)           qweight [K, O/8], interleaved qzeros [groups, O/8], likewise   scales [groups, O]
    gptq                 qweight [K/p, O]              qzeros [groups, O/p] (v1: - 1)   scales [groups, O]
    compressed-tensors   weight_packed [O, K/p]        weight_zero_point [O/p, groups]  weight_scale [O, groups]

All are int32 words of p = 32 / bits numbers, the lowest bits first.  w = scale (value - zero).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints.fields import QUANTIZATION
from outrider.checkpoints.validate import check
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

MIDDLE = {4: 8, 8: 128}  # what an unsigned number of so many bits is in the middle of
CURE = "load the unquantised checkpoint, or one in GGUF, AWQ (gemm), GPTQ or compressed-tensors (pack-quantized)."
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # output of a word's first, second … four bits
log = logging.getLogger("outrider")


class Named(Protocol):
    """The tensors of a checkpoint."""

    def __contains__(self, name: str) -> bool: ...
    def get(self, name: str, *shape: int) -> Tensor: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def raw(self, name: str) -> Tensor:
        """As it is, of any shape and type."""


@dataclass(frozen=True)
class Layout:
    """How a method names the tensors of a layer."""

    words: str
    zeros: str
    scales: str
    index: str  # the group of every input, where they do not lie side by side


LAYOUTS = {
    "awq": Layout("qweight", "qzeros", "scales", ""),
    "gptq": Layout("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": Layout("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}


@dataclass(frozen=True)
class Scheme:
    """What a quantization_config says.  sizes: the (bits, group) that may occur, group 0 = a whole row."""

    method: str
    sizes: frozenset[tuple[int, int]]
    symmetric: bool  # zero points may be missing
    shift: int = 0  # what is added to a stored zero point

    @staticmethod
    def of(config: Any) -> Scheme | None:
        """None for an unquantised model.  Raises ModelError for what cannot be read, with the cure."""
        given = getattr(config, "quantization_config", None)
        if not given:
            return None
        return Scheme.read(given if isinstance(given, dict) else given.to_dict())

    @staticmethod
    def read(given: dict[str, Any]) -> Scheme:
        """Of a quantization_config."""
        check(given, QUANTIZATION, "quantization_config")
        method = given.get("quant_method", "unknown")
        if method not in READERS:
            raise ModelError(f"the checkpoint is quantised by {method!r}, which is not supported: {CURE}")
        return READERS[method](given)


def _awq(given: dict[str, Any]) -> Scheme:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(
            f"the checkpoint is quantised by AWQ in version {version!r}, only 'gemm' can be read: {CURE}"
        )
    return Scheme(
        "awq",
        frozenset({_size(given.get("bits"), given.get("group_size", 128), (4,))}),
        not given.get("zero_point", True),
    )


def _gptq(given: dict[str, Any]) -> Scheme:
    layout = given.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"the checkpoint is quantised by GPTQ in the format {layout!r}, only 'gptq' and 'gptq_v2' can be read: {CURE}"
        )
    if any(not pattern.startswith("-:") for pattern in given.get("dynamic") or ()):
        raise ModelError(
            f"the checkpoint is quantised by GPTQ with settings that differ by layer ('dynamic'): {CURE}"
        )
    size = _size(given.get("bits"), given.get("group_size", 128), (4, 8))
    return Scheme("gptq", frozenset({size}), bool(given.get("sym", True)), int(layout == "gptq"))


def _compressed(given: dict[str, Any]) -> Scheme:
    layout, sizes, symmetric = given.get("format"), set(), True
    if layout != "pack-quantized":
        raise ModelError(
            f"the checkpoint is in the compressed-tensors format {layout!r}, only 'pack-quantized' can be read: {CURE}"
        )
    if given.get("transform_config"):
        raise ModelError(
            f"the checkpoint's activations must be transformed (transform_config), which is not supported: {CURE}"
        )
    for name, group in (given.get("config_groups") or {}).items():
        group = group or {}
        weights = group.get("weights") or {}
        if group.get("input_activations") or weights.get("type", "int") != "int":
            raise ModelError(
                f"the checkpoint quantises activations, or to no integers ({name} of config_groups): {CURE}"
            )
        sizes.add(
            _size(
                weights.get("num_bits"),
                -1 if weights.get("strategy") == "channel" else weights.get("group_size"),
                (4, 8),
            )
        )
        symmetric &= bool(weights.get("symmetric", True))
    if not sizes:
        raise ModelError(
            "the checkpoint's quantization_config has no config_groups: it does not say how its weights are packed."
        )
    return Scheme("compressed-tensors", frozenset(sizes), symmetric)


def _size(bits: Any, group: Any, widths: tuple[int, ...]) -> tuple[int, int]:
    if type(bits) is not int or bits not in widths:
        raise ModelError(
            f"the checkpoint is quantised to {bits} bits; supported: {' and '.join(map(str, widths))}."
        )
    if type(group) is not int or (group < 1 and group != -1):
        raise ModelError(
            f"the checkpoint's group_size must be a whole number, or -1 for whole rows, got {group!r}."
        )
    return bits, max(group, 0)


READERS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}


class PackedWeights:
    """The tensors of a quantised checkpoint.  Whether a layer is quantised, its tensors say."""

    def __init__(self, named: Named, scheme: Scheme) -> None:
        self.named, self.scheme, self.layout = named, scheme, LAYOUTS[scheme.method]
        self.warned = False

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def get(self, name: str, *shape: int) -> Tensor:
        return self.named.get(name, *shape)

    def belongs(self, name: str) -> bool:
        """Whether a tensor of the file is a part of a quantised layer."""
        layer, _, part = name.rpartition(".")
        own = (self.layout.words, self.layout.zeros, self.layout.scales, self.layout.index, "weight_shape")
        return part in own and f"{layer}.{self.layout.words}" in self.named

    def shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a quantised layer of a compressed-tensors checkpoint, from the headers of its tensors."""
        outputs, words = self.named.shape(f"{name}.{self.layout.words}")
        groups = self.named.shape(f"{name}.{self.layout.scales}")[-1]
        for bits, group in self.scheme.sizes:
            inputs = groups * group if group else words * 32 // bits
            if words == -(-inputs * bits // 32):
                return outputs, inputs
        raise ModelError(
            f"{name} has {words} words and {groups} scales an output, which the config does not explain."
        )

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight of a layer; a Tensor where it is not quantised, or where its groups do not lie side by side."""
        if f"{name}.{self.layout.words}" not in self.named:
            return self.get(f"{name}.weight", outputs, inputs)
        words, scales = (self.named.raw(f"{name}.{key}") for key in (self.layout.words, self.layout.scales))
        if self.scheme.method != "compressed-tensors":
            words, scales = words.T, scales.T  # [O/8, K] for awq, [O, K/p] for gptq
        bits, group = self._fitting(name, words, scales, outputs, inputs)
        middle = MIDDLE[bits]
        scales = scales.float().contiguous()
        values = (self._numbers(words, bits, outputs, inputs).short() - middle).to(torch.int8)
        zeros = self._zeros(name, bits, *scales.shape)
        offsets = (
            None if zeros is None or bool((zeros == middle).all()) else scales * (middle - zeros.float())
        )
        index = self._index(name, inputs, group)
        if index is None:
            return QuantizedWeight(values, scales, offsets, bits, group)
        whole = values.float() * scales[:, index]
        return whole if offsets is None else whole + offsets[:, index]

    def _fitting(
        self, name: str, words: Tensor, scales: Tensor, outputs: int, inputs: int
    ) -> tuple[int, int]:
        """(bits, group) by the shapes, which the config must have announced."""
        for bits, announced in self.scheme.sizes:
            group, per = announced or inputs, 32 // bits
            packed = (outputs // per, inputs) if self.scheme.method == "awq" else (outputs, -(-inputs // per))
            if (
                words.dtype == torch.int32
                and words.shape == packed
                and inputs % group == 0
                and scales.shape == (outputs, inputs // group)
            ):
                return bits, group
        sizes = " or ".join(
            f"{bits} bits in {f'groups of {group}' if group else 'whole rows'}"
            for bits, group in sorted(self.scheme.sizes)
        )
        raise ModelError(
            f"{name} of [{outputs}, {inputs}] is not quantized to {sizes}, as quantization_config (num_bits, group_size) says: "
            f"{self.layout.words} is {words.dtype} {tuple(words.shape)} and {self.layout.scales} {tuple(scales.shape)}, outputs first."
        )

    def _numbers(self, words: Tensor, bits: int, outputs: int, inputs: int) -> Tensor:
        """Unsigned, uint8 [outputs, inputs]."""
        if self.scheme.method != "awq":
            return _unpacked(words, bits)[:, :inputs]
        order = torch.tensor(AWQ_ORDER).argsort()
        return (
            _unpacked(words.T, bits).view(inputs, -1, 8)[:, :, order].reshape(inputs, outputs).T.contiguous()
        )

    def _zeros(self, name: str, bits: int, outputs: int, groups: int) -> Tensor | None:
        """Zero points, uint8 [outputs, groups], None where there are none: all in the middle."""
        full = f"{name}.{self.layout.zeros}"
        if self.scheme.symmetric and full not in self.named:
            return None
        words = self.named.raw(full)
        words = words.T if self.scheme.method == "compressed-tensors" else words
        if words.dtype != torch.int32 or words.shape != (groups, -(-outputs * bits // 32)):
            raise ModelError(
                f"{full} is {words.dtype} {tuple(words.shape)}, which is not {bits} bits for {groups} groups of {outputs} outputs."
            )
        if self.scheme.method == "awq":
            return self._numbers(words.T, bits, outputs, groups)
        return (_unpacked(words, bits)[:, :outputs].T + self.scheme.shift) & (2 * MIDDLE[bits] - 1)

    def _index(self, name: str, inputs: int, group: int) -> Tensor | None:
        """The group of every input, None where they lie side by side."""
        full = f"{name}.{self.layout.index}"
        index = self.named.raw(full).long() if full in self.named else torch.tensor(-1)
        plain = torch.arange(inputs) // group
        if bool((index == -1).all()) or torch.equal(index, plain):
            return None
        if index.shape != plain.shape or int(index.min()) < 0 or int(index.max()) > int(plain.max()):
            raise ModelError(
                f"{full} is corrupt: it should name one of {int(plain.max()) + 1} groups for each of {inputs} inputs."
            )
        if not self.warned:
            log.warning(
                "the groups of %s are in activation order (desc_act): such layers are expanded, which takes more memory",
                name,
            )
            self.warned = True
        return index


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [r, c] -> uint8 [r, c * 32 / bits], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
