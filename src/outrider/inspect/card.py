"""Models for `outrider models`: architecture, backend and memory, from configs and headers of tensors.

No weights are loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.cache.pool import Pool, kv_dtype
from outrider.checkpoints.gguf import blocks
from outrider.checkpoints.grown import LAYER
from outrider.checkpoints.heads import Head, builtin
from outrider.checkpoints.hub import BUILTIN, PROCESSOR_TEMPLATE, Checkpoint, locate
from outrider.checkpoints.joined_experts import open_quantized
from outrider.checkpoints.names import GATES
from outrider.checkpoints.quantize import GROUP, bits_of
from outrider.checkpoints.spec import Spec, largest
from outrider.checkpoints.weights import SAFE, Weights, open_weights
from outrider.config import EngineOptions
from outrider.core.block_table import PAGE
from outrider.core.quantized import QuantizedWeight
from outrider.draft import mtp
from outrider.draft.datastore.store import BUILTIN as STORES
from outrider.draft.draft_model.one_pass import MASK
from outrider.engine.memory import free_memory
from outrider.errors import ModelError
from outrider.models.load import needs_fallback
from outrider.models.placement import pick_device, pick_dtype

WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")  # layer_types without K/V
NAMES = {  # safetensors -> torch
    "F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64", "I32": "int32",
    "BOOL": "bool",
}  # fmt: skip
ADDED = "added while loading"  # kind of the weights that a grown checkpoint has in memory only
# keys of a config with the number of prediction layers
LAYER_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
OUTER = ("model.embed_tokens.weight", "lm_head.weight")  # these keep 8 bits where the others get fewer


@dataclass(frozen=True)
class Card:
    """Sizes in tokens, weights and bytes.  refused: why no backend supports the model; memory is then 0."""

    name: str
    architecture: str
    runs_on: str
    refused: str | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    parameters: int
    stored_as: dict[str, int]  # type -> weights
    chat_template: bool
    mask_token: int | None = None  # of a draft model that drafts all tokens in one forward
    prediction_layers: int = 0  # for the method `mtp`
    dtype: str = ""  # of the computation
    weight_bytes: int = 0
    token_bytes: int = 0  # K/V of one token
    requests: int = 0  # max_num_seqs
    request_tokens: int = 0  # max_model_len
    free_bytes: int = 0  # available to K/V by default

    @property
    def cache_bytes(self) -> int:
        """K/V of all requests at their longest, in whole pages."""
        return -(-self.request_tokens // PAGE) * PAGE * self.requests * self.token_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + min(self.cache_bytes, self.free_bytes)


class Stored(NamedTuple):
    """One tensor.  bits: of a weight in memory with its share of the scales, None for those of the dtype."""

    name: str
    weights: int
    kind: str
    vector: bool
    bits: float | None = None


class Header(NamedTuple):
    """A tensor of a file, and its type."""

    name: str
    shape: tuple[int, ...]
    kind: str


def card_of(options: EngineOptions) -> Card:
    """Card of options.model, as `LLM(**options)` runs it.  Raises ModelError for a missing checkpoint."""
    checkpoint, config, refused = _opened(options)
    copy = "lm_head.weight" if config.tie_word_embeddings else None
    parts = _parts(options, checkpoint)
    if checkpoint is not None and checkpoint.small is not None:
        assert isinstance(checkpoint.spec, Spec)
        parts = _grown(parts, checkpoint.small, checkpoint.spec)
    stored = [part for part in parts if part.name != copy]
    kinds: Counter[str] = Counter()
    for part in stored:
        kinds[part.kind] += part.weights
    about = {"name": options.model, **_sizes(config), "parameters": kinds.total(), "stored_as": dict(kinds)}
    if checkpoint is None:
        templated = _has_template(locate(options.model, options.revision))
        return Card(**about, runs_on="nothing", refused=refused, chat_template=templated)
    spec, gguf = checkpoint.spec, checkpoint.gguf
    about |= {"architecture": spec.architecture, "kv_heads": spec.kv_heads, "context": spec.context}
    fallback = needs_fallback(checkpoint)
    runs_on = "transformers' own code" if fallback else "lean decoder"
    in_gguf = gguf and gguf.metadata.get("tokenizer.chat_template")
    templated = bool(in_gguf) if gguf else _has_template(checkpoint.tokenizer_folder)
    memory = _memory(options, checkpoint, stored)
    if gguf is None:
        about["prediction_layers"] = _prediction_layers(checkpoint.folder, checkpoint.config)
    return Card(**about, runs_on=runs_on, refused=None, chat_template=templated, **memory)


def _sizes(config: Any) -> dict[str, Any]:
    """Architecture and sizes that a config names; 0 for those that it leaves out."""
    heads = largest(config, "num_attention_heads") or 0
    return {
        "architecture": (getattr(config, "architectures", None) or [f"model_type {config.model_type!r}"])[0],
        "layers": getattr(config, "num_hidden_layers", 0),
        "hidden": getattr(config, "hidden_size", 0),
        "heads": heads,
        "kv_heads": largest(config, "num_key_value_heads") or heads,
        "vocabulary": getattr(config, "vocab_size", 0),
        "context": getattr(config, "max_position_embeddings", 0),
        "mask_token": getattr(config, MASK, None),
    }


def _opened(options: EngineOptions) -> tuple[Checkpoint | None, Any, str | None]:
    """The checkpoint, or its config and the reason why it is not supported."""
    try:
        checkpoint = Checkpoint.open(options.model, options.revision, options.trust_remote_code)
        needs_fallback(checkpoint, options.quantization)
        return checkpoint, checkpoint.config, None
    except ModelError as error:
        folder = locate(options.model, options.revision)
        if not folder.is_dir():
            raise
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        except Exception:
            raise error from None
        return None, config, str(error)


def _memory(options: EngineOptions, checkpoint: Checkpoint, stored: list[Stored]) -> dict[str, Any]:
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, checkpoint.stored_dtype, device)
    spec, few = checkpoint.spec, bits_of(options.quantization)
    fallback, widest = needs_fallback(checkpoint), _widest_bits(stored)
    kinds = getattr(checkpoint.config, "layer_types", None) or ["full_attention"] * spec.layers
    attended = sum(kind not in WITHOUT_ATTENTION for kind in kinds)
    weight_bits = 0.0
    for part in stored:
        bits: float = 8 * dtype.itemsize
        if few is not None and not GATES.search(part.name):
            bits = _few(8 if part.name in OUTER else few, GROUP, False)
        if (packed := widest[_fused(part.name)]) is not None:
            bits = min(bits, packed)
        if part.vector and not fallback:
            bits = 32
        weight_bits += part.weights * bits
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "weight_bytes": round(weight_bits / 8),
        "token_bytes": Pool.bytes_per_slot(
            attended, spec.kv_heads, spec.head_dim, kv_dtype(options.kv_cache_dtype, dtype)
        ),
        "requests": options.max_num_seqs,
        "request_tokens": min(options.max_model_len or spec.unscaled, spec.context),
        "free_bytes": options.kv_cache_memory_bytes or free_memory(device, options.gpu_memory_utilization),
    }


def known() -> list[str]:
    """Built-in models, and the models in the hub's cache that have a config and weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    cached = []
    for repo in repos:
        files = {file.file_name for revision in repo.revisions for file in revision.files}
        weights = any(file.endswith((".safetensors", ".bin", ".pt")) for file in files)
        if repo.repo_type == "model" and "config.json" in files and weights:
            cached.append(repo.repo_id)
    return [*BUILTIN, *builtin(), *STORES, *sorted(cached)]


def _parts(options: EngineOptions, checkpoint: Checkpoint | None) -> Iterator[Stored]:
    """Every tensor that holds weights; a quantized layer is one."""
    if checkpoint is not None and checkpoint.gguf is not None:
        for name, entry in checkpoint.gguf.tensors.items():
            sample, few = blocks.unpack(entry.ggml_type, entry.rows[:1], entry.block_bytes), None
            if isinstance(sample, QuantizedWeight):
                few = _few(sample.bits, sample.group, sample.offsets is not None)
            yield Stored(name, count(entry.shape), entry.ggml_type, len(entry.shape) == 1, few)
        return
    weights = open_weights(locate(options.model, options.revision))
    if checkpoint is None or checkpoint.scheme is None:
        for name, shape, kind in headers(weights):
            yield Stored(name, count(shape), kind, _is_vector(name, shape))
        return
    scheme, packed = checkpoint.scheme, open_quantized(weights, checkpoint.scheme)
    for name in packed.layer_of:
        bits = packed.bits([name])  # None: it is expanded
        few = _few(bits, min(scheme.sizes).group, not scheme.symmetric) if bits else None
        yield Stored(name, count(packed.shape(name)), f"{scheme.method} in {bits or 8} bits", False, few)
    for name, shape, kind in headers(weights):
        if name in packed and name not in packed.layer_of:
            yield Stored(name, count(shape), kind, _is_vector(name, shape))


def _grown(parts: Iterator[Stored], small: Spec, spec: Spec) -> Iterator[Stored]:
    """The parts on disk, and those of more layers and wider MLPs.  All are dense in memory."""
    for part in (part._replace(bits=None) for part in parts):
        yield part
        wide = part.weights * spec.inner // small.inner if ".mlp." in part.name else part.weights
        more = part._replace(kind=ADDED, weights=wide - part.weights)
        if more.weights:
            yield more
        if (layer := LAYER.match(part.name)) and int(layer[1]) == small.layers - 1:
            yield more._replace(weights=wide * (spec.layers - small.layers))


def _fused(name: str) -> str:
    """Name of the fused linear that contains a tensor.  It has the bits of its widest part."""
    return re.sub(
        r"\b(q|k|v|gate|up)_proj", lambda part: "qkv" if part.group(1) in "qkv" else "gate_up", name
    )


def _widest_bits(stored: Sequence[Stored]) -> dict[str, float | None]:
    """Bits of each fused linear as the file has it packed; None if a part of it is not packed."""
    widest: dict[str, float | None] = {}
    for part in stored:
        name = _fused(part.name)
        before = widest.get(name, 0.0)
        widest[name] = None if before is None or not part.bits else max(before, part.bits)
    return widest


def _few(bits: int, group: int, offsets: bool) -> float:
    """Bits of a weight with its share of the 16-bit scale and offset.  Groups in memory hold at most 32."""
    return bits + (1 + offsets) * 16 / (16 if group % 32 else 32)


def headers(weights: Weights) -> Iterator[Header]:
    """The header of every tensor.  Of aliases in a pickle only the first is given."""
    from safetensors import safe_open

    for path in sorted(set(weights.where.values())):
        names = [name for name, where in weights.where.items() if where == path]
        if path.suffix != SAFE:
            tensors = {name: weights.raw(name) for name in names}  # mapped, not read
            places = {
                name: (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape))
                for name, t in tensors.items()
            }
            for place, name in {place: name for name, place in reversed(places.items())}.items():
                yield Header(name, place[2], str(tensors[name].dtype).removeprefix("torch."))
            continue
        with safe_open(path, framework="pt") as file:
            for name in names:
                part = file.get_slice(weights.name_in_file(name))
                kind = NAMES.get(part.get_dtype(), part.get_dtype())
                yield Header(name, tuple(part.get_shape()), kind)


def _is_vector(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor stays in float32: a norm or a bias, also one of all experts of a layer."""
    return len(shape) == 1 or name.endswith("_bias")


def count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _has_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    files = ("chat_template.jinja", PROCESSOR_TEMPLATE)
    return any((folder / file).is_file() for file in files) or (
        settings.is_file() and '"chat_template"' in settings.read_text(encoding="utf-8")
    )


def _prediction_layers(folder: Path, config: Any) -> int:
    """The number of prediction layers in a checkpoint, of which the config says that it has some."""
    if not any(getattr(config, key, None) for key in LAYER_COUNTS):
        return 0
    head = Head.open(str(folder))
    if mtp.FORMAT.layout_of(head) is None:
        return 0
    return sum(name.endswith(".eh_proj.weight") for name in mtp.FORMAT.renamed(head))
