"""Weights of a GGUF file under the names and in the layout of a safetensors checkpoint."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
from torch import Tensor

from outrider.checkpoints.gguf import blocks
from outrider.checkpoints.gguf.file import GgufFile, TensorEntry
from outrider.checkpoints.spec import Spec
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
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
        return self._entry(name) is not None

    def get(self, name: str, *shape: int) -> Tensor:
        """The dense tensor.  Raises ModelError if it is missing or has another shape."""
        weight = self._unpack(name, shape)
        dense = weight.dense() if isinstance(weight, QuantizedWeight) else weight
        # the files hold what is multiplied with, transformers adds 1
        return dense - 1.0 if self.spec.variant.unit_norms and name.endswith("norm.weight") else dense

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        return self._unpack(f"{name}.weight", (outputs, inputs))

    def _unpack(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        """The weight of this shape.  Raises ModelError if it is missing or has another shape."""
        entry = self._entry(name)
        if entry is None:
            raise ModelError(
                f"{self.file.path} has no tensor {name!r} (GGUF has its own names, see "
                "checkpoints/gguf/names.py)."
            )
        if entry.shape != shape:
            raise ModelError(f"{name} has shape {entry.shape}, the metadata asks for {shape}.")
        rows = entry.rows
        if self.file.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            if len(shape) == 1:
                rows = rows.reshape(shape[0], -1)  # a bias is stored as one row
            rows = rows[self._half_split_order(shape[0])]
        weight = blocks.unpack(entry.ggml_type, rows, entry.block_bytes)
        return weight if isinstance(weight, QuantizedWeight) else weight.view(shape)

    def _entry(self, name: str) -> TensorEntry | None:
        """A tensor; of an expert, its part of the tensor that holds all experts of a layer."""
        expert = EXPERT.fullmatch(name)
        if expert is None:
            return self.file.tensors.get(name)
        joined, number = self.file.tensors.get(f"{expert[1]}.{expert[3]}"), int(expert[2])
        if joined is None or len(joined.shape) not in (2, 3) or number >= joined.shape[0]:
            return None
        rows = len(joined.rows) // joined.shape[0]  # of a bias: one
        own = joined.rows[number * rows : (number + 1) * rows]
        return joined._replace(shape=joined.shape[1:], rows=own)

    def _half_split_order(self, outputs: int) -> np.ndarray[Any, Any]:
        """Row order of Q and K for RoPE on dimensions (i, i + head_dim / 2).

        Llama files are stored for llama.cpp's RoPE, which rotates dimensions (2 i, 2 i + 1).
        """
        pairs = np.arange(outputs).reshape(-1, self.spec.head_dim // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)
