"""Checkpoints: finding them (built-in name, folder, GGUF file, hub id), config, weights and tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from os.path import exists, expanduser, isdir, isfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.biases import require_biases
from outrider.checkpoints.fields import CONFIG
from outrider.checkpoints.generation import generation_config
from outrider.checkpoints.gguf import config as gguf_config
from outrider.checkpoints.gguf import tokenizer as gguf_tokenizer
from outrider.checkpoints.gguf.file import GgufFile, find_in_folder
from outrider.checkpoints.gguf.weights import GgufWeights
from outrider.checkpoints.grown import INNER, LAYERS, Grown, grown_config
from outrider.checkpoints.joined_experts import open_source
from outrider.checkpoints.packed_scheme import Scheme
from outrider.checkpoints.plain_config import plain_config
from outrider.checkpoints.plain_tokenizer import plain_tokenizer
from outrider.checkpoints.spec import SAME_DECODER, Facts, Spec, lean
from outrider.checkpoints.text_part import has_text_part, text_part
from outrider.checkpoints.validate import read_json
from outrider.checkpoints.weights import GivenWeights, Source, Weights, open_weights
from outrider.errors import ConfigError, ModelError, first_line, nearest

SHIPPED = Path(__file__).parent.parent / "builtin"
HEADS = SHIPPED / "heads"
GROWN = "builtin-100m"  # the built-in target at the cost of 101 M weights (grown.py)
BUILTIN = {"builtin": "target", "builtin-draft": "draft", GROWN: "target"}
DOWNLOADED = ["*.json", "*.safetensors", "*.bin", "tokenizer*", "*.jinja", "*.model", "*.txt"]
PROJECTOR = "*mmproj*"  # GGUF files that read images for a language model
NOT_DOWNLOADED = ["*optimizer*", "*scheduler.pt", "rng_state*", "training_args*"]  # written by trainers
COPIES = ["original/*", "metal/*"]  # folders of gpt-oss: the same weights for other programs
PROCESSOR_TEMPLATE = "chat_template.json"  # of older checkpoints that also read images
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def locate(name: str, revision: str | None = None) -> Path:
    """The folder or GGUF file of a checkpoint; a hub id is downloaded into the hub's own cache."""
    if name in BUILTIN:
        return SHIPPED / BUILTIN[name]
    path = Path(expanduser(name))  # not Path's own, an error for the homes of unknown users
    if path.suffix == ".gguf" and isfile(path):  # False, not an error, for names that are too long
        return path
    if isdir(path):
        return _in_folder(name, path)
    if name.startswith("builtin-") and isdir(HEADS / name.removeprefix("builtin-")):
        raise ModelError(
            f"{name!r} is a draft head, not a model: give it as the draft, with its own method or none."
        )
    if not on_hub(name):
        kind = "file" if path.suffix == ".gguf" else "checkpoint folder"
        raise ModelError(
            f"there is no {kind} {name!r}.{nearest(name, BUILTIN)} Give a folder, a .gguf file, "
            f"a hub id (owner/name), or {' or '.join(BUILTIN)}."
        )
    if is_tagged(name):
        return _download_gguf(name, revision)
    folder = download(name, revision)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{name!r} on the hub has no config.json.  Of a repository of GGUF files give one, such as "
            f"{name}:Q4_K_M."
        )
    return folder


def _in_folder(name: str, folder: Path) -> Path:
    """The folder itself, or the GGUF file in it if it has no safetensors files."""
    if not any(folder.glob("*.safetensors")) and (file := find_in_folder(folder)):
        return file
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json and no GGUF file: it is not a checkpoint folder.")
    return folder


def on_hub(name: str) -> bool:
    """Whether a name may be a hub id: it has the form owner/name, and there is no such path."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~")) and not exists(name)


def is_tagged(name: str) -> bool:
    """Whether a name is llama.cpp's owner/name:QUANTIZATION, a GGUF file on the hub."""
    return ":" in name.partition("/")[2] and on_hub(name)  # "C:/model" is a path


def _download_gguf(name: str, revision: str | None) -> Path:
    """The file of this quantization, or the first one of its shards."""
    repository, _, tag = name.partition(":")
    if not tag:
        raise ModelError(f"{name!r} names no quantization: give one, such as {name}Q4_K_M.")
    spelled = dict.fromkeys((tag, tag.upper(), tag.lower()))
    ends = [f"{text}{end}" for text in spelled for end in (".gguf", "-0*-of-*.gguf")]
    patterns = [*ends, *(f"*[-._/]{end}" for end in ends)]
    folder = _download(repository, revision, patterns, [PROJECTOR])
    files = sorted(folder.rglob("*.gguf"), key=lambda file: (len(file.name), file.name))
    for file in files:
        path = file.relative_to(folder).as_posix()
        # another program may have downloaded it
        if not fnmatchcase(path, PROJECTOR) and any(fnmatchcase(path, pattern) for pattern in patterns):
            return file
    raise ModelError(f"{repository!r} has no GGUF file of the quantization {tag!r}.")


def download(name: str, revision: str | None = None, also: Sequence[str] = ()) -> Path:
    """The folder of a hub id in the hub's own cache.  `also`: patterns of files besides those of a model."""
    return _download(name, revision, [*DOWNLOADED, *also], [*NOT_DOWNLOADED, *COPIES])


def _download(name: str, revision: str | None, wanted: list[str], left: list[str]) -> Path:
    """The folder of a hub id, with the files of some patterns and without those of others."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=left))
    except Exception as error:  # the hub raises a dozen kinds; the user needs one sentence
        raise ModelError(
            f"{name!r} is no local folder, and the hub did not give it: {first_line(error)}"
        ) from error


@dataclass(frozen=True)
class Checkpoint:
    """A folder or GGUF file with a config, weights and usually a tokenizer.

    scheme: how the weights of a folder are quantized.
    small: the sizes on disk of a grown checkpoint.
    given: weights in place of those on disk.
    """

    name: str
    folder: Path
    config: Any
    spec: Facts
    scheme: Scheme | None = None
    gguf: GgufFile | None = None
    trust_remote_code: bool = False
    small: Spec | None = None
    given: Mapping[str, Tensor] | None = None

    @staticmethod
    def open(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Checkpoint:
        """Raise ModelError if there is no such checkpoint, or if it cannot be run."""
        if name == GROWN:
            return replace(Checkpoint.open("builtin").grown(LAYERS, INNER), name=GROWN)
        path = locate(name, revision)
        if path.suffix == ".gguf" and path.is_file():
            file = GgufFile(path)
            config = gguf_config.read_config(file)
            return Checkpoint(name, path.parent, config, _spec_and_scheme(name, config)[0], gguf=file)
        try:
            config = read_config(path, trust_remote_code)
        except ModelError:
            raise
        except Exception as error:
            if "trust_remote_code=True" in str(error):
                raise ModelError(
                    f"{name!r} brings its own code: pass trust_remote_code=True if you trust it."
                ) from error
            raise ModelError(f"the config.json of {name!r} cannot be read: {first_line(error)}") from error
        spec, scheme = _spec_and_scheme(name, config)
        return Checkpoint(name, path, config, spec, scheme, trust_remote_code=trust_remote_code)

    def grown(self, layers: int, inner: int) -> Checkpoint:
        """The same model at the cost of so many layers and an MLP of size `inner`.

        Raises ConfigError if either is smaller, or for a decoder that differs from Llama's.
        """
        if not isinstance(self.spec, Spec):
            raise ConfigError(f"{self.name!r} cannot be grown: the lean decoder does not run it.")
        if not self.spec.like_llama:
            raise ConfigError(f"{self.name!r} cannot be grown: {self.spec.architecture} differs from Llama.")
        config, spec = grown_config(self.config, self.spec, layers, inner)
        return replace(self, config=config, spec=spec, small=self.spec)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer; the built-in draft shares its target's."""
        return locate("builtin") if self.folder == locate("builtin-draft") else self.folder

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, or None if it has none."""
        if self.gguf is not None:
            return gguf_tokenizer.read_tokenizer(self.gguf)
        folder = self.tokenizer_folder
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            return None
        return read_tokenizer(str(folder), self.trust_remote_code)

    @cached_property
    def ending(self) -> frozenset[int]:
        """Ids that end a text: from generation_config.json, else the config; for GGUF from the metadata."""
        if self.gguf is not None:
            return gguf_tokenizer.read_end_tokens(self.gguf)
        ids = self.generation.get("eos_token_id")
        ids = getattr(self.config, "eos_token_id", None) if ids is None else ids
        return frozenset(() if ids is None else ids if isinstance(ids, list) else [ids])

    @cached_property
    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty if there is none."""
        return {} if self.gguf is not None else generation_config(self.folder)

    @property
    def stored_dtype(self) -> torch.dtype | None:
        """The dtype that the config names."""
        dtype: torch.dtype | None = getattr(self.config, "dtype", None)
        return dtype

    @cached_property
    def fingerprint(self) -> str | None:
        """Hash of the last norm's weights in bfloat16, which quantization keeps; None if they are not found.

        Heads that Outrider trains store that of their target.
        """
        try:
            norm = self.tensors().get("model.norm.weight", self.spec.hidden)
        except ModelError:
            return None
        data = norm.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def last_norm(self) -> Tensor:
        """What the norm before the head multiplies with, float32 [hidden]."""
        weight = self.tensors().get("model.norm.weight", self.spec.hidden).float()
        added = isinstance(self.spec, Spec) and self.spec.variant.unit_norms
        return weight + 1.0 if added else weight

    def tensors(self) -> Source:
        """Raises ModelError if there are no weights, or not all biases."""
        if self.given is not None:
            return GivenWeights(self.given)
        if self.gguf is not None:
            assert isinstance(self.spec, Spec)
            source: Source = GgufWeights(self.gguf, self.spec)
        else:
            source = open_source(open_weights(self.folder), self.scheme)
        if isinstance(self.spec, Spec):
            require_biases(source, self.spec)
        return source if self.small is None else Grown(source, self.small)


def _spec_and_scheme(name: str, config: Any) -> tuple[Facts, Scheme | None]:
    """Raise ModelError, which names the checkpoint, if the model or its quantization is not supported."""
    try:
        return Facts.of(config), Scheme.of(config)
    except ModelError as error:
        raise ModelError(f"{name!r}: {error}") from error


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """A transformers config, or a plain one.

    A checkpoint's own code is not needed if a known family has the same decoder (SAME_DECODER).
    """
    path = folder / "config.json"
    settings = read_json(path, CONFIG) if path.is_file() else {}
    if (plain := plain_config(settings)) is not None and lean(plain):
        return plain
    from transformers import AutoConfig

    if (like := SAME_DECODER.get(str(settings.get("model_type")))) is None:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return text_part(config, settings, Weights(folder).where) if has_text_part(config) else config
    model_type, renamed = like
    for key in ("model_type", "auto_map"):
        settings.pop(key, None)
    return AutoConfig.for_model(model_type, **{renamed.get(key, key): v for key, v in settings.items()})


def read_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a folder or of a hub id: transformers', or a plain one.

    Raises ModelError if there is none, or if it cannot be read.
    """
    folder = locate("builtin") if name in BUILTIN else Path(expanduser(name))
    if not exists(folder) and not on_hub(name):
        raise ModelError(f"there is no tokenizer folder {name!r}: give a folder or a hub id (owner/name).")

    def load() -> Any:
        from transformers import AutoTokenizer

        source = folder if folder.exists() else name
        with _reading(name):
            tokenizer: Any = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
            if getattr(tokenizer, "chat_template", None) is None and (folder / PROCESSOR_TEMPLATE).is_file():
                tokenizer.chat_template = read_json(folder / PROCESSOR_TEMPLATE).get("chat_template")
            return tokenizer

    with _reading(name):
        plain = plain_tokenizer(folder, load)
    return plain or load()


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn every error into a ModelError that names the tokenizer: libraries and files raise all kinds."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"the tokenizer of {name!r} cannot be read: {first_line(error)}") from error
