"""Reader of GGUF files, memory-mapped: header, metadata and the location of every tensor in all shards.

    magic "GGUF" | version | number of tensors | number of keys | key, type, value … | tensor headers … |
    padding | data

The `gguf` package has a reader too, but it takes seconds for a vocabulary of 128,000 tokens.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from outrider.checkpoints.fields import GGUF
from outrider.checkpoints.gguf.names import checkpoint_name, family_of
from outrider.checkpoints.validate import check
from outrider.errors import ModelError

SCALAR_TYPES = dict(enumerate(["u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"]))
SCALAR_TYPES |= {10: "u8", 11: "i8", 12: "f8"}
STRING, ARRAY = 8, 9
MAX_ARRAY_DEPTH, MAX_ARRAY_LENGTH = 4, 1 << 24
DEFAULT_ALIGNMENT = 32
ARCHITECTURE = "general.architecture"


class TensorEntry(NamedTuple):
    """A tensor in the file: ggml type, bytes of a block, shape (outputs first) and raw bytes."""

    ggml_type: str
    block_bytes: int
    shape: tuple[int, ...]
    rows: np.ndarray[Any, Any]  # uint8 [rows, bytes per row]


class TensorHeader(NamedTuple):
    """A tensor as the header describes it; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """`metadata` by key, and `tensors` by the names that they have in a safetensors checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorEntry] = {}
        self.metadata: dict[str, Any] = {}
        self.metadata = self._read(path)
        for shard in self._other_shards():
            self._read(shard)

    def _other_shards(self) -> list[Path]:
        """Paths of the shards after the first.  Raises ModelError for a shard that is not the first."""
        count, name = self.metadata.get("split.count", 1), self.path.name
        if count < 2:
            return []
        stem = re.sub(r"-00001-of-\d{5}\.gguf$", "", name)
        if stem == name:
            raise ModelError(
                f"{self.path} is one of {count} shards: give the first, …-00001-of-{count:05}.gguf."
            )
        return [self.path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]

    def _read(self, path: Path) -> dict[str, Any]:
        """Add the tensors of one shard; returns its metadata."""
        try:
            with path.open("rb") as file:
                reader = HeaderReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            magic, version, num_tensors, num_keys = reader.unpack("<4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError("it is not a little-endian GGUF file of version 2 or 3")
            metadata = {reader.string(): reader.value(reader.unpack("<I")[0]) for _ in range(num_keys)}
            check(metadata, GGUF, path)
            headers = [reader.tensor() for _ in range(num_tensors)]
        except FileNotFoundError:
            raise ModelError(f"there is no file {path}.") from None
        except (OSError, ValueError, struct.error, OverflowError) as error:
            raise ModelError(f"{path} is corrupt or truncated: {error}.") from error
        if ARCHITECTURE in metadata:  # before its tensors, whose names may be unknown for that reason
            family_of(str(metadata[ARCHITECTURE]), path)
        data_start = reader.position + -reader.position % metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        first = self.metadata or metadata
        architecture, unread = str(first.get(ARCHITECTURE)), _prediction_layers(first)
        for header in headers:
            block = re.match(r"blk\.(\d{1,9})\.", header.name)
            if block and int(block[1]) in unread:
                continue
            name = checkpoint_name(header.name, path, architecture)
            self.tensors[name] = _tensor_entry(path, reader.data, header, data_start)
        return metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata.get(ARCHITECTURE, "?"))

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the architecture's metadata.

        Raises ModelError if it is missing or not a finite number.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path} has no {self.architecture}.{key} in its metadata.")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelError(f"{self.path} is corrupt: {key} is {value!r}.")
        return float(value) if isinstance(value, float) else int(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """A size of the architecture's metadata; a list has one value per layer, which must all be equal."""
        per_layer = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(per_layer, list) and any(value != per_layer[0] for value in per_layer):
            raise ModelError(f"{self.path}: {key} differs from layer to layer, which is not supported.")
        value = per_layer[0] if isinstance(per_layer, list) and per_layer else self.number(key, default)
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise ModelError(f"{self.path} is corrupt: {key} is {value!r}.")
        return value


class HeaderReader:
    """Sequential reader of the values in a header; `position` is the next byte."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def unpack(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self.data, self.position)
        self.position += struct.calcsize(format)
        return values

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        start = self.position
        if size > len(self.data) - start:
            raise ValueError("a string ends beyond the end of the file")
        self.position = start + size
        return self.data[start : self.position].decode("utf-8", "replace")

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type != ARRAY:
            return self._numbers(value_type, 1)[0]
        item_type, count = self.unpack("<IQ")
        if depth == MAX_ARRAY_DEPTH or count > MAX_ARRAY_LENGTH:
            raise ValueError(f"an array has {count:,} entries at depth {depth}")
        if item_type in (STRING, ARRAY):
            return [self.value(item_type, depth + 1) for _ in range(count)]
        return self._numbers(item_type, count)

    def _numbers(self, value_type: int, count: int) -> list[Any]:
        if value_type not in SCALAR_TYPES:
            raise ValueError(f"a value has the unknown type {value_type}")
        if not count:
            return []
        array = np.frombuffer(self.data, "<" + SCALAR_TYPES[value_type], count, self.position)
        self.position += array.nbytes
        values: list[Any] = array.tolist()
        return values

    def tensor(self) -> TensorHeader:
        name = self.string()
        (dimensions,) = self.unpack("<I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"{name!r} has {dimensions} dimensions")
        shape = self.unpack(f"<{dimensions}Q")
        if 0 in shape:
            raise ValueError(f"{name!r} has no elements")
        return TensorHeader(name, shape[::-1], *self.unpack("<IQ"))


def _prediction_layers(metadata: Mapping[str, Any]) -> range:
    """Numbers of the blocks that predict further tokens; they are the last ones, and are not read."""
    architecture = metadata.get(ARCHITECTURE)
    keys = ("block_count", "nextn_predict_layers")
    blocks, last = (metadata.get(f"{architecture}.{key}", 0) for key in keys)
    return range(blocks - last, blocks) if type(blocks) is int and type(last) is int else range(0)


def _tensor_entry(path: Path, data: mmap.mmap, header: TensorHeader, data_start: int) -> TensorEntry:
    """The tensor of a header.  Raises ModelError for an unknown type, or beyond the end of the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape = header.name, header.shape
    try:
        ggml_type = GGMLQuantizationType(header.ggml_type)
        block_weights, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: {name!r} has the type {header.ggml_type}, which this version of the gguf package does "
            "not know."
        ) from None
    if shape[-1] % block_weights:
        raise ModelError(
            f"{path} is corrupt: rows of {name!r} hold {shape[-1]} weights, no multiple of {block_weights}."
        )
    num_rows = int(np.prod(shape[:-1], dtype=object))
    row_bytes = shape[-1] // block_weights * block_bytes
    start = data_start + header.offset
    end = start + num_rows * row_bytes
    if end > len(data):
        raise ModelError(
            f"{path} is truncated: {name!r} should end at byte {end:,}, the file at {len(data):,}."
        )
    rows = np.frombuffer(data, np.uint8, num_rows * row_bytes, start).reshape(num_rows, row_bytes)
    return TensorEntry(ggml_type.name, block_bytes, shape, rows)


def find_in_folder(folder: Path) -> Path | None:
    """The GGUF file of a folder (its first shard), or None.  Raises ModelError for several models."""
    found = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name)
    ]
    if len(found) > 1:
        raise ModelError(f"{folder} holds {len(found)} GGUF files: give one of them, e.g. {found[0]}.")
    return found[0] if found else None
