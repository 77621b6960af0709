"""Training for targets whose decoder differs from Llama's: experts, soft caps of logits, norms from 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hybrids
import oss_files
import pytest
import torch
from helpers import text_logits as engine_logits
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outrider import LLM, ConfigError
from outrider.heads.sample import TargetWeights
from outrider.models.differentiable import text_logits
from outrider.testing import tiny_checkpoint
from outrider.train.methods import method

EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "num_hidden_layers": 4}
QWEN = {**EXPERTS, "moe_intermediate_size": 32}
CASES = {
    "all": ("Qwen3Moe", QWEN, [True, True]),
    "one dense": ("Qwen3Moe", {**QWEN, "mlp_only_layers": [3]}, [True, False]),
    "every second": ("Qwen3Moe", {**QWEN, "decoder_sparse_step": 2}, [False, True]),
    "mixtral": ("Mixtral", EXPERTS, [True, True]),
    "gpt-oss": ("GptOss", {**oss_files.CONFIG, "num_hidden_layers": 4}, [True, True]),
}
PUBLISHED = {
    "Qwen3Moe": "mlp.experts.2.gate_proj.weight",
    "Mixtral": "block_sparse_moe.experts.2.w1.weight",
    "GptOss": "mlp.experts.gate_up_proj",
}
IDS = [(7 * i + 3) % 250 for i in range(24)]


def load(folder: str | Path) -> LLM:
    return LLM(str(folder), dtype="float32", kv_cache_memory_bytes=1 << 24)


def made(llm: LLM, name: str, **given: Any) -> Any:
    kind = method(name)
    options = kind.Options(data=("-",), out="-", **given)
    return kind(options, llm.engine.target, torch.zeros(llm.engine.target.vocabulary))


def check_saved(llm: LLM, trained: Any, folder: Path) -> Any:
    """What is saved computes as the network.  Returns its spec."""
    for own in trained.network.parameters():
        own.data = own.data.bfloat16().float()  # as the file has it
    trained.save(folder)
    drafts = {**trained.speculation(folder, 3), "draft_dtype": "float32"}
    decoder = llm.variant(drafts).engine.drafter.decoder
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        expected = text_logits(trained.network.eval(), ids, torch.arange(len(ids)))
    torch.testing.assert_close(engine_logits(decoder, IDS), expected, rtol=1e-3, atol=1e-3)
    return decoder.spec


@pytest.mark.parametrize("case", CASES)
def test_a_draft_model_of_experts_is_read_as_it_was_trained(case: str, tmp_path: Path) -> None:
    """It has the first and the last of four layers.  A later run begins with it."""
    family, config, sparse = CASES[case]
    llm = load(tiny_checkpoint(tmp_path / "target", family, **config))
    trained = made(llm, "draft_model")
    spec = check_saved(llm, trained, tmp_path / "draft")
    assert list(spec.experts.layers) == sparse
    names = load_file(tmp_path / "draft" / "model.safetensors")
    assert f"model.layers.{sparse.index(True)}.{PUBLISHED[family]}" in names
    theirs: Any = AutoModelForCausalLM
    read = theirs.from_pretrained(tmp_path / "draft", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in trained.network.state_dict().items())
    again = made(llm, "draft_model", init=str(tmp_path / "draft")).network.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in trained.network.state_dict().items())
    with pytest.raises(ConfigError, match=r"is no (model|head) of this shape"):
        made(llm, "draft_model", layers=3, init=str(tmp_path / "draft"))


def test_a_pard_model_of_experts_is_read_as_it_was_trained(tmp_path: Path) -> None:
    llm = load(tiny_checkpoint(tmp_path / "target"))
    draft = tiny_checkpoint(tmp_path / "draft", "Qwen3Moe", **QWEN, mlp_only_layers=[1])
    check_saved(llm, made(llm, "pard", draft=draft), tmp_path / "pard")


@pytest.mark.parametrize("given", [{}, {"hidden": 32, "heads": 2, "kv_heads": 2}])
@pytest.mark.parametrize("name", ["draft_model", "pard"])
def test_a_target_with_recurrent_layers_has_no_draft_model_of_its_family(
    name: str, given: dict[str, Any], tmp_path: Path
) -> None:
    hybrids.write("lfm2", tmp_path)
    llm = load(tmp_path)
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM has recurrent layers, and draft models of such"):
        made(llm, name, **given)
    made(llm, "eagle3")


def test_a_draft_with_recurrent_layers_is_not_adapted(tmp_path: Path) -> None:
    hybrids.write("qwen3.5", tmp_path / "draft")
    llm = load(tiny_checkpoint(tmp_path / "target"))
    with pytest.raises(ConfigError, match="has recurrent layers, and is not trained"):
        made(llm, "pard", draft=str(tmp_path / "draft"))


def test_a_model_of_experts_is_quantized_but_for_its_router(tmp_path: Path) -> None:
    sizes = {**QWEN, "hidden_size": 128, "moe_intermediate_size": 128}
    llm = load(tiny_checkpoint(tmp_path / "target", "Qwen3Moe", **sizes))
    made(llm, "draft_model", quantization="int8").save(tmp_path / "draft")
    names = load_file(tmp_path / "draft" / "model.safetensors")
    assert {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.up_proj.weight_packed"} <= {
        *names
    }
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert "model.layers.0.mlp.gate" in config["quantization_config"]["ignore"]
    llm.variant({"method": "draft_model", "model": str(tmp_path / "draft")})


def test_a_head_learns_from_logits_with_the_soft_cap_of_the_target(tmp_path: Path) -> None:
    """And the lm_head that others begin with is the one before the cap."""
    folder = tiny_checkpoint(tmp_path, "Gemma2", final_logit_softcapping=4.0, initializer_range=0.5)
    model = load(folder).engine.decoder
    outer, x = TargetWeights.of(model), 2 * torch.randn(8, model.spec.hidden)
    logits = model.head_logits(x.clone())
    assert float(logits.abs().max()) > 3.9, "the cap matters"
    torch.testing.assert_close(outer.logits(x), logits, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(outer.lm_head, load_file(tmp_path / "model.safetensors")["lm_head.weight"])


def test_an_adapter_begins_with_the_norm_that_gemma_multiplies_with(tmp_path: Path) -> None:
    llm = load(tiny_checkpoint(tmp_path, "Gemma", num_hidden_layers=3))
    norm = made(llm, "kangaroo").network.norm.weight
    assert torch.equal(norm, llm.engine.decoder.norm) and abs(norm.mean().item() - 1) < 0.3
