"""Unpacking of AWQ, GPTQ and compressed-tensors ("pack-quantized") weights into `QuantizedWeight`.

    method               values                  zero points                      scales
    awq (gemm)           qweight [K, O/8]        qzeros [groups, O/8]             scales [groups, O]
    gptq                 qweight [K/p, O]        qzeros [groups, O/p]             scales [groups, O]
    compressed-tensors   weight_packed [O, K/p]  weight_zero_point [O/p, groups]  weight_scale [O, groups]

K inputs, O outputs; every int32 word holds p = 32 / bits values, the lowest bits first.  weight = scale
(value - zero).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.checkpoints.packed_scheme import Scheme, Size
from outrider.checkpoints.quantized_layers import Layout, QuantizedLayers
from outrider.checkpoints.weights import Weights
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

MIDPOINT = {4: 8, 8: 128}  # of the unsigned values, by number of bits
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output that a word's first, second … four bits belong to
log = logging.getLogger("outrider")


LAYOUTS = {
    "awq": Layout("qweight", "qzeros", "scales"),
    "gptq": Layout("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": Layout(
        "weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx", ("weight_shape",)
    ),
}


class PackedWeights(QuantizedLayers):
    """Weights in packed words.  A layer is quantized if its words are in the files."""

    def __init__(self, files: Weights, scheme: Scheme) -> None:
        layout = LAYOUTS[scheme.method]
        words = f".{layout.values}"
        layers = [name.removesuffix(words) for name in files if name.endswith(words)]
        super().__init__(files, scheme, layout, layers)
        self.warned = False

    def shape(self, name: str) -> tuple[int, ...]:
        layer = self.layer_of.get(name)
        return super().shape(name) if layer is None else self._layer_shape(layer)

    def _read(self, layer: str) -> Tensor | QuantizedWeight:
        return self.linear(layer, *self._layer_shape(layer))

    def bits(self, names: Iterable[str]) -> int | None:
        bits: int | None = None
        for layer in (self.layer_of[name] for name in names if name in self.layer_of):
            stored = 32 * math.prod(self.files.shape(f"{layer}.{self.layout.values}"))
            bits = max(bits or 0, stored // math.prod(self._layer_shape(layer)))
        return bits

    def _layer_shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a quantized layer, from headers."""
        outputs, words = self.files.shape(f"{name}.{self.layout.values}")
        if self.scheme.method != "compressed-tensors":
            ((bits, _),) = self.scheme.sizes
            rows, columns, per_word = outputs, words, 32 // bits
            return (columns * per_word, rows) if self.scheme.method == "awq" else (columns, rows * per_word)
        groups = self.files.shape(f"{name}.{self.layout.scales}")[-1]
        for bits, group in self.scheme.sizes:
            inputs = groups * group if group else words * 32 // bits
            if words == -(-inputs * bits // 32):
                return outputs, inputs
        raise ModelError(
            f"{name} has {words} words and {groups} scales an output, which does not fit the "
            "quantization_config."
        )

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of a layer; dense if unquantized or if groups are not contiguous."""
        if f"{name}.{self.layout.values}" not in self.files:
            return self.get(f"{name}.weight", outputs, inputs)
        words, scales = (
            self.files.raw(f"{name}.{part}") for part in (self.layout.values, self.layout.scales)
        )
        if self.scheme.method != "compressed-tensors":
            words, scales = words.T, scales.T  # [O/8, K] for awq, [O, K/p] for gptq
        bits, group = self._matching_size(name, words, scales, outputs, inputs)
        scales = scales.float().contiguous()
        midpoint = MIDPOINT[bits]
        values = (self._unpack_values(words, bits, outputs, inputs).short() - midpoint).to(torch.int8)
        zeros = self._zero_points(name, bits, *scales.shape)
        centred = zeros is None or bool((zeros == midpoint).all())
        offsets = None if zeros is None or centred else scales * (midpoint - zeros.float())
        group_of_input = self._group_of_input(name, inputs, group)
        if group_of_input is None:
            return QuantizedWeight(values, scales, offsets, bits, group)
        dense = values.float() * scales[:, group_of_input]
        return dense if offsets is None else dense + offsets[:, group_of_input]

    def _matching_size(self, name: str, words: Tensor, scales: Tensor, outputs: int, inputs: int) -> Size:
        """The size of the scheme that explains the shapes of a layer.  Raises ModelError if none does."""
        for bits, scheme_group in self.scheme.sizes:
            group, per_word = scheme_group or inputs, 32 // bits
            awq = self.scheme.method == "awq"
            packed = (outputs // per_word, inputs) if awq else (outputs, -(-inputs // per_word))
            words_match = words.dtype == torch.int32 and words.shape == packed
            if words_match and inputs % group == 0 and scales.shape == (outputs, inputs // group):
                return Size(bits, group)
        sizes = " or ".join(
            f"{bits} bits in {f'groups of {group}' if group else 'whole rows'}"
            for bits, group in sorted(self.scheme.sizes)
        )
        raise ModelError(
            f"{name} of [{outputs}, {inputs}] is not quantized to {sizes}, as quantization_config (num_bits, "
            f"group_size) says: {self.layout.values} is {words.dtype} {tuple(words.shape)} and "
            f"{self.layout.scales} {tuple(scales.shape)}, outputs first."
        )

    def _unpack_values(self, words: Tensor, bits: int, outputs: int, inputs: int) -> Tensor:
        """Unsigned values, uint8 [outputs, inputs]."""
        if self.scheme.method != "awq":
            return _unpack_words(words, bits)[:, :inputs]
        interleaved = _unpack_words(words.T, bits).view(inputs, -1, 8)
        ordered = interleaved[:, :, torch.tensor(AWQ_ORDER).argsort()]
        return ordered.reshape(inputs, outputs).T.contiguous()

    def _zero_points(self, name: str, bits: int, outputs: int, groups: int) -> Tensor | None:
        """Zero points, uint8 [outputs, groups]; None if the checkpoint has none, which means the midpoint."""
        full_name = f"{name}.{self.layout.zeros}"
        if self.scheme.symmetric and full_name not in self.files:
            return None
        words = self.files.raw(full_name)
        words = words.T if self.scheme.method == "compressed-tensors" else words
        if words.dtype != torch.int32 or words.shape != (groups, -(-outputs * bits // 32)):
            raise ModelError(
                f"{full_name} is {words.dtype} {tuple(words.shape)}, "
                f"which is not {bits} bits for {groups} groups of {outputs} outputs."
            )
        if self.scheme.method == "awq":
            return self._unpack_values(words.T, bits, outputs, groups)
        return (_unpack_words(words, bits)[:, :outputs].T + self.scheme.zero_shift) & (2 * MIDPOINT[bits] - 1)

    def _group_of_input(self, name: str, inputs: int, group: int) -> Tensor | None:
        """Group indices, int64 [inputs]; None if the groups are contiguous."""
        full_name = f"{name}.{self.layout.group_index}"
        index = self.files.raw(full_name).long() if full_name in self.files else torch.tensor(-1)
        contiguous = torch.arange(inputs) // group
        if bool((index == -1).all()) or torch.equal(index, contiguous):
            return None
        last = int(contiguous.max())
        if index.shape != contiguous.shape or int(index.min()) < 0 or int(index.max()) > last:
            raise ModelError(
                f"{full_name} is corrupt: it should name one of {last + 1} groups for each of {inputs} "
                "inputs."
            )
        if not self.warned:
            log.warning(
                "the groups of %s are in activation order (desc_act): such layers are expanded, which takes "
                "more memory",
                name,
            )
            self.warned = True
        return index


def _unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
