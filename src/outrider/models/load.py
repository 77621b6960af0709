"""Choice between the lean decoder and transformers' own code for a checkpoint."""

from __future__ import annotations

import torch

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import FAMILIES, Spec
from outrider.errors import ConfigError, ModelError
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.placement import Placement, Precision

CPU = torch.device("cpu")


def load(
    checkpoint: Checkpoint,
    precision: Precision,
    device: torch.device,
    max_len: int,
    where: Placement | None = None,
) -> Model:
    """Load a model.

    where: placement of the layers, by default all on `device`.
    Raises ModelError for tensors that are missing or misshapen, and for unsupported checkpoints.
    """
    split = where is not None and set(where.layers) != {device}
    if not needs_fallback(checkpoint, precision.quantization, split, device):
        return Decoder(checkpoint, precision, device, max_len, where)
    from outrider.models.fallback.model import Fallback

    return Fallback(checkpoint, precision, device, max_len)


def needs_fallback(
    checkpoint: Checkpoint,
    quantization: str | None = None,
    split: bool = False,
    device: torch.device = CPU,
) -> bool:
    """Whether a checkpoint needs transformers' modelling code, as some do outside the CPU.

    Raises ConfigError or ModelError for options that only the lean decoder supports.
    """
    spec, name = checkpoint.spec, checkpoint.spec.architecture
    if isinstance(spec, Spec):
        if device.type == "cpu" or not spec.only_on_cpu:
            return False
        name = f"{name} on {device.type}"
    if quantization is not None:
        raise ConfigError(
            f"quantization {quantization!r} is for {', '.join(FAMILIES)}; "
            f"{name} runs in its own numbers: leave it out."
        )
    if split:
        raise ConfigError(
            f"gpu_layers is for {', '.join(FAMILIES)}; {name} runs on one device: leave it out."
        )
    if checkpoint.scheme or checkpoint.gguf:
        raise ModelError(
            f"{name} cannot be run from a quantized checkpoint; "
            f"only {', '.join(FAMILIES)} can: load an unquantized one."
        )
    return True
