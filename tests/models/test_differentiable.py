"""Modules of transformers take their weights from the files of their family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.errors import ModelError
from outrider.models.differentiable import load_weights, new_module
from outrider.testing import tiny_checkpoint


def test_weights_that_a_file_names_otherwise_can_be_given(tmp_path: Path) -> None:
    """GPT-NeoX files have `embed_out`, where the module has `lm_head`."""
    checkpoint = LLM(tiny_checkpoint(tmp_path, "GPTNeoX"), dtype="float32", seed=0).engine.checkpoint
    module = new_module(checkpoint.config)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_weights(module, checkpoint)
    weight = torch.ones_like(module.get_output_embeddings().weight)
    load_weights(module, checkpoint, known={"lm_head.weight": weight})
    assert torch.equal(module.get_output_embeddings().weight, weight)
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    own = dict(module.named_parameters())[name]
    assert torch.equal(own, checkpoint.tensors().get(name, *own.shape))
