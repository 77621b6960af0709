"""Weights of a GGUF file under the names and in the layout of a safetensors checkpoint."""

from __future__ import annotations

import logging
import re

import torch
from torch import Tensor

from outrider.checkpoints.gguf import blocks
from outrider.checkpoints.gguf.delta_rule import GATED_NORM, in_order, outputs
from outrider.checkpoints.gguf.file import GgufFile, TensorEntry
from outrider.checkpoints.spec import Spec
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
TILED = ("qwen35", "qwen35moe")  # with value heads in another order
log = logging.getLogger("outrider")


class GgufWeights:
    """The `Source` of a GGUF file."""

    def __init__(self, file: GgufFile, spec: Spec) -> None:
        self.file, self.spec = file, spec
        present = {entry.ggml_type for entry in file.tensors.values()}
        if expanded := present - blocks.FORMATS.keys() - blocks.DENSE.keys():
            names = ", ".join(sorted(expanded))
            log.warning("%s: tensors of type %s are expanded, which takes more memory", file.path, names)

    def __contains__(self, name: str) -> bool:
        """Whether the file has the tensor; `get` and `linear` check its shape."""
        return self._stored(name)[0] in self.file.tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """The dense tensor.  Raises ModelError if it is missing or has another shape."""
        weight = self._unpack(name, shape)
        dense = weight.dense() if isinstance(weight, QuantizedWeight) else weight
        is_norm = name.endswith("norm.weight") and not name.endswith(GATED_NORM)
        # the files hold what is multiplied with, transformers adds 1
        return dense - 1.0 if is_norm and self.spec.variant.unit_norms else dense

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        return self._unpack(f"{name}.weight", (outputs, inputs))

    def _unpack(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """The weight of this shape.  Raises ModelError if it is missing or has another shape."""
        entry = self._entry(name)
        if _without_ones(entry.shape) != _without_ones(shape):
            raise ModelError(f"{name} has shape {entry.shape}, the metadata asks for {shape}.")
        weight = blocks.unpack(entry.ggml_type, entry.rows, entry.block_bytes)
        if isinstance(weight, QuantizedWeight) and weight.values.shape != shape:
            weight = weight.dense()
        if isinstance(weight, Tensor):
            weight = weight.view(shape)
        if self.file.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            return outputs(weight, self._half_split_order(shape[0]))
        if self.file.architecture in TILED and self.spec.recurrent is not None:
            return in_order(name, weight, self.spec.recurrent)
        return weight

    def _stored(self, name: str) -> tuple[str, int | None]:
        """The tensor that holds this one, and the number of an expert, whose layer has one tensor for all."""
        expert = EXPERT.fullmatch(name)
        return (name, None) if expert is None else (f"{expert[1]}.{expert[3]}", int(expert[2]))

    def _entry(self, name: str) -> TensorEntry:
        """A tensor, or the part of one expert.  Raises ModelError if it is missing."""
        stored, number = self._stored(name)
        if (entry := self.file.tensors.get(stored)) is None:
            raise ModelError(
                f"{self.file.path} has no tensor {name!r} (GGUF has its own names, see "
                "checkpoints/gguf/names.py)."
            )
        if number is None:
            return entry
        if len(entry.shape) not in (2, 3) or number >= entry.shape[0]:
            raise ModelError(f"{stored} has shape {entry.shape}, and no part of expert {number}.")
        rows = len(entry.rows) // entry.shape[0]  # of a bias: one
        own = entry.rows[number * rows : (number + 1) * rows]
        return entry._replace(shape=entry.shape[1:], rows=own)

    def _half_split_order(self, size: int) -> Tensor:
        """Row order of Q and K for RoPE on dimensions (i, i + head_dim / 2).

        Llama files are stored for llama.cpp's RoPE, which rotates dimensions (2 i, 2 i + 1).
        """
        return torch.arange(size).view(-1, self.spec.head_dim // 2, 2).transpose(1, 2).flatten()


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """The dimensions that files name: those of size 1 are left out, of convolutions and of a gate."""
    return [size for size in shape if size > 1]
