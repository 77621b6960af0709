"""Files of trained heads: a folder or hub id with tensors and, as a rule, a config.

Where shapes and config disagree, shapes count.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints.fields import HEAD
from outrider.checkpoints.hub import HEADS, NOT_DOWNLOADED, download, on_hub
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.quantized_layers import QuantizedLayers
from outrider.checkpoints.scaled import quantized
from outrider.checkpoints.validate import check, read_json
from outrider.checkpoints.weights import GivenWeights, Weights
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # other types need a scale
# Names of heads come first: the folder may also hold a model.
FILE_NAMES = (
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt",
    "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "model.pt", "pytorch_model.pt",
)  # fmt: skip
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


class Tensors(Protocol):
    """Named tensors, read one at a time."""

    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def raw(self, name: str) -> Tensor: ...
    def weight(self, name: str) -> Tensor | QuantizedWeight:
        """The tensor as `raw`, or the quantized weight if it is stored so."""


def open_tensors(folder: Path, config: Mapping[str, Any]) -> Weights | QuantizedLayers:
    """The tensors of a folder.

    A config may be a copy of the target's: then nothing is packed.  Unsupported quantization is not an error
    here: the method's `check` refuses it by name.
    """
    weights = Weights(folder, file_names(folder))
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return weights
    try:
        packed = quantized(weights, Scheme.read(quantization))
    except ModelError:
        return weights
    return packed if packed.layer_of else weights


@dataclass(frozen=True)
class Head:
    """A head's file.  config: of config.json, {} without one.  stored: our name of a tensor -> the file's."""

    name: str
    config: Mapping[str, Any]
    tensors: Tensors
    stored: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def open(name: str, revision: str | None = None) -> Head:
        """Raise ModelError without such a folder, or without a file of tensors in it."""
        folder = folder_of(name, revision)
        path = folder / "config.json"
        config = read_json(path, HEAD) if path.is_file() else {}
        return Head.of(name, config, open_tensors(folder, config))

    @staticmethod
    def of(name: str, config: Mapping[str, Any], tensors: Tensors | Mapping[str, Tensor]) -> Head:
        check(config, HEAD, f"config of {name!r}")
        source = GivenWeights(tensors) if isinstance(tensors, Mapping) else tensors
        return Head(name, config, source, {stored: stored for stored in source})

    def misfit(self, why: str) -> ModelError:
        return ModelError(f"{self.name!r} does not fit the target: {why}.")

    def renamed(self, rename: Callable[[str], str | None]) -> Head:
        """The head under other names.

        None drops a tensor.  Of several tensors with one name the first stays: aliases are shared.
        """
        stored: dict[str, str] = {}
        for name, own in self.stored.items():
            if (new := rename(name)) is not None:
                stored.setdefault(new, own)
        return replace(self, stored=stored)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise ModelError naming a missing tensor."""
        return self.tensors.shape(self._stored(name))

    def raw(self, name: str) -> Tensor:
        return self.tensors.raw(self._stored(name))

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape.

        Raises ModelError for a tensor that is missing, not floating point, or of another shape, which is one
        for another target.
        """
        self._check_shape(name, shape)
        return self._as_float(name, self.raw(name))

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight of a linear or an embedding, quantized if the file has it so.  Raises as `get` does."""
        full = f"{name}.weight"
        self._check_shape(full, (outputs, inputs))
        weight = self.tensors.weight(self._stored(full))
        return weight if isinstance(weight, QuantizedWeight) else self._as_float(full, weight)

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self.shape(name)) != shape:
            raise ModelError(
                f"{self.name!r} does not fit the target: its {self._stored(name)} is {found}, "
                f"and {shape} is needed."
            )

    def _as_float(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{self._stored(name)} of {self.name!r} is {tensor.dtype}; only float16, bfloat16, float32 "
                "and float64 are supported."
            )
        return tensor.detach()

    def _stored(self, name: str) -> str:
        if name not in self.stored:
            some = ", ".join(sorted(self.stored)[:6])
            raise ModelError(f"{self.name!r} has no tensor {name!r}; it has {len(self.stored)}: {some} …")
        return self.stored[name]


def builtin() -> dict[str, Path]:
    """The small heads for the built-in target: "builtin-<method>" -> its folder."""
    return {f"builtin-{folder.name}": folder for folder in sorted(HEADS.glob("*/"))}


def folder_of(name: str, revision: str | None = None) -> Path:
    """The folder of a head, downloaded if `name` is a hub id.  Raises ModelError if there is none."""
    folder = builtin().get(name) or Path(expanduser(name))
    if isdir(folder):
        return folder
    if not on_hub(name):
        known = ", ".join(["a folder", "a hub id (owner/name)", *builtin()])
        raise ModelError(f"there is no folder {name!r} with a draft head: give {known}.")
    return download(name, revision, ["*.pt"])


def file_names(folder: Path) -> list[str]:
    """Names of files that may hold tensors: the usual ones, then all others but those of trainers."""
    others = [path.name for path in folder.iterdir() if path.suffix in SUFFIXES]
    left = {name for pattern in NOT_DOWNLOADED for name in fnmatch.filter(others, pattern)}
    return [*FILE_NAMES, *sorted({*others} - left)]
