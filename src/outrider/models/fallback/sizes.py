"""Comparison of a config's number of weights with the size of the checkpoint's files."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.weights import Weights
from outrider.errors import ModelError

SLACK = 1 << 22  # weights allowed beyond one per byte of the files


def check_sizes(checkpoint: Checkpoint) -> None:
    """Raise ModelError for a config with far more weights than the files can hold.

    transformers allocates the sizes of the config before it compares them with the files.  The model is
    counted on the meta device, which allocates nothing.
    """
    if not any(path.suffix in (".safetensors", ".bin") for path in checkpoint.folder.iterdir()):
        return  # transformers raises an error that lists the files it looks for
    where = Weights(checkpoint.folder).where
    if checkpoint.spec.layers > len(where):
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {checkpoint.spec.layers:,} layers "
            f"(num_hidden_layers), and the files hold {len(where):,} tensors."
        )
    try:
        with torch.device("meta"):
            loader: Any = AutoModelForCausalLM
            model = loader.from_config(
                copy.deepcopy(checkpoint.config), trust_remote_code=checkpoint.trust_remote_code
            )
    except Exception:  # loading fails in the same way and reports the reason
        return
    held = sum(path.stat().st_size for path in set(where.values()))
    if (wanted := sum(parameter.numel() for parameter in model.parameters())) > held + SLACK:
        raise ModelError(
            f"the config.json of {checkpoint.name!r} asks for {wanted:,} weights, and the files have "
            f"{held:,} bytes: one of its sizes is wrong."
        )
