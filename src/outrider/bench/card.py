"""What a checkpoint is, what will run it and how much memory that takes, from its config and the headers of its tensors.

No weights are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.cache.pool import Pool
from outrider.cache.slots import PAGE
from outrider.config import EngineOptions
from outrider.engine.engine import free_memory, pick_device
from outrider.errors import ModelError
from outrider.models.hub import BUILTIN, Checkpoint, Weights, locate
from outrider.models.spec import Spec

NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}  # what safetensors calls them


@dataclass(frozen=True)
class Card:
    """Sizes in tokens, weights and bytes.  refused: why nothing here runs it; then what is not known is 0 or None."""

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
    stored_as: dict[str, int]  # dtype -> weights
    quantization: str | None
    chat_template: bool
    dtype: str  # in which it runs
    weight_bytes: int
    token_bytes: int  # K/V of one token
    requests: int  # max_num_seqs
    request_tokens: int  # max_model_len
    free_bytes: int  # what K/V may take by default

    @property
    def cache_bytes(self) -> int:
        """K/V of all requests at their longest, in whole pages."""
        return -(-self.request_tokens // PAGE) * PAGE * self.requests * self.token_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + min(self.cache_bytes, self.free_bytes)


def card_of(options: EngineOptions) -> Card:
    """The card of options.model as `LLM(**options)` would run it.  Raises ModelError where there is no such checkpoint."""
    from transformers import AutoConfig

    folder, device = locate(options.model, options.revision), pick_device(options.device)
    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    except Exception as error:
        raise ModelError(f"the config of {options.model!r} cannot be read: {str(error).splitlines()[0]}") from error
    refused = None
    try:
        spec = Spec.of(config)
    except ModelError as error:
        refused = str(error)
    headers = list(_headers(folder))
    dtype = Checkpoint(options.model, folder, config, spec).dtype(options.dtype, device) if not refused else torch.float32
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    layers, context = getattr(config, "num_hidden_layers", 0), getattr(config, "max_position_embeddings", 0)
    loaded = [(name, shape) for name, shape, _ in headers if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    stored: Counter[str] = Counter()
    for _, shape, kind in headers:
        stored[kind] += _count(shape)
    return Card(
        name=options.model,
        architecture=(getattr(config, "architectures", None) or [f"model_type {config.model_type!r}"])[0],
        runs_on=f"lean decoder, {device}",
        refused=refused,
        layers=layers,
        hidden=getattr(config, "hidden_size", 0),
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=getattr(config, "vocab_size", 0),
        context=context,
        parameters=sum(_count(shape) for _, shape in loaded),
        stored_as=dict(stored),
        quantization=_quantization(config),
        chat_template=_has_template(folder),
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=sum(_count(shape) * (dtype.itemsize if len(shape) > 1 else 4) for _, shape in loaded),
        token_bytes=Pool.bytes_per_slot(layers, kv_heads, width, dtype),
        requests=options.max_num_seqs,
        request_tokens=min(options.max_model_len or context, context),
        free_bytes=options.kv_cache_memory_bytes or free_memory(device, options.gpu_memory_utilization),
    )


def known() -> list[str]:
    """The built-in models, and those in the hub's cache that have a config and weights."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        repos = frozenset()
    cached = []
    for repo in repos:
        files = {file.file_name for revision in repo.revisions for file in revision.files}
        if repo.repo_type == "model" and "config.json" in files and any(file.endswith((".safetensors", ".bin")) for file in files):
            cached.append(repo.repo_id)
    return [*BUILTIN, *sorted(cached)]


def _headers(folder: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of every tensor."""
    from safetensors import safe_open

    weights = Weights(folder)
    for path in sorted(set(weights.where.values())):
        names = [name for name, where in weights.where.items() if where == path]
        if path.suffix == ".bin":
            for name, tensor in torch.load(path, map_location="meta", weights_only=True).items():
                yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            continue
        with safe_open(path, framework="pt") as file:
            for name in names:
                part = file.get_slice(name)
                yield name, tuple(part.get_shape()), NAMES.get(part.get_dtype(), part.get_dtype())


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _quantization(config: Any) -> str | None:
    given = getattr(config, "quantization_config", None)
    return (
        str(given.get("quant_method", "unknown") if isinstance(given, dict) else getattr(given, "quant_method", "unknown"))
        if given
        else None
    )


def _has_template(folder: Path) -> bool:
    settings = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (settings.is_file() and '"chat_template"' in settings.read_text())
