"""quantization_config of AWQ, GPTQ and compressed-tensors checkpoints, as one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.checkpoints.fields import QUANTIZATION
from outrider.checkpoints.validate import check
from outrider.core.validate import is_whole
from outrider.errors import ModelError

CURE = (
    "load the unquantized checkpoint, or one in GGUF, AWQ (gemm), GPTQ, fp8 (e4m3), mxfp4 "
    "or compressed-tensors (pack-, int- or float-quantized)."
)


MOST = 1 << 16  # rows or columns of a block
VALUES = {"float-quantized": "float", "int-quantized": "int", "naive-quantized": "float"}


class Size(NamedTuple):
    """Bits of a value, and inputs of a row that share a scale; group 0: all of them."""

    bits: int
    group: int


@dataclass(frozen=True)
class Scheme:
    """Quantization of the layers of a checkpoint.

    sizes: those that may occur; none where weights are expanded.
    symmetric: zero points may be missing.  zero_shift: is added to a stored zero point.
    scales: name of the scales beside weights that are not packed (scaled.py).  block: outputs and inputs
    that share one; 0: not in blocks.
    """

    method: str
    sizes: frozenset[Size]
    symmetric: bool
    zero_shift: int = 0
    scales: str = ""
    block: tuple[int, int] = (0, 0)

    @staticmethod
    def of(config: Any) -> Scheme | None:
        """The scheme of a transformers config; None for an unquantized model.

        Raises ModelError for an unsupported one.
        """
        settings = getattr(config, "quantization_config", None)
        if not settings:
            return None
        return Scheme.read(settings if isinstance(settings, dict) else settings.to_dict())

    @staticmethod
    def read(settings: dict[str, Any]) -> Scheme:
        """The scheme in a quantization_config."""
        check(settings, QUANTIZATION, "quantization_config")
        method = settings.get("quant_method", "unknown")
        if method not in READERS:
            raise ModelError(f"the checkpoint is quantized by {method!r}, which is not supported: {CURE}")
        return READERS[method](settings)


def _awq(settings: dict[str, Any]) -> Scheme:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ModelError(
            f"the checkpoint is quantized by AWQ in version {version!r}, only 'gemm' can be read: {CURE}"
        )
    size = _size(settings.get("bits"), settings.get("group_size", 128), (4,))
    return Scheme("awq", frozenset({size}), settings.get("zero_point") is False)


def _gptq(settings: dict[str, Any]) -> Scheme:
    format = settings.get("checkpoint_format") or "gptq"
    if format not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"the checkpoint is quantized by GPTQ in the format {format!r}, "
            f"only 'gptq' and 'gptq_v2' can be read: {CURE}"
        )
    if any(not pattern.startswith("-:") for pattern in settings.get("dynamic") or ()):
        raise ModelError(
            f"the checkpoint is quantized by GPTQ with settings that differ by layer ('dynamic'): {CURE}"
        )
    size = _size(settings.get("bits"), settings.get("group_size", 128), (4, 8))
    return Scheme("gptq", frozenset({size}), settings.get("sym") is not False, int(format == "gptq"))


def _compressed_tensors(settings: dict[str, Any]) -> Scheme:
    """Raise ModelError for other formats than pack-quantized, and for what it cannot hold."""
    format = settings.get("format")
    if format not in ("pack-quantized", *VALUES):
        raise ModelError(f"the checkpoint is in the compressed-tensors format {format!r}: {CURE}")
    if settings.get("transform_config"):
        raise ModelError(
            "the checkpoint's activations must be transformed (transform_config), which is not supported: "
            f"{CURE}"
        )
    groups = settings.get("config_groups") or {}
    if not groups:
        raise ModelError(
            "the checkpoint's quantization_config has no config_groups, which state how its weights are "
            "packed."
        )
    if format in VALUES:
        return _scaled_groups(groups, VALUES[format])
    schemes = [_config_group(name, group or {}) for name, group in groups.items()]
    sizes = frozenset[Size]().union(*(scheme.sizes for scheme in schemes))
    return Scheme("compressed-tensors", sizes, all(scheme.symmetric for scheme in schemes))


def _scaled_groups(groups: dict[str, Any], kind: str) -> Scheme:
    """The scheme of weights beside their scales.  Quantized inputs are not asked for: ours are more exact."""
    blocks = set[tuple[int, int]]()
    for name, group in groups.items():
        weights = (group or {}).get("weights") or {}
        if weights.get("type", "int") != kind or weights.get("num_bits") != 8:
            raise ModelError(f"the weights of {name} of config_groups are not in 8 bits of {kind}: {CURE}")
        if weights.get("block_structure"):
            blocks.add(_block(weights["block_structure"]))
    if len(blocks) > 1:
        raise ModelError(f"the checkpoint has blocks of several sizes, {sorted(blocks)}: {CURE}")
    block = blocks.pop() if blocks else (0, 0)
    sizes = frozenset({Size(8, 0)}) if kind == "int" else frozenset[Size]()
    return Scheme("compressed-tensors", sizes, True, scales="weight_scale", block=block)


def _fp8(settings: dict[str, Any]) -> Scheme:
    if settings.get("fmt", "e4m3") != "e4m3":
        raise ModelError(f"the checkpoint is in fp8 of the format {settings['fmt']!r}: {CURE}")
    if (block := settings.get("weight_block_size")) is None:
        return Scheme("fp8", frozenset(), True, scales="weight_scale")
    return Scheme("fp8", frozenset(), True, scales="weight_scale_inv", block=_block(block))


def _block(given: Any) -> tuple[int, int]:
    """Outputs and inputs of a block, from a list, or from a text such as 128x128 (see `QUANTIZATION`)."""
    sizes = [int(size) for size in given.split("x")] if isinstance(given, str) else given
    if len(sizes) != 2 or not all(is_whole(size, 1, MOST) for size in sizes):
        raise ModelError(f"the blocks of a checkpoint in fp8 must have two sizes, got {given!r}.")
    return sizes[0], sizes[1]


def _config_group(name: str, group: dict[str, Any]) -> Scheme:
    """The scheme of one entry of config_groups."""
    weights = group.get("weights") or {}
    if group.get("input_activations") or weights.get("type", "int") != "int":
        raise ModelError(
            f"the checkpoint quantizes activations, or to something else than integers ({name} of "
            f"config_groups): {CURE}"
        )
    group_size = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
    size = _size(weights.get("num_bits"), group_size, (4, 8))
    return Scheme("compressed-tensors", frozenset({size}), weights.get("symmetric") is not False)


def _size(bits: Any, group: Any, supported: tuple[int, ...]) -> Size:
    if type(bits) is not int or bits not in supported:
        raise ModelError(
            f"the checkpoint is quantized to {bits} bits; supported: {' and '.join(map(str, supported))}."
        )
    if type(group) is not int or (group < 1 and group != -1):
        raise ModelError(
            f"the checkpoint's group_size must be a whole number, or -1 for whole rows, got {group!r}."
        )
    return Size(bits, max(group, 0))


READERS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": lambda settings: Scheme("mxfp4", frozenset({Size(4, 32)}), True),  # of experts alone
}
