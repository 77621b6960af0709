"""Devices and dtype of a model: all layers on one device, or the last ones on a GPU (llama.cpp's -ngl)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.backends.select import fast_bfloat16
from outrider.cache.pool import kv_dtype
from outrider.errors import ConfigError, first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Precision(NamedTuple):
    """How a model's numbers are stored and computed.  All but `dtype` as in `EngineOptions`."""

    dtype: torch.dtype
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    activations: str = "auto"

    @property
    def kv_dtype(self) -> torch.dtype:
        return kv_dtype(self.kv_cache_dtype, self.dtype)


class Placement(NamedTuple):
    """Devices: of every layer's weights and K/V, and of embedding, head and logits."""

    layers: tuple[torch.device, ...]
    outer: torch.device


def place(layers: int, device: torch.device, gpu_layers: int | None, option: str = "gpu_layers") -> Placement:
    """Put the last `gpu_layers` layers on `device` and the rest on the CPU; None: all on `device`.

    Embedding and head are on `device` if gpu_layers exceeds the number of layers.
    """
    if gpu_layers and device.type == "cpu":
        raise ConfigError(
            f"{option} = {gpu_layers} needs a GPU, and this model's device is 'cpu': "
            "name one (cuda, mps), or leave it out."
        )
    if gpu_layers is None or gpu_layers > layers:
        return Placement((device,) * layers, device)
    cpu = torch.device("cpu")
    return Placement((cpu,) * (layers - gpu_layers) + (device,) * gpu_layers, cpu)


def device_name(name: str) -> str:
    """The name of a device, of `auto` that of the GPU if there is one.  Makes no CUDA context."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def pick_device(name: str, option: str = "device") -> torch.device:
    """`auto` is the GPU if there is one.  Raises ConfigError for a device that does not exist."""
    name = device_name(name)
    try:
        return torch.empty(1, device=name).device  # with its number: cuda and cuda:0 are the same
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"{option} {name!r} cannot be used: {first_line(error)}") from error


def pick_dtype(
    name: str, stored: torch.dtype | None, device: torch.device, option: str = "dtype"
) -> torch.dtype:
    """`auto` is bfloat16 if the device is fast at it and the checkpoint is not float32, else float32.

    stored: the dtype of the checkpoint.  Raises ConfigError for an unknown name.
    """
    if name == "auto":
        narrow = stored not in (None, torch.float32) and fast_bfloat16(device)
        return torch.bfloat16 if narrow else torch.float32
    if not isinstance(name, str) or name not in DTYPES:
        raise ConfigError(f"{option} must be auto or one of {', '.join(DTYPES)}, got {name!r}.")
    return DTYPES[name]
