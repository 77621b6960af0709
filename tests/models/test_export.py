"""Exported checkpoints in few bits equal the same weights quantized while loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oss_files
import pytest
import torch
from helpers import text_logits
from safetensors.torch import load_file
from torch import Tensor

from outrider import LLM, ConfigError, ModelError
from outrider.checkpoints.quantize import quantize
from outrider.config import EngineOptions
from outrider.core.quantized import QuantizedWeight
from outrider.inspect.card import card_of
from outrider.models.export import packed, write
from outrider.testing import random_prompts, tiny_checkpoint

PROMPT = random_prompts(1, seed=3)[0]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Llama, tied": {"tie_word_embeddings": True}, "Qwen2": {}, "Qwen3": {},
    "Mistral": {"sliding_window": 8}, "Llama, odd": {"intermediate_size": 88},
    "Qwen3Moe": {**EXPERTS, "moe_intermediate_size": 64}, "Mixtral": EXPERTS,
    "Qwen3_5Text": {"layer_types": ["linear_attention", "full_attention"]},
}  # fmt: skip


def logits(model: str | Path, **options: Any) -> Tensor:
    """float32 [len(PROMPT), V]."""
    return text_logits(LLM(str(model), **options).engine.decoder, PROMPT)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_weights_quantized_while_loading(family: str, bits: int, tmp_path: Path) -> None:
    """Bit for bit; in the odd one some inputs are no whole groups, and stay as they are."""
    source = tiny_checkpoint(tmp_path / "source", family.partition(",")[0], **FAMILIES[family])
    size = write(source, tmp_path / "few", bits)
    expected = logits(source, quantization=f"int{bits}")
    assert torch.equal(logits(tmp_path / "few"), expected)
    whole = (tmp_path / "source" / "model.safetensors").stat().st_size
    assert size < (0.4 if bits == 8 else 0.35) * whole and not torch.equal(logits(source), expected)
    config = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    odd = [name for name in config["ignore"] if "down_proj" in name]
    assert bool(odd) == ("odd" in family)
    assert (
        card_of(EngineOptions(str(tmp_path / "few"))).parameters == card_of(EngineOptions(source)).parameters
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("size", "dtype"), [(0.05, torch.float16), (1e-6, torch.float32), (1e9, torch.float32)]
)
def test_scales_are_stored_in_half_precision_where_that_is_exact(
    bits: int, size: float, dtype: torch.dtype
) -> None:
    """The dequantized weights are those of `quantize`, and as close to the weights as their bits allow."""
    matrix = size * torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    stored = packed([("a.weight", matrix)], bits)["a.weight_scale"]
    weight = quantize(matrix, bits)
    assert isinstance(weight, QuantizedWeight) and stored.dtype == dtype
    assert torch.equal(stored.float(), weight.scales)
    steps = weight.scales.abs().repeat_interleave(32, dim=1)
    assert float(((weight.dense() - matrix).abs() / steps).max()) < (0.55 if bits == 8 else 2)


def test_shards_stay_shards(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    source = tiny_checkpoint(tmp_path / "whole")
    LlamaForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "source", max_shard_size="100KB")
    write(str(tmp_path / "source"), tmp_path / "few", 8)
    assert len(list((tmp_path / "few").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "few"), logits(source, quantization="int8"))


def test_back_in_bfloat16_transformers_reads_it(tmp_path: Path) -> None:
    """Its logits are those of the numbers in few bits, but for what bfloat16 rounds."""
    from transformers import LlamaForCausalLM

    source = tiny_checkpoint(tmp_path / "source")
    few, back = tmp_path / "few", tmp_path / "back"
    write(source, few, 8)
    write(str(few), back, 16)
    theirs = LlamaForCausalLM.from_pretrained(back, dtype=torch.float32)
    assert theirs.dtype == torch.float32 and "quantization_config" not in json.loads(
        (back / "config.json").read_text()
    )
    assert {tensor.dtype for tensor in load_file(back / "model.safetensors").values()} == {torch.bfloat16}
    with torch.inference_mode():
        output = theirs(torch.tensor([PROMPT])).logits[0]
    assert torch.allclose(output, logits(back, dtype="float32"), atol=2e-3)
    assert (output - logits(few)).abs().mean() < 0.05 * output.std()
    write(str(few), tmp_path / "exact", 32)
    stored, whole = (load_file(Path(folder) / "model.safetensors") for folder in (tmp_path / "exact", source))
    assert stored.keys() == whole.keys()
    for name, tensor in whole.items():
        expected = quantize(tensor, 8) if tensor.dim() == 2 else tensor
        assert torch.equal(
            stored[name], expected.dense() if isinstance(expected, QuantizedWeight) else expected
        )


def test_joined_experts_are_refused(tmp_path: Path) -> None:
    source = oss_files.checkpoint(tmp_path / "source")
    with pytest.raises(ModelError, match=r"experts of .*source' \(GptOssForCausalLM\) cannot be written"):
        write(source, tmp_path / "out", 8)
    assert not (tmp_path / "out").exists()


def test_unsupported_sources_and_bits_are_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    write(source, tmp_path / "few", 8)
    with pytest.raises(ConfigError, match="bits must be one of 8, 4, 16, 32, got 5"):
        write(source, tmp_path / "new", 5)
    with pytest.raises(ConfigError, match="is not empty"):
        write(source, tmp_path / "few", 8)
    with pytest.raises(ModelError, match="quantized already: write it with 16 bits first"):
        write(str(tmp_path / "few"), tmp_path / "new", 4)
    other = tiny_checkpoint(tmp_path / "gemma", "GPTNeoX")
    with pytest.raises(ModelError, match="cannot be run from few bits"):
        write(other, tmp_path / "new", 8)
    assert not (tmp_path / "new").exists()
