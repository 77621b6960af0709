"""Weights of a checkpoint folder: safetensors or `.bin` files, whole or in shards."""

from __future__ import annotations

import re
import reprlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints.names import own_names
from outrider.checkpoints.validate import read_json
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError, first_line, writing

SAFE = ".safetensors"  # all other weight files are pickles
MAX_NUMBER_DIGITS = re.compile(r"(^|\.)\d{5,}(\.|$)")  # a larger number in a name belongs to no layer or head


class Source(Protocol):
    """The tensors of a checkpoint, read one at a time: memory never holds a second copy of the model."""

    def __contains__(self, name: str) -> bool: ...
    def get(self, name: str, *shape: int) -> Tensor:
        """The dense tensor.  Raises ModelError if it is missing or has another shape."""

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of a linear layer."""


class Weights:
    """The tensors of a checkpoint folder; `where` maps their names to files.

    stored: names in the files, of the tensors that have another one there.
    """

    def __init__(
        self, folder: Path, stems: Sequence[str] = ("model.safetensors", "pytorch_model.bin")
    ) -> None:
        self.folder = folder
        self.stored: Mapping[str, str] = {}
        self.loaded: dict[Path, dict[str, Tensor]] = {}  # contents of the .bin files that were opened
        self.where: dict[str, Path] = dict(self._list(folder, stems))
        for name in filter(MAX_NUMBER_DIGITS.search, self.where):
            raise ModelError(
                f"{self.where[name]} has a tensor {name[:80]!r}: no module has such a high number."
            )
        if not self.where:
            raise ModelError(
                f"{folder} has no weights: expected {' or '.join(stems)}, or their shards with an index."
            )

    def __getstate__(self) -> dict[str, Any]:
        """State without the loaded tensors: another process opens the files itself."""
        return {**vars(self), "loaded": {}}

    def _list(self, folder: Path, stems: Sequence[str]) -> Iterator[tuple[str, Path]]:
        """(name, file) of every tensor, from the first stem that exists."""
        for stem in stems:
            index, whole = folder / f"{stem}.index.json", folder / stem
            if index.is_file():
                yield from _read_index(folder, index)
                return
            if whole.is_file():
                yield from ((name, whole) for name in self._names(whole))
                return

    def _names(self, path: Path) -> list[str]:
        if path.suffix != SAFE:
            return list(self._load_bin(path))
        with _open_safetensors(path) as file:
            return list(file.keys())

    def _load_bin(self, path: Path) -> dict[str, Tensor]:
        """The tensors of a .bin file, memory-mapped where its format allows it."""
        if path not in self.loaded:
            try:
                loaded = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
                )
            except Exception as error:
                raise ModelError(
                    f"{path} is corrupt or not a weights-only file: {first_line(error)}"
                ) from error
            _check_bin(path, loaded)
            self.loaded[path] = loaded
        return self.loaded[path]

    def rename(self, stored: Mapping[str, str]) -> None:
        """Keep the tensors of this table alone, name -> name in the files."""
        self.where = {name: self.where[in_file] for name, in_file in stored.items()}
        self.stored = stored

    def name_in_file(self, name: str) -> str:
        return self.stored.get(name, name)

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; a safetensors file is not read for it."""
        path, key = self.where[name], self.name_in_file(name)
        if path.suffix != SAFE:
            return tuple(self._load_bin(path)[key].shape)
        with _open_safetensors(path) as file, _naming(path, key):
            return tuple(file.get_slice(key).get_shape())

    def get(self, name: str, *shape: int) -> Tensor:
        tensor = self.raw(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, the config asks for {shape}.")
        if not tensor.is_floating_point():
            raise ModelError(f"{name} is {tensor.dtype}; only floating-point weights are supported.")
        if tensor.dtype.itemsize < 2:
            raise ModelError(f"{name} is {tensor.dtype}, without scales that the config names.")
        return tensor.detach()

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor:
        return self.get(f"{name}.weight", outputs, inputs)

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        return self.raw(name)

    def entry(self, name: str, index: int) -> Tensor:
        """Entry `index` of the first dimension of a tensor; of a safetensors file no other is read."""
        path, key = self.where[name], self.name_in_file(name)
        if path.suffix != SAFE:
            return self.raw(name)[index]
        with _open_safetensors(path) as file, _naming(path, key):
            part: Tensor = file.get_slice(key)[index]
            return part

    def raw(self, name: str) -> Tensor:
        """The tensor as stored.  Raises ModelError if it is missing."""
        if name not in self.where:
            raise ModelError(
                f"{self.folder} has no tensor {name!r}, which its config.json asks for; it has "
                f"{len(self.where)}, e.g. {next(iter(self.where))!r}."
            )
        path, key = self.where[name], self.name_in_file(name)
        with _naming(path, key):
            if path.suffix != SAFE:
                return self._load_bin(path)[key]
            with _open_safetensors(path) as file:
                tensor: Tensor = file.get_tensor(key)
                return tensor


class GivenWeights(Weights):
    """Tensors that are already loaded."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.folder, self.tensors, self.stored = Path("memory"), tensors, {}
        self.where = dict.fromkeys(tensors, self.folder)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def raw(self, name: str) -> Tensor:
        return self.tensors[name] if name in self else super().raw(name)


def open_weights(folder: Path) -> Weights:
    """The weights of a language model under the usual names (names.py)."""
    weights = Weights(folder)
    if stored := own_names(weights.where):
        weights.rename(stored)
    return weights


def _read_index(folder: Path, index: Path) -> Iterator[tuple[str, Path]]:
    """(name, shard) of every tensor.  Raises ModelError for a shard that is not a file inside the folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise ModelError(f"{index} is corrupt: it has no weight_map.")
    for name, shard in shards.items():
        inside = isinstance(shard, str) and "\0" not in shard and not Path(shard).is_absolute()
        if not inside or ".." in Path(shard).parts:
            raise ModelError(
                f"{index}: weight_map names {reprlib.repr(shard)} for {name!r}, which is not a file in this "
                "folder."
            )
    for shard in sorted(set(shards.values())):
        if len(shard) > 255 or not (folder / shard).is_file():
            raise ModelError(f"{index}: weight_map names {shard[:80]!r}, which is missing in {folder}.")
    return ((name, folder / shard) for name, shard in shards.items())


def _check_bin(path: Path, loaded: object) -> None:
    """Raise ModelError unless `loaded` is a dict of tensors that do not exceed their storage."""
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} holds no named tensors but a {type(loaded).__name__}.")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ModelError(
                f"{path} holds more than named tensors: {name!r} in it is a {type(value).__name__}."
            )
        if value.nbytes > value.untyped_storage().nbytes():
            raise ModelError(f"{path} is corrupt: {name!r} has more elements than the file holds of it.")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file.  Raises OSError that names it, for a full disk as well."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with writing(path, SafetensorError):
        save_file(dict(tensors), path, {"format": "pt"})


@contextmanager
def _naming(path: Path, name: str) -> Iterator[None]:
    """Turn any error of safetensors, torch or numpy while reading a tensor into a ModelError naming it."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path} should hold {name!r} but does not: {first_line(error)}") from error


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is corrupt or truncated: {error}") from error
