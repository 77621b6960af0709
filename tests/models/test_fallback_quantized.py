"""Quantized checkpoints of families that run in transformers' own code: expanded while loading."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path

import pytest
from families import FAMILIES
from packed_files import FORMATS
from safetensors.torch import load_file, save_file

from outrider import LLM, ModelError, SamplingParams
from outrider.testing import random_prompts, tiny_checkpoint


def quantized(source: Path, folder: Path, name: str) -> tuple[str, str]:
    """The folders of a quantized copy, and of one with the same weights in float32."""
    rng = random.Random(name)
    packed, plain = (Path(shutil.copytree(source, folder / kind)) for kind in ("packed", "plain"))
    few, whole = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for full in [n for n in whole if n.endswith("_proj.weight") and whole[n].shape[1] % 32 == 0]:
        layer, whole[full] = FORMATS[name][0](*whole[full].shape, rng)
        del few[full]
        few |= {f"{full.removesuffix('.weight')}.{key}": tensor for key, tensor in layer.items()}
    save_file(few, packed / "model.safetensors", {"format": "pt"})
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": FORMATS[name][1]}
    (packed / "config.json").write_text(json.dumps(config))
    return str(packed), str(plain)


@pytest.mark.parametrize("family", ["olmo2", "deepseek-v3"])
@pytest.mark.parametrize("name", ["awq", "gptq-8", "fp8-blocks"])
def test_text_is_that_of_the_expanded_weights(
    tmp_path: Path, family: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    architecture, config = FAMILIES[family]
    source = Path(tiny_checkpoint(tmp_path / "source", architecture, **{**config, "head_dim": 8}))
    packed, plain = quantized(source, tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(2)]
    texts = []
    for folder in (packed, plain):
        with caplog.at_level(logging.WARNING, "outrider"):
            llm = LLM(folder, dtype="float32", speculative_config={"method": "ngram"})
        texts.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]
    assert "expanded to 0.0 GiB" in caplog.text


def test_weights_in_few_bits_without_scales_are_refused(tmp_path: Path) -> None:
    architecture, config = FAMILIES["olmo2"]
    source = Path(tiny_checkpoint(tmp_path / "source", architecture, **config))
    packed, _ = quantized(source, tmp_path, "fp8-blocks")
    path = Path(packed) / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj.weight is torch.float8_e4m3fn, without scales"):
        LLM(packed)
