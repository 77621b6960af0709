"""Our RoPE table against transformers' module of Llama, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider import ConfigError, ModelError
from outrider.models.decoder import rotations
from outrider.models.rope import fix_rope

FACTORS = {"short_factor": [1.0 + i / 8 for i in range(12)], "long_factor": [2.0 + i for i in range(12)]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {**FACTORS, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def config_of(kind: str, **given: Any) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 5e5, **given}
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "head_dim": 24}
    return LlamaConfig(**sizes, max_position_embeddings=128, rope_parameters=rope)


@pytest.mark.parametrize("max_len", [50, 64, 128, 300])
@pytest.mark.parametrize("kind", ROPES)
def test_the_table_is_that_of_transformers(kind: str, max_len: int) -> None:
    module = LlamaRotaryEmbedding(config_of(kind, **ROPES[kind]))
    fix_rope(module, max_len)
    cos, sin = module(torch.empty(0), torch.arange(max_len)[None])
    expected = torch.cat([cos[0, :, :12], sin[0, :, :12]], dim=-1)
    assert torch.equal(rotations(config_of(kind, **ROPES[kind]), max_len), expected)


def test_the_longest_text_decides() -> None:
    for kind in ("dynamic", "longrope"):
        short, long = (rotations(config_of(kind, **ROPES[kind]), max_len) for max_len in (64, 300))
        assert not torch.equal(short, long[:64])


def test_unknown_and_incomplete_scalings_are_refused() -> None:
    config = config_of("default")
    config.rope_parameters["rope_type"] = "axial"
    with pytest.raises(ConfigError, match="'axial'"):
        rotations(config, 64)
    config.rope_parameters["rope_type"] = "linear"
    with pytest.raises(ModelError, match="factor"):
        rotations(config, 64)
