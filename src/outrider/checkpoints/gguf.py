"""GGUF files, as llama.cpp writes them: header, config and weights in one memory-mapped file (or in its shards).

Read here and not by the `gguf` package: its reader takes seconds over a vocabulary of 128,000 tokens.
"""

from __future__ import annotations

import logging
import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from outrider.checkpoints import ggml
from outrider.checkpoints.fields import CONFIG, GGUF
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.validate import check
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
SCALARS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
STRING, ARRAY = 8, 9
DEEPEST, LONGEST = 4, 1 << 24  # of arrays in the metadata
OURS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OURS_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE = "rope_freqs.weight"
log = logging.getLogger("outrider")


class Entry(NamedTuple):
    """A tensor: its type's name and bytes a block, [outputs, inputs] or [size], and its bytes, uint8 [rows, bytes a row]."""

    kind: str
    block: int
    shape: tuple[int, ...]
    rows: np.ndarray[Any, Any]


class File:
    """`metadata` by key, and `tensors` by the names that they have in a safetensors checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Entry] = {}
        self.metadata = self._read(path)
        for shard in self._shards():
            self._read(shard)

    def _shards(self) -> list[Path]:
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
        try:
            with path.open("rb") as file:
                cursor = _Cursor(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            magic, version, tensors, keys = cursor.take("<4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError("it is no little-endian GGUF file of version 2 or 3")
            metadata = {cursor.string(): cursor.value(cursor.take("<I")[0]) for _ in range(keys)}
            check(metadata, GGUF, path)
            heads = [cursor.tensor() for _ in range(tensors)]
            unit = metadata.get("general.alignment", 32)
        except FileNotFoundError:
            raise ModelError(f"there is no file {path}.") from None
        except (OSError, ValueError, struct.error, OverflowError) as error:
            raise ModelError(f"{path} is corrupt or truncated: {error}.") from error
        start = cursor.at + -cursor.at % unit
        for name, shape, kind, offset in heads:
            self.tensors[_ours(name, path)] = _entry(path, cursor.data, name, shape, kind, start + offset)
        return metadata

    def number(self, key: str, default: float | None = None) -> float:
        """What the metadata say of the architecture.  Raises ModelError where that is nothing, or no number."""
        found = self.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise ModelError(f"{self.path} has no {self.architecture}.{key} in its metadata.")
        if type(found) not in (int, float) or not math.isfinite(found):
            raise ModelError(f"{self.path} is corrupt: {key} is {found!r}.")
        return float(found) if isinstance(found, float) else int(found)

    def whole(self, key: str, default: int | None = None) -> int:
        """The same for a size; a list has one for every layer."""
        each = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(each, list) and any(one != each[0] for one in each):
            raise ModelError(f"{self.path}: {key} differs from layer to layer, which is not supported.")
        found = each[0] if isinstance(each, list) and each else self.number(key, default)
        if type(found) is not int or not 0 <= found < 1 << 31:
            raise ModelError(f"{self.path} is corrupt: {key} is {found!r}.")
        return found

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "?"))


class _Cursor:
    """Reads a header from front to back."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self.data, self.at)
        begin = self.at + 8
        if size > len(self.data) - begin:
            raise ValueError("a text ends beyond the end of the file")
        self.at = begin + size
        return self.data[begin : self.at].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, count = self.take("<IQ")
            if depth == DEEPEST or count > LONGEST:
                raise ValueError(f"an array has {count:,} entries {depth} arrays deep")
            if kind in (STRING, ARRAY):
                return [self.value(kind, depth + 1) for _ in range(count)]
            return self._numbers(kind, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        found = np.frombuffer(self.data, "<" + SCALARS[kind], count, self.at) if count else np.empty(0)
        self.at += found.nbytes
        values: list[Any] = found.tolist()
        return values

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (outputs first), type and offset."""
        name = self.string()
        (dimensions,) = self.take("<I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"{name!r} has {dimensions} dimensions")
        shape = self.take(f"<{dimensions}Q")
        if 0 in shape:
            raise ValueError(f"{name!r} has no elements")
        return (name, shape[::-1], *self.take("<IQ"))


def _ours(name: str, path: Path) -> str:
    """The name in a safetensors checkpoint.  Raises ModelError for a tensor that the decoder would leave out."""
    stem, _, suffix = name.rpartition(".")
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if name == ROPE:
        return name
    if suffix in ("weight", "bias") and stem in OURS:
        return f"{OURS[stem]}.{suffix}"
    if suffix in ("weight", "bias") and found and found[2] in OURS_BLOCK:
        return f"model.layers.{found[1]}.{OURS_BLOCK[found[2]]}.{suffix}"
    raise ModelError(
        f"{path} has a tensor {name!r}, which the lean decoder does not compute: the model is of another kind."
    )


def _entry(path: Path, data: mmap.mmap, name: str, shape: tuple[int, ...], kind: int, start: int) -> Entry:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: {name!r} has the type {kind}, which this version of the gguf package does not know."
        ) from None
    rows = int(np.prod(shape[:-1], dtype=object))
    if shape[-1] % weights:
        raise ModelError(
            f"{path} is corrupt: rows of {name!r} hold {shape[-1]} weights, no multiple of {weights}."
        )
    width = shape[-1] // weights * size
    if start + rows * width > len(data):
        raise ModelError(
            f"{path} is truncated: {name!r} should end at byte {start + rows * width:,}, the file at {len(data):,}."
        )
    found = np.frombuffer(data, np.uint8, rows * width, start).reshape(rows, width)
    return Entry(GGMLQuantizationType(kind).name, size, shape, found)


class GgufWeights:
    """The tensors of a file by the names and in the layout of a safetensors checkpoint."""

    def __init__(self, file: File, spec: Spec) -> None:
        self.file, self.spec = file, spec
        if other := {e.kind for e in file.tensors.values()} - ggml.FORMATS.keys() - ggml.DENSE.keys():
            log.warning(
                "%s: tensors of type %s are expanded, which takes more memory",
                file.path,
                ", ".join(sorted(other)),
            )

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """Raises ModelError naming what is missing or has another shape."""
        found = self._unpacked(name, shape)
        return found.dense() if isinstance(found, QuantizedWeight) else found

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        return self._unpacked(f"{name}.weight", (outputs, inputs))

    def _unpacked(self, name: str, shape: tuple[int, ...]) -> Tensor | QuantizedWeight:
        entry = self.file.tensors.get(name)
        if entry is None:
            raise ModelError(
                f"{self.file.path} has no tensor {name!r} (GGUF names differ, see models/gguf.py)."
            )
        if entry.shape != shape:
            raise ModelError(f"{name} has shape {entry.shape}, the metadata asks for {shape}.")
        rows = entry.rows
        if self.file.architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            rows = rows if rows.shape[0] > 1 else rows.reshape(shape[0], -1)  # a bias is one row
            rows = rows[self._order(shape[0])]
        found = ggml.unpack(entry.kind, rows, entry.block)
        return found if isinstance(found, QuantizedWeight) else found.view(shape)

    def _order(self, outputs: int) -> np.ndarray[Any, Any]:
        """llama.cpp turns dimensions 2i and 2i + 1 of a head together, we i and i + half: its files have the rows interleaved."""
        return np.arange(outputs).reshape(-1, self.spec.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def only_file(folder: Path) -> Path | None:
    """The one model in the GGUF files of a folder (the first shard of it), None without any."""
    found = [
        path
        for path in sorted(folder.glob("*.gguf"))
        if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", path.name)
    ]
    if len(found) > 1:
        raise ModelError(f"{folder} holds {len(found)} GGUF files: give one of them, e.g. {found[0]}.")
    return found[0] if found else None


def config_of(file: File) -> Any:
    """The transformers config of what a file holds."""
    import transformers

    if file.architecture not in FAMILIES:
        raise ModelError(
            f"{file.path} holds architecture {file.architecture!r}, which is not supported.  Supported: {', '.join(FAMILIES)}."
        )
    if "model.embed_tokens.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight': it is no whole language model.")
    family = FAMILIES[file.architecture]
    heads, hidden, context = (
        file.whole(key) for key in ("attention.head_count", "embedding_length", "context_length")
    )
    if not heads:
        raise ModelError(f"{file.path} is corrupt: attention.head_count is 0.")
    width = file.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := file.whole(key, width)) != width:
            raise ModelError(
                f"{file.path}: {key} {other} differs from the {width} dimensions of a head, which is not supported."
            )
    layers = file.whole("block_count")
    if f"model.layers.{layers}.input_layernorm.weight" in file.tensors:
        raise ModelError(f"{file.path} is corrupt: it has more layers than block_count {layers}.")
    settings = dict(
        architectures=[f"{family}ForCausalLM"],
        vocab_size=file.tensors["model.embed_tokens.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=file.whole("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=file.whole("attention.head_count_kv", heads),
        head_dim=width,
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        tie_word_embeddings="lm_head.weight" not in file.tensors,
        rope_parameters=_rope(file, context, width),
        dtype="float32" if all(entry.kind == "F32" for entry in file.tensors.values()) else "bfloat16",
        **{
            f"{name}_token_id": file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            for name in ("bos", "eos")
        },
    )
    check(settings, CONFIG, file.path)
    try:
        config = getattr(transformers, f"{family}Config")(**settings)
    except Exception as error:  # transformers checks, and raises several kinds
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ModelError(f"{file.path} is corrupt: its metadata make no {family} model: {reason}") from error
    if window := file.whole("attention.sliding_window", 0):
        config.sliding_window, config.layer_types = window, ["sliding_attention"] * layers
    return config


def _rope(file: File, context: int, width: int) -> dict[str, Any]:
    """rope_parameters.  Factors of single frequencies (Llama 3 has them, as a tensor) are what transformers calls longrope."""
    kind = str(file.metadata.get(f"{file.architecture}.rope.scaling.type", "linear"))
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and ROPE in file.tensors):
        raise ModelError(
            f"{file.path}: rope.scaling.type {kind!r} is not supported{' with ' + ROPE if kind == 'yarn' else ''}."
        )
    given = file.number("rope.scaling.factor", file.number("rope.scale_linear", 0.0))
    factor = 1.0 if kind == "none" else given or 1.0
    rope = {"rope_theta": file.number("rope.freq_base", 10000.0)}
    if ROPE in file.tensors:
        entry = file.tensors[ROPE]
        single = ggml.unpack(entry.kind, entry.rows, entry.block)
        if entry.shape != (width // 2,) or isinstance(single, QuantizedWeight):
            raise ModelError(
                f"{file.path} is corrupt: {ROPE} is {entry.kind} {entry.shape}, not F32 {(width // 2,)}."
            )
        each = (single.flatten().float() * factor).tolist()
        return rope | {
            "rope_type": "longrope", "short_factor": each, "long_factor": each, "factor": 1.0, "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }  # fmt: skip
    if kind != "yarn":
        return rope | (
            {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        )
    rope["original_max_position_embeddings"] = file.whole("rope.scaling.original_context_length", context)
    for key, name in (
        ("attn_factor", "attention_factor"),
        ("beta_fast", "beta_fast"),
        ("beta_slow", "beta_slow"),
    ):
        if f"{file.architecture}.rope.scaling.yarn_{key}" in file.metadata:
            rope[name] = file.number(f"rope.scaling.yarn_{key}")
    return rope | {"rope_type": "yarn", "factor": factor}
