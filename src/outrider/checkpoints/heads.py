"""The files of a trained head: a folder or hub id with tensors and, as a rule, a config that must not be trusted where shapes can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints.fields import HEAD
from outrider.checkpoints.hub import NOT_DOWNLOADED, download
from outrider.checkpoints.packed import PackedWeights
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.validate import check, read_json
from outrider.checkpoints.weights import Weights
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

BUILTIN = Path(__file__).parent.parent / "builtin" / "heads"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # in others a scale is needed, too
# Those whose name says what they are come first: a model may lie beside them.
STEMS = (
    "medusa_lm_head.safetensors", "medusa_lm_head.pt", "hydra_lm_head.safetensors", "hydra_lm_head.pt", "model.safetensors",
    "pytorch_model.bin", "consolidated.safetensors", "model.pt", "pytorch_model.pt",
)  # fmt: skip


class Tensors(Protocol):
    """Named tensors, read one at a time."""

    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def raw(self, name: str) -> Tensor: ...
    def weight(self, name: str) -> Tensor | QuantizedWeight:
        """The same; in few bits if it is stored so."""


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def raw(self, name: str) -> Tensor:
        return self.tensors[name]

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        return self.tensors[name]


class Packed:
    """The tensors of a compressed-tensors file; a layer in few bits has one tensor, its weight."""

    def __init__(self, tensors: Weights, scheme: Scheme) -> None:
        self.tensors, self.layers = tensors, PackedWeights(tensors, scheme)
        words = f".{self.layers.layout.words}"
        few = [name.removesuffix(words) for name in tensors if name.endswith(words)]
        self.few = {f"{layer}.weight": layer for layer in few}
        self.names = [*self.few, *(name for name in tensors if not self.layers.belongs(name))]

    def __contains__(self, name: str) -> bool:
        return name in self.few or (name in self.tensors and not self.layers.belongs(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layers.shape(self.few[name]) if name in self.few else self.tensors.shape(name)

    def raw(self, name: str) -> Tensor:
        weight = self.weight(name)
        return weight.dense() if isinstance(weight, QuantizedWeight) else weight

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        if name not in self.few:
            return self.tensors.raw(name)
        return self.layers.linear(self.few[name], *self.layers.shape(self.few[name]))


def opened(folder: Path, config: Mapping[str, Any]) -> Weights | Packed:
    """The tensors of a folder.  A form of quantisation that cannot be read is left to the method's `check`, which refuses it by name if
    the head's own tensors have it."""
    weights = Weights(folder, stems(folder))
    given = config.get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") != "compressed-tensors":
        return weights
    try:
        return Packed(weights, Scheme.read(given))
    except ModelError:
        return weights


@dataclass(frozen=True)
class Head:
    """config: what config.json says, {} without one.  stored: our name of a tensor -> the file's."""

    name: str
    config: Mapping[str, Any]
    tensors: Tensors
    stored: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def open(name: str, revision: str | None = None) -> Head:
        """Raises ModelError where there is no such folder, or nothing in it that holds tensors."""
        folder = folder_of(name, revision)
        path = folder / "config.json"
        config = read_json(path, HEAD) if path.is_file() else {}
        return Head.of(name, config, opened(folder, config))

    @staticmethod
    def of(name: str, config: Mapping[str, Any], tensors: Tensors | Mapping[str, Tensor]) -> Head:
        check(config, HEAD, f"config of {name!r}")
        kept = Held(tensors) if isinstance(tensors, Mapping) else tensors
        return Head(name, config, kept, {one: one for one in kept})

    def renamed(self, change: Callable[[str], str | None]) -> Head:
        """Under other names; None drops a tensor.  Of several with one name the first stays: aliases of a shared module."""
        stored: dict[str, str] = {}
        for name, own in self.stored.items():
            if (new := change(name)) is not None:
                stored.setdefault(new, own)
        return replace(self, stored=stored)

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError naming what is missing."""
        return self.tensors.shape(self._stored(name))

    def raw(self, name: str) -> Tensor:
        return self.tensors.raw(self._stored(name))

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape.  Raises ModelError naming what is missing, no plain number, or of another shape, which is what a head
        for another target looks like."""
        self._fits(name, shape)
        return self._checked(name, self.raw(name))

    def weight(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight of a linear or an embedding; in few bits if the file has it so.  Raises as `get` does."""
        full = f"{name}.weight"
        self._fits(full, (outputs, inputs))
        found = self.tensors.weight(self._stored(full))
        return found if isinstance(found, QuantizedWeight) else self._checked(full, found)

    def _fits(self, name: str, shape: tuple[int, ...]) -> None:
        if (found := self.shape(name)) != shape:
            raise ModelError(
                f"{self.name!r} does not fit the target: its {self._stored(name)} is {found}, and {shape} is needed."
            )

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in FLOATS:
            kinds = "float16, bfloat16, float32 and float64"
            raise ModelError(
                f"{self._stored(name)} of {self.name!r} is {tensor.dtype}; only {kinds} are supported."
            )
        return tensor.detach()

    def _stored(self, name: str) -> str:
        if name not in self.stored:
            raise ModelError(
                f"{self.name!r} has no tensor {name!r}; it has {len(self.stored)}: {', '.join(sorted(self.stored)[:6])} …"
            )
        return self.stored[name]


def builtin() -> dict[str, Path]:
    """The small heads for the built-in target: "builtin-<method>" -> its folder."""
    return {f"builtin-{folder.name}": folder for folder in sorted(BUILTIN.glob("*/"))}


def folder_of(name: str, revision: str | None = None) -> Path:
    """Raises ModelError where there is none, or the hub does not give it."""
    folder = builtin().get(name) or Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        known = ", ".join(["a folder", "a hub id (owner/name)", *builtin()])
        raise ModelError(f"there is no folder {name!r} with a draft head: give {known}.")
    return download(name, revision, ["*.pt"])


def stems(folder: Path) -> list[str]:
    """What `Weights` should look for: the usual names, then whatever else holds tensors."""
    others = sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix in (".safetensors", ".pt", ".pth", ".bin") and not left_over(p.name)
    )
    return [*STEMS, *others]


def left_over(name: str) -> bool:
    """Whether a file is one that trainers leave beside what they have trained."""
    return any(fnmatch(name, pattern) for pattern in NOT_DOWNLOADED)
