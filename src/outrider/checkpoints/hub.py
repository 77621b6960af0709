"""Finding and loading checkpoints: the built-in names, a local folder or GGUF file, or a hub id; safetensors, weights-only
`.bin`, or GGUF."""

from __future__ import annotations

import re
import reprlib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.checkpoints import gguf
from outrider.checkpoints import gguf_tokenizer as gguf_text
from outrider.checkpoints.fields import CONFIG, GENERATION
from outrider.checkpoints.packed import PackedWeights, Scheme
from outrider.checkpoints.spec import LIKE, Facts, Spec
from outrider.checkpoints.validate import read_json
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ModelError, nearest

BUILTIN = {"builtin": "target", "builtin-draft": "draft"}
BODY = "model."  # prefix of the tensors of a body under its head
SAFE = ".safetensors"  # all others are pickles, of which only weights are read
TRAINING = [
    "*optimizer*",
    "*scheduler.pt",
    "rng_state*",
    "training_args*",
]  # what a trainer leaves beside a model
NUMBERED_TOO_HIGH = re.compile(r"(^|\.)\d{5,}(\.|$)")  # loops over layers and heads end where names do
PATTERNS = ["*.json", "*.safetensors", "*.bin", "tokenizer*", "*.jinja", "*.model", "*.txt"]


def locate(name: str, revision: str | None = None) -> Path:
    """The folder or GGUF file of a checkpoint; a hub id is downloaded into the hub's own cache."""
    if name in BUILTIN:
        return Path(__file__).parent.parent / "builtin" / BUILTIN[name]
    folder = Path(name).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return folder
    if folder.is_dir():
        if any(folder.glob("*.safetensors")) or not (found := gguf.only_file(folder)):
            if not (folder / "config.json").is_file():
                raise ModelError(
                    f"{name} has no config.json and no GGUF file: it is not a checkpoint folder."
                )
            return folder
        return found
    if not on_hub(name):
        raise ModelError(
            f"there is no checkpoint folder {name!r}.{nearest(name, BUILTIN)} Give a folder, a .gguf file, a hub id (owner/name), or "
            f"{' or '.join(BUILTIN)}."
        )
    return download(name, revision)


def on_hub(name: str) -> bool:
    """Whether a name may be a hub id (owner/name): it looks like one, and nothing lies there."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not Path(name).exists()


def download(name: str, revision: str | None = None, also: Sequence[str] = ()) -> Path:
    """The folder of a hub id, in the hub's own cache, with these files beside those of a model."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=[*PATTERNS, *also], ignore_patterns=TRAINING
            )
        )
    except Exception as error:  # the hub raises a dozen kinds; the user needs one sentence
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{name!r} is no local folder, and the hub did not give it: {reason}") from error


class Source(Protocol):
    """The tensors of a checkpoint, read one at a time so that no second copy of the model is ever in memory."""

    def __contains__(self, name: str) -> bool: ...
    def get(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name and shape.  Raises ModelError naming what is missing or has another shape."""

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """The weight [outputs, inputs] of the layer of that name."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder or GGUF file with a config, weights and usually a tokenizer."""

    name: str
    folder: Path
    config: Any
    spec: Facts
    scheme: Scheme | None = None  # how the weights in a folder are quantised
    gguf: gguf.File | None = None
    trust_remote_code: bool = False

    @staticmethod
    def open(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
        folder = locate(name, revision)
        if folder.suffix == ".gguf" and folder.is_file():
            file = gguf.File(folder)
            config = gguf.config_of(file)
            return Checkpoint(name, folder.parent, config, _facts(name, config)[0], gguf=file)
        try:
            config = read_config(folder, trust_remote_code)
        except ModelError:
            raise
        except Exception as error:
            if "trust_remote_code=True" in str(error):
                raise ModelError(
                    f"{name!r} brings its own code: pass trust_remote_code=True if you trust it."
                ) from error
            raise ModelError(f"the config.json of {name!r} cannot be read: {first_line(error)}") from error
        return Checkpoint(name, folder, config, *_facts(name, config), None, trust_remote_code)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is: the built-in draft has its target's."""
        return locate("builtin") if self.folder == locate("builtin-draft") else self.folder

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None if it ships none."""
        if self.gguf is not None:
            return gguf_text.tokenizer_of(self.gguf)
        folder = self.tokenizer_folder
        if not any(
            (folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        ):
            return None
        return read_tokenizer(str(folder), self.trust_remote_code)

    @cached_property
    def ending(self) -> frozenset[int]:
        """Ids that end a text: generation_config.json decides, then the config; in a GGUF file the metadata."""
        if self.gguf is not None:
            return gguf_text.ending_of(self.gguf)
        path = self.folder / "generation_config.json"
        given = read_json(path, GENERATION).get("eos_token_id") if path.is_file() else None
        given = self.config.eos_token_id if given is None else given
        return frozenset(() if given is None else given if isinstance(given, list) else [given])

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype that the config names."""
        dtype: torch.dtype | None = getattr(self.config, "dtype", None)
        return dtype

    def tensors(self) -> Source:
        if self.gguf is not None:
            assert isinstance(self.spec, Spec)
            return gguf.GgufWeights(self.gguf, self.spec)
        weights = Weights(self.folder)
        if f"{BODY}embed_tokens.weight" not in weights and "embed_tokens.weight" in weights:
            weights = BodyWeights(self.folder)
        return weights if self.scheme is None else PackedWeights(weights, self.scheme)


def _facts(name: str, config: Any) -> tuple[Facts, Scheme | None]:
    """Raises ModelError, which names the checkpoint, for a model that cannot be run or a quantisation that cannot be read."""
    try:
        return Facts.of(config), Scheme.of(config)
    except ModelError as error:
        raise ModelError(f"{name!r}: {error}") from error


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """A transformers config; code of the checkpoint's own is not needed where another family has the same decoder."""
    from transformers import AutoConfig

    path = folder / "config.json"
    given = read_json(path, CONFIG) if path.is_file() else {}
    if (like := LIKE.get(str(given.get("model_type")))) is None:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind, keys = like
    return AutoConfig.for_model(
        kind,
        **{
            keys.get(key, key): value for key, value in given.items() if key not in ("model_type", "auto_map")
        },
    )


def read_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Raises ModelError where there is none, or one that cannot be read."""
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    if not folder.exists() and "/" in name and not on_hub(name):
        raise ModelError(f"there is no tokenizer folder {name!r}: give a folder or a hub id (owner/name).")
    try:
        return AutoTokenizer.from_pretrained(
            folder if folder.exists() else name, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The message of an error, up to the end of its first line; one that ends with a colon is continued."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


class Weights:
    """The tensors of a checkpoint folder."""

    def __init__(
        self, folder: Path, stems: Sequence[str] = ("model.safetensors", "pytorch_model.bin")
    ) -> None:
        self.folder = folder
        self.loaded: dict[Path, dict[str, Tensor]] = {}
        self.where: dict[str, Path] = dict(self._list(folder, stems))
        for name in filter(NUMBERED_TOO_HIGH.search, self.where):
            raise ModelError(
                f"{self.where[name]} has a tensor {name[:80]!r}: no module has such a high number."
            )
        if not self.where:
            raise ModelError(
                f"{folder} has no weights: expected {' or '.join(stems)}, or their shards with an index."
            )

    def _list(self, folder: Path, stems: Sequence[str]) -> Iterator[tuple[str, Path]]:
        for stem in stems:
            index = folder / f"{stem}.index.json"
            if index.is_file():
                shards = read_json(index).get("weight_map")
                if not isinstance(shards, dict):
                    raise ModelError(f"{index} is corrupt: it has no weight_map.")
                _check_shards(folder, index, shards)
                yield from ((name, folder / shard) for name, shard in shards.items())
                return
            if (folder / stem).is_file():
                yield from ((name, folder / stem) for name in self._names(folder / stem))
                return

    def _names(self, path: Path) -> list[str]:
        if path.suffix != SAFE:
            return list(self._bin(path))
        with _opened(path) as file:
            return list(file.keys())

    def _bin(self, path: Path) -> dict[str, Tensor]:
        if path not in self.loaded:
            try:
                self.loaded[path] = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
                )
            except Exception as error:
                raise ModelError(
                    f"{path} is corrupt or not a weights-only file: {first_line(error)}"
                ) from error
            if not isinstance(self.loaded[path], dict):
                raise ModelError(
                    f"{path} holds no named tensors but a {type(self.loaded.pop(path)).__name__}."
                )
            for name, value in self.loaded[path].items():
                if not isinstance(name, str) or not isinstance(value, Tensor):
                    del self.loaded[path]
                    raise ModelError(
                        f"{path} holds more than named tensors: {name!r} in it is a {type(value).__name__}."
                    )
                if value.nbytes > value.untyped_storage().nbytes():
                    del self.loaded[path]
                    raise ModelError(
                        f"{path} is corrupt: {name!r} has more elements than the file holds of it."
                    )
        return self.loaded[path]

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there, without reading it."""
        path = self.where[name]
        if path.suffix != SAFE:
            return tuple(self._bin(path)[name].shape)
        with _opened(path) as file, _reading(path, name):
            return tuple(file.get_slice(name).get_shape())

    def get(self, name: str, *shape: int) -> Tensor:
        tensor = self.raw(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensor.shape)}, the config asks for {shape}.")
        if not tensor.is_floating_point():
            raise ModelError(f"{name} is {tensor.dtype}; only floating-point weights are supported.")
        return tensor.detach()

    def linear(self, name: str, outputs: int, inputs: int) -> Tensor:
        return self.get(f"{name}.weight", outputs, inputs)

    def weight(self, name: str) -> Tensor | QuantizedWeight:
        return self.raw(name)

    def raw(self, name: str) -> Tensor:
        """The tensor of that name as it is.  Raises ModelError naming what is missing."""
        if name not in self.where:
            raise ModelError(
                f"{self.folder} has no tensor {name!r}, which its config.json asks for; it has {len(self.where)}, "
                f"e.g. {next(iter(self.where))!r}."
            )
        path = self.where[name]
        with _reading(path, name):
            if path.suffix != SAFE:
                return self._bin(path)[name]
            with _opened(path) as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor


def _check_shards(folder: Path, index: Path, shards: dict[str, Any]) -> None:
    """Raises ModelError for a weight_map with a shard that is no file inside the folder."""
    for name, shard in shards.items():
        if (
            not isinstance(shard, str)
            or "\0" in shard
            or Path(shard).is_absolute()
            or ".." in Path(shard).parts
        ):
            raise ModelError(
                f"{index}: weight_map names {reprlib.repr(shard)} for {name!r}, which is no file in this folder."
            )
    for shard in sorted(set(shards.values())):
        if len(shard) > 255 or not (folder / shard).is_file():
            raise ModelError(f"{index}: weight_map names {shard[:80]!r}, which is missing in {folder}.")


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Raises ModelError for whatever goes wrong while a tensor is read: safetensors, torch and numpy each have errors of their own."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{path} should hold {name!r} but does not: {first_line(error)}") from error


class BodyWeights(Weights):
    """The tensors of a body that was saved without its head, under the names that they have with it."""

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name.removeprefix(BODY))

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(name.removeprefix(BODY))

    def raw(self, name: str) -> Tensor:
        return super().raw(name.removeprefix(BODY))


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is corrupt or truncated: {error}") from error
