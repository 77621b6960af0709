"""LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors (or .bin).

Hu et al. 2021 (arXiv 2106.09685): y = W x + scale B (A x).  The tensors in the file determine which
projections are adapted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

from outrider.checkpoints.fields import PEFT, RANK, SCALE
from outrider.checkpoints.hub import download, on_hub
from outrider.checkpoints.spec import Spec
from outrider.checkpoints.validate import read_json
from outrider.checkpoints.weights import Weights
from outrider.core.lora import Adapted, LowRankUpdate, places
from outrider.errors import ModelError

TENSOR = re.compile(
    r"(?:base_model\.model\.)?"
    r"(model\.layers\.(\d+)\.(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj)\.lora_([AB])\.weight"
)
BASE = "base_model_name_or_path"
REFUSED = {  # settings whose effect is not a low-rank update
    "use_dora": "DoRA scales every weight anew; merge the adapter into the model instead",
    "modules_to_save": "it replaces whole modules; merge the adapter into the model instead",
    "lora_bias": "biases are not adapted",
    "trainable_token_indices": "embeddings are not adapted",
    "target_parameters": "only linear layers are adapted",
    "layer_replication": "it builds another model",
    "alora_invocation_tokens": "an adapter works on all tokens of a request",
    "use_qalora": "its inputs are pooled",
}
REBASED = ("pissa", "olora", "loftq", "corda", "lora_ga")  # they change the weights of the base model


@dataclass(frozen=True)
class Part:
    """One adapted projection: names of its matrices in the file, and their shapes."""

    layer: int
    name: str
    a: str
    b: str
    rank: int
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter whose settings, names and shapes fit the model.  Its matrices are not loaded yet."""

    spec: Spec
    weights: Weights
    parts: list[Part]

    @staticmethod
    def open(path: str, spec: Spec, max_rank: int) -> PeftAdapter:
        """Open and check an adapter.  Raises ModelError for anything missing, misfitting or unsupported."""
        folder = _locate(path)
        config = read_json(folder / "adapter_config.json", PEFT)
        _refuse(config)
        weights = Weights(folder, ("adapter_model.safetensors", "adapter_model.bin"))
        modules = _modules(weights).items()
        parts = [_part(config, module, tensors, spec, max_rank) for module, tensors in modules]
        found = PeftAdapter(spec, weights, parts)
        for part, name, shape in found._shapes():
            if weights.shape(name) != shape:
                raise ModelError(
                    f"{name} has shape {weights.shape(name)}, rank {part.rank} and this model ask for "
                    f"{shape}: was the adapter made for another base model?  It says {config.get(BASE)!r}."
                )
        return found

    def read(self) -> Adapted:
        """Load the matrices, by layer and projection."""
        tensors = {name: self.weights.get(name, *shape) for _, name, shape in self._shapes()}
        layers: list[dict[str, LowRankUpdate]] = [{} for _ in range(self.spec.layers)]
        for part in self.parts:
            layers[part.layer][part.name] = LowRankUpdate(tensors[part.a], tensors[part.b], part.scale)
        return layers

    def _shapes(self) -> Iterator[tuple[Part, str, tuple[int, int]]]:
        """(part, tensor name, its shape) of every matrix."""
        sizes = places(self.spec)
        for part in self.parts:
            yield part, part.a, (part.rank, sizes[part.name].inputs)
            yield part, part.b, (sizes[part.name].outputs, part.rank)


def _locate(path: str) -> Path:
    """The folder of an adapter, downloaded if `path` is a hub id.  Raises ModelError."""
    folder = Path(expanduser(path))
    if not isdir(folder):
        if not on_hub(path):
            raise ModelError(f"there is no adapter folder {path!r}; give a folder or a hub id (owner/name).")
        folder = download(path)
    if not (folder / "adapter_config.json").is_file():
        raise ModelError(f"{path} has no adapter_config.json: it is not a PEFT adapter.")
    return folder


def _refuse(config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ModelError(f"peft_type is {kind!r}; only LORA is supported.")
    for key, why in REFUSED.items():
        if config.get(key):
            raise ModelError(f"{key} = {config[key]!r} is not supported: {why}.")
    if (bias := config.get("bias", "none")) != "none":
        raise ModelError(f"bias = {bias!r} is not supported: biases are not adapted.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(REBASED):
        raise ModelError(
            f"init_lora_weights = {start!r} is not supported: the adapter belongs to changed base weights; "
            "save it with path_initial_model_for_weight_conversion."
        )


def _modules(weights: Weights) -> dict[str, dict[str, str]]:
    """Module name -> {"A": tensor name, "B": tensor name}."""
    found: dict[str, dict[str, str]] = {}
    for name in weights.where:
        match = TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{name} is not supported: only the q, k, v, o, gate, up and down projections of the layers "
                "are adapted."
            )
        found.setdefault(match[1], {})[match[4]] = name
    for module, tensors in found.items():
        if len(tensors) < 2:
            raise ModelError(f"{module} has only one of lora_A and lora_B.")
    return found


def _part(config: Mapping[str, Any], module: str, tensors: dict[str, str], spec: Spec, max_rank: int) -> Part:
    match = TENSOR.fullmatch(tensors["A"])
    assert match is not None
    layer, name = int(match[2]), match[3]
    if layer >= spec.layers:
        raise ModelError(
            f"{module} is layer {layer} of a model that has {spec.layers}: the adapter was made for "
            f"{config.get(BASE)!r}, which is not this model."
        )
    if name in ("gate", "up", "down") and spec.experts is not None and spec.experts.layers[layer]:
        raise ModelError(
            f"{module} is not supported: this layer of {spec.architecture} has experts in place of an MLP."
        )
    rank = _setting(config, "rank_pattern", module, config.get("r", 8))
    alpha = _setting(config, "alpha_pattern", module, config.get("lora_alpha", 8))
    RANK.check(rank, f"the rank of {module} (r, rank_pattern)", ModelError)
    SCALE.check(alpha, f"the lora_alpha of {module} (alpha_pattern)", ModelError)
    if rank > max_rank:
        raise ModelError(f"{module} has rank {rank}, max_lora_rank is {max_rank}: raise max_lora_rank.")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Part(layer, name, tensors["A"], tensors["B"], rank, scale)


def _setting(config: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """Value of a setting for a module; the first pattern that matches the end of its name, as in PEFT."""
    try:
        patterns = (config.get(key) or {}).items()
        return next(
            (value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", module)), default
        )
    except (re.error, OverflowError, RecursionError) as error:
        raise ModelError(f"{key} cannot be read: {error}") from error
