"""Export of quantized checkpoints: compressed-tensors ("pack-quantized"), weights only, W8A16 or W4A16.

    name.weight [O, K]  ->  name.weight_packed  int32 [O, K * bits / 32]   unsigned, the lowest bits first
                            name.weight_scale   float16 [O, K / GROUP], float32 if that would round
                            name.weight_shape   int64 [2]: O, K

`packed.py` reads back the values that `quantization` gives while loading.  In W4A16, embedding and head keep
8 bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.joined_experts import has_joined_experts
from outrider.checkpoints.names import GATES, GPT, MIXTRAL
from outrider.checkpoints.packed import MIDPOINT
from outrider.checkpoints.quantize import GROUP, quantize
from outrider.checkpoints.quantized_layers import QuantizedLayers
from outrider.checkpoints.scaled import quantized
from outrider.checkpoints.validate import read_json
from outrider.checkpoints.weights import SAFE, Weights, open_weights, write_tensors
from outrider.core.quantized import QuantizedWeight
from outrider.errors import ConfigError, ModelError, writing
from outrider.models.load import needs_fallback

OUTER = ("embed_tokens", "lm_head")
PLAIN = {16: torch.bfloat16, 32: torch.float32}  # bits: not quantized
EXPANDED = ("compressed-tensors", "fp8")  # what can be written with 16 or 32 bits
CHOICES = (8, 4, *PLAIN)
PARTS = {"text_config", "vision_config", "audio_config"}  # keys of models that read more than text


def write(
    source: str, folder: Path, bits: int, revision: str | None = None, trust_remote_code: bool = False
) -> int:
    """Write the checkpoint `source` to `folder` with `bits` bits a weight; returns the bytes of its weights.

    16 bits dequantize a compressed-tensors or fp8 checkpoint to bfloat16, 32 bits to float32, which is exact.
    Raises ModelError for a checkpoint that is no folder, is not supported by the lean decoder, or is
    quantized already.  Raises ConfigError for other bits, or for a folder that is not empty.
    """
    if bits not in CHOICES:
        raise ConfigError(f"bits must be one of {', '.join(map(str, CHOICES))}, got {bits!r}.")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"the folder {str(folder)!r} is not empty: choose another one.")
    checkpoint = Checkpoint.open(source, revision, trust_remote_code)
    _check(checkpoint, bits)
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(checkpoint)
    weights = open_weights(checkpoint.folder)
    if any(map(MIXTRAL.match, weights.stored.values())):
        weights = Weights(checkpoint.folder)  # under the names that all others read
    if any(map(GPT.match, weights.stored.values())):
        config.pop("auto_map", None)  # the checkpoint's own code knows the other names only
    if bits in PLAIN:
        config.pop("quantization_config", None)
        config["dtype"] = str(PLAIN[bits]).removeprefix("torch.")
    else:
        config["quantization_config"] = scheme(bits, [name for name in weights if _plain(weights, name)])
    with writing(folder / "config.json"):
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _copy_rest(checkpoint, folder)
    return _write_weights(weights, checkpoint, folder, bits)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings of config.json; of a model that also reads images or sound, those of its text part."""
    config = read_json(checkpoint.folder / "config.json")
    if not PARTS & config.keys():
        return config
    text: dict[str, Any] = json.loads(checkpoint.config.to_json_string(use_diff=False))
    return text | {"architectures": [checkpoint.spec.architecture]}


def _check(checkpoint: Checkpoint, bits: int) -> None:
    if checkpoint.gguf is not None:
        raise ModelError(f"{checkpoint.name!r} is a GGUF file: give a folder with safetensors.")
    if has_joined_experts(open_weights(checkpoint.folder)):
        raise ModelError(
            f"the experts of {checkpoint.name!r} ({checkpoint.spec.architecture}) cannot be written: give "
            "quantization while loading instead."
        )
    if checkpoint.small is not None:
        raise ModelError(f"{checkpoint.name!r} has no weights of its own: give 'builtin'.")
    if checkpoint.scheme is None:
        if needs_fallback(checkpoint):
            raise ModelError(
                f"{checkpoint.name!r} is {checkpoint.spec.architecture}, which cannot be run from few bits."
            )
    elif bits not in PLAIN:
        raise ModelError(f"{checkpoint.name!r} is quantized already: write it with 16 bits first.")
    elif checkpoint.scheme.method not in EXPANDED:
        raise ModelError(
            f"{checkpoint.name!r} is quantized by {checkpoint.scheme.method}; "
            f"only {' and '.join(EXPANDED)} can be written with {bits} bits."
        )


def _write_weights(weights: Weights, checkpoint: Checkpoint, folder: Path, bits: int) -> int:
    """Write the weights file by file, so that at most one file is in memory."""
    files: dict[Path, list[str]] = {}
    for name, path in weights.where.items():
        files.setdefault(path, []).append(name)
    where, size = dict[str, str](), 0
    for path, names in files.items():
        target = folder / f"{path.stem.replace('pytorch_model', 'model')}{SAFE}"
        if bits not in PLAIN:
            tensors = packed(((name, weights.raw(name)) for name in names), bits)
        elif checkpoint.scheme is None:
            tensors = {name: weights.raw(name).to(PLAIN[bits]).contiguous() for name in names}
        else:
            dense = _dense(quantized(weights, checkpoint.scheme), names)
            tensors = {name: tensor.to(PLAIN[bits]).contiguous() for name, tensor in dense.items()}
        write_tensors(tensors, target)
        where |= dict.fromkeys(tensors, target.name)
        size += target.stat().st_size
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": where}
        path = folder / f"model{SAFE}.index.json"
        with writing(path):
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return size


def _dense(weights: QuantizedLayers, names: Iterable[str]) -> dict[str, Tensor]:
    words = f".{weights.layout.values}"
    found = (f"{name.removesuffix(words)}.weight" if name.endswith(words) else name for name in names)
    return {name: weights.raw(name) for name in found if name in weights}


def _copy_rest(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy tokenizer, templates and generation settings."""
    shared = checkpoint.tokenizer_folder
    for path in (*shared.glob("*token*"), *shared.glob("*.jinja"), *checkpoint.folder.iterdir()):
        weights = path.suffix in (SAFE, ".bin", ".pt", ".pth") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            with writing(folder / path.name):
                shutil.copyfile(path, folder / path.name)


def packed(tensors: Iterable[tuple[str, Tensor]], bits: int) -> dict[str, Tensor]:
    """Tensors of a file with every matrix quantized to `bits` bits.

    A matrix whose number of inputs is not a multiple of the group size is left unchanged.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors:
        weight = quantize(tensor, _bits(name, bits)) if _matrix(name, tensor) else tensor
        if isinstance(weight, QuantizedWeight):
            layer = name.removesuffix(".weight")
            made[f"{layer}.weight_packed"] = _words(weight)
            made[f"{layer}.weight_scale"] = _smallest_exact(weight.scales)
            made[f"{layer}.weight_shape"] = torch.tensor(weight.values.shape)
        else:
            made[name] = weight.contiguous()
    return made


def scheme(bits: int, plain: Iterable[str] = ()) -> dict[str, Any]:
    """The quantization_config of an exported file.  plain: matrices that are not quantized."""

    def group(targets: list[str], bits: int) -> dict[str, Any]:
        weights = {
            "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
            "dynamic": False,
        }  # fmt: skip
        return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}

    groups: Mapping[str, Any] = {"group_0": group(["Linear", "Embedding"] if bits == 8 else ["Linear"], bits)}
    if bits != 8:
        groups = {**groups, "group_1": group([f"re:.*{name}" for name in OUTER], 8)}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [name.removesuffix(".weight") for name in plain],
    }


def _smallest_exact(scales: Tensor) -> Tensor:
    """float16 if that is exact, otherwise float32."""
    half = scales.half()
    return (half if torch.equal(half.float(), scales) else scales).contiguous()


def _words(weight: QuantizedWeight) -> Tensor:
    """Packed words, int32 [O, K * bits / 32]."""
    numbers = (weight.values.short() + MIDPOINT[weight.bits]).to(torch.uint8)
    if weight.bits == 4:
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return numbers.contiguous().view(torch.int32)


def _bits(name: str, bits: int) -> int:
    return 8 if name.removesuffix(".weight").endswith(OUTER) else bits


def _matrix(name: str, tensor: Tensor) -> bool:
    return (
        name.endswith(".weight")
        and tensor.dim() == 2
        and tensor.is_floating_point()
        and not GATES.search(name)
    )


def _plain(weights: Weights, name: str) -> bool:
    shape = weights.shape(name)
    whole = shape[-1] % GROUP == 0 and not GATES.search(name)
    return name.endswith(".weight") and len(shape) == 2 and not whole
