"""Comparison of the weights that a config asks for with the files of its checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.weights import Weights
from outrider.errors import ModelError

SLACK = 1 << 22  # weights that a model may have beyond a byte each in its files


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raises ModelError for a config that asks for far more weights than the files hold.

    transformers allocates what the config asks for, also where the files have another shape.  On the meta
    device the model costs nothing.
    """
    if not any(path.suffix in (".safetensors", ".bin") for path in checkpoint.folder.iterdir()):
        return  # transformers says which files it looks for
    where = Weights(checkpoint.folder).where
    if checkpoint.spec.layers > len(where):
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {checkpoint.spec.layers:,} layers "
            "(num_hidden_layers), and the files hold "
            f"{len(where):,} tensors."
        )
    try:
        with torch.device("meta"):
            loader: Any = AutoModelForCausalLM
            model = loader.from_config(
                copy.deepcopy(checkpoint.config), trust_remote_code=checkpoint.trust_remote_code
            )
    except Exception:  # loading fails in the same way, and gives the reason
        return
    held = sum(path.stat().st_size for path in set(where.values()))
    if (wanted := sum(parameter.numel() for parameter in model.parameters())) > held + SLACK:
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {wanted:,} weights, and the files have "
            f"{held:,} bytes: one of its sizes "
            "is wrong."
        )
