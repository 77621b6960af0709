"""Draft models of other kinds that learn from traffic, and those that cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, ConfigError, SamplingParams
from outrider.online.networks import Trainable
from outrider.testing import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("target"))
    return LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Qwen3Moe", {"num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ],
)
def test_experts_are_refused_when_the_model_is_loaded(
    llm: LLM, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    draft = {"method": "draft_model", "model": tiny_checkpoint(tmp_path / "draft", family, **config)}
    llm.variant(draft)
    with pytest.raises(ConfigError, match="is a mixture of experts, which is not trained while serving"):
        llm.variant({**draft, "online": {"path": str(tmp_path / "learned")}})


def test_a_draft_in_fp8_takes_learned_weights_as_they_are(llm: LLM, tmp_path: Path) -> None:
    """Its own were expanded, so there are no bits to keep."""
    folder = Path(tiny_checkpoint(tmp_path, seed=1))
    stored = dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor
        if "_proj" in name:
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = torch.tensor(1.0)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (folder / "config.json").write_text(json.dumps(config))
    drafting = llm.variant({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    drafter = drafting.engine.drafter
    old = drafter.decoder
    weights = Trainable.of(drafter).network.state_dict()
    drafter.adopt({name: tensor.detach().clone() for name, tensor in weights.items()})
    assert drafter.decoder is not old and drafter.decoder.precision.quantization is None
    prompt = {"prompt_token_ids": [3, 4, 5]}
    (plain,), (found,) = llm.generate(prompt, GREEDY), drafting.generate(prompt, GREEDY)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert found.outputs[0].speculation.drafted > 0
