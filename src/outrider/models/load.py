"""Choice between the lean decoder and transformers' own code for a checkpoint."""

from __future__ import annotations

import torch

from outrider.checkpoints.gguf.names import FAMILIES as GGUF_FAMILIES
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import ATTENTION_ONLY, FAMILIES, Spec, listed
from outrider.errors import ConfigError, ModelError
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.placement import Placement, Precision


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
    if not needs_fallback(checkpoint, precision.quantization, split):
        return Decoder(checkpoint, precision, device, max_len, where)
    from outrider.models.fallback.model import Fallback

    return Fallback(checkpoint, precision, device, max_len)


def needs_fallback(checkpoint: Checkpoint, quantization: str | None = None, split: bool = False) -> bool:
    """Whether a checkpoint needs transformers' modelling code.

    Raises ConfigError or ModelError for options that only the lean decoder supports.
    """
    spec, name = checkpoint.spec, checkpoint.spec.architecture
    if isinstance(spec, Spec):
        if split and spec.recurrent is not None:
            raise ConfigError(
                f"gpu_layers is not for {name}, which has recurrent layers and runs on one device: leave it "
                "out."
            )
        return False
    supported = listed([*FAMILIES], name)
    if split:
        several = listed(ATTENTION_ONLY, name)
        raise ConfigError(f"gpu_layers is for {several}; {name} runs on one device: leave it out.")
    if quantization is not None:
        raise ConfigError(
            f"quantization {quantization!r} is for {supported}; {name} runs in its own numbers: leave it out."
        )
    if checkpoint.gguf:
        supported = listed([f"{family}ForCausalLM" for family in GGUF_FAMILIES.values()], name)
        raise ModelError(f"{name} cannot be run from a GGUF file; only {supported} can: load a folder.")
    return True
