"""Config files of hybrids: keys that transformers ignores, values and options that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_cases import chain, lean, prompts
from hybrids import write

from outrider import LLM
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import HYBRID_FAMILIES
from outrider.errors import ConfigError, ModelError
from outrider.models.load import needs_fallback
from outrider.testing import bare_checkpoint


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@torch.inference_mode()
@pytest.mark.parametrize(
    "keys", [{"norm_topk_prob": False}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]
)
def test_routing_keys_mean_nothing_in_qwen3_5(keys: dict[str, Any], tmp_path: Path) -> None:
    """Every layer has experts, whose weights sum to 1."""
    theirs, text = write("qwen3.5-moe", tmp_path), prompts()[-1]
    change(tmp_path, **keys)
    ours = lean(tmp_path, torch.float32)
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    assert (chain(ours, ours.pool(64), 0, text) - expected).abs().max() < 2e-3 * expected.std()


@torch.inference_mode()
@pytest.mark.parametrize(
    "keys", [{"norm_topk_prob": False}, {"mlp_only_layers": [0], "decoder_sparse_step": 1}]
)
def test_routing_keys_of_qwen3_next(keys: dict[str, Any], tmp_path: Path) -> None:
    theirs, text = write("qwen3-next", tmp_path, **keys), prompts()[-1]
    ours = lean(tmp_path, torch.float32)
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    assert (chain(ours, ours.pool(64), 0, text) - expected).abs().max() < 2e-3 * expected.std()


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
@pytest.mark.parametrize("value", [None, 0, "half"])
def test_a_rotated_share_that_is_no_share(family: str, value: Any, tmp_path: Path) -> None:
    write(family, tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": value}
    change(tmp_path, rope_parameters=rope)
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3-next"])
@pytest.mark.parametrize("kind", ["sliding_attention", "conv", "hybrid"])
def test_kinds_of_layers_that_the_family_does_not_have(family: str, kind: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    change(tmp_path, layer_types=["linear_attention", "full_attention", kind, "full_attention"])
    with pytest.raises(ModelError, match=f"layers of the kind {kind}"):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2"])
def test_a_refusal_does_not_list_the_refused_family(family: str, tmp_path: Path) -> None:
    folder, drafts, learned = str(tmp_path), {"method": "draft_model", "model": str(tmp_path)}, tmp_path / "x"
    write(family, tmp_path)
    checkpoint, llm = Checkpoint.open(folder), LLM(folder, max_model_len=64)
    refused: list[Callable[[], Any]] = [
        lambda: LLM(folder, max_model_len=64, enable_lora=True),
        lambda: llm.use({"method": "layerskip"}),
        lambda: llm.use({**drafts, "online": {"path": str(learned)}}),
        lambda: needs_fallback(checkpoint, split=True),
    ]
    for attempt in refused:
        with pytest.raises(ConfigError) as error:
            attempt()
        for name in {*HYBRID_FAMILIES, checkpoint.spec.architecture}:
            assert str(error.value).count(name) <= (name == checkpoint.spec.architecture)


def test_a_refusal_does_not_list_the_family_of_an_unusual_model(tmp_path: Path) -> None:
    """Of a family that takes adapters, but in transformers' own code."""
    folder = bare_checkpoint(tmp_path, "Llama", hidden_act="gelu")
    for option in ({"enable_lora": True}, {"quantization": "int8"}):
        with pytest.raises(ConfigError) as error:
            LLM(str(folder), max_model_len=64, **option)
        assert str(error.value).count("LlamaForCausalLM") == 1
