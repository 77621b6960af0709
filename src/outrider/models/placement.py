"""Which device computes which layer: one for all, or a GPU for the last ones and the CPU for the rest, as llama.cpp's -ngl has it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.errors import ConfigError


class Placement(NamedTuple):
    """A layer's K/V lies beside its weights.  outer: where the embedding and the head are, and what leaves the decoder."""

    layers: tuple[torch.device, ...]
    outer: torch.device


def place(layers: int, device: torch.device, gpu_layers: int | None, option: str = "gpu_layers") -> Placement:
    """None: all on `device`.  n: the last n layers there, the rest on the CPU; more than there are layers: embedding and head, too."""
    if gpu_layers and device.type == "cpu":
        raise ConfigError(
            f"{option} = {gpu_layers} needs a GPU, and this model's device is 'cpu': name one (cuda, mps), or leave it out."
        )
    if gpu_layers is None or gpu_layers > layers:
        return Placement((device,) * layers, device)
    cpu = torch.device("cpu")
    return Placement((cpu,) * (layers - gpu_layers) + (device,) * gpu_layers, cpu)


def pick_device(name: str, option: str = "device") -> torch.device:
    """`auto` is the GPU where there is one.  Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device  # with its number: cuda and cuda:0 are the same
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"{option} {name!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_gpu_layers(value: object, option: str) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(
            f"{option} must be a whole number of at least 0, or None for all layers on one device, got {value!r}."
        )
