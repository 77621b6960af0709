"""Models that compute otherwise than Llama: transformers' numbers, and no token changed by speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oss_files
import pytest
import torch
from helpers import answer, check_speculation, text_logits, token_prompts, write_adapter
from toys import read

from outrider import LLM, ConfigError, LoRARequest, ModelError, RequestError, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step_input import StepInput
from outrider.models.decoder import Decoder
from outrider.models.selftest import bit_exact
from outrider.testing import check_idle, random_prompts, tiny_checkpoint, use_example, visible_parts

PROMPTS = random_prompts(5, seed=21)
SIZES: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3}
GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 24, "intermediate_size": 100}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", {**SIZES, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen3-moe-with-a-dense-layer": (
        "Qwen3Moe",
        {**SIZES, "moe_intermediate_size": 64, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_experts_per_tok": 2, "sliding_window": 9}),
    "gemma2": (
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "num_hidden_layers": 3},
    ),
    "gemma3": ("Gemma3Text", {**GEMMA, "layer_types": KINDS, "num_hidden_layers": 3}),
    "gpt-oss": ("GptOss", oss_files.CONFIG),
}
SAMPLED = SamplingParams(temperature=0.8, seed=4, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    family, config = FAMILIES[request.param]
    return tiny_checkpoint(tmp_path_factory.mktemp("experts"), family, **config)


@pytest.mark.parametrize("backend", ["", "torch"])
def test_logits_and_states_are_those_of_transformers(
    model: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    decoder, ids = LLM(model, dtype="float32").engine.decoder, [(i * i * 7 + 3) % 300 for i in range(60)]
    assert isinstance(decoder, Decoder)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(text_logits(decoder, ids), expected.logits[0], rtol=1e-3, atol=1e-3)
    for layer, state in read(decoder, ids, range(3)).states.items():
        torch.testing.assert_close(state, expected.hidden_states[layer][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["", "torch"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(
    model: str, dtype: str, quantization: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    decoder = LLM(model, dtype=dtype, quantization=quantization, max_model_len=64).engine.decoder
    assert decoder.exact and bit_exact(decoder)


def test_one_call_has_the_bits_of_single_ones(model: str) -> None:
    """And a chain that one call drafts is the text that steps would emit."""
    decoder, ids = LLM(model).engine.decoder, PROMPTS[0]
    step = StepInput.of_ids(ids)
    step.logits_rows = list(range(len(ids)))
    together = decoder.forward_step(step, decoder.pool(len(ids)), {})
    assert torch.equal(together, text_logits(decoder, ids))
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 4}
    fast = LLM(model, speculative_config=config)
    output = answer(fast, ids, SAMPLED)
    assert visible_parts(output.outputs) == visible_parts(answer(LLM(model), ids, SAMPLED).outputs)
    assert output.speculation.accepted > 12


def test_speculation_changes_nothing(model: str) -> None:
    check_speculation(model, PROMPTS)


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"dtype": "bfloat16"}], ids=str)
def test_every_kind_of_drafter_leaves_the_texts(model: str, options: dict[str, Any]) -> None:
    """Layers of the target itself, a head on its inner states, a small model, and an adversarial tree."""
    llm = LLM(model, max_num_seqs=5, **options)
    texts = []
    for method in (None, "layerskip", "eagle3", "medusa", "draft_model"):
        if method is None:
            llm.use(None)
        else:
            use_example(llm, method)
        outputs = llm.generate(token_prompts(PROMPTS), SAMPLED)
        texts.append([visible_parts(output.outputs) for output in outputs])
        assert (method is None) == (sum(output.speculation.drafted for output in outputs) == 0)
        check_idle(llm)
    assert all(text == texts[0] for text in texts)


def test_an_adapter_of_the_attention_is_used_and_one_of_the_experts_refused(
    tmp_path: Path,
) -> None:
    family, config = FAMILIES["qwen3-moe-with-a-dense-layer"]
    model = tiny_checkpoint(tmp_path / "model", family, **config)
    write_adapter(tmp_path / "attention", model, 1, "q k v o")
    write_adapter(tmp_path / "experts", model, 2, "gate")
    llm, params = LLM(model, enable_lora=True), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    adapted = llm.generate(prompt, params, lora_request=LoRARequest("a", 1, str(tmp_path / "attention")))
    assert adapted[0].outputs[0].token_ids != answer(llm, PROMPTS[0], params).outputs[0].token_ids
    with pytest.raises(RequestError, match="projections of the layers"):
        llm.generate(prompt, params, lora_request=LoRARequest("b", 2, str(tmp_path / "experts")))


def test_an_adapter_of_an_mlp_is_refused_where_experts_are(tmp_path: Path) -> None:
    """Its names are those of a dense model's layers."""
    family, config = FAMILIES["qwen3-moe"]
    model = tiny_checkpoint(tmp_path / "model", family, **config)
    dense = tiny_checkpoint(tmp_path / "dense", "Qwen3", num_hidden_layers=3)
    write_adapter(tmp_path / "mlp", dense, 1, "down")
    llm = LLM(model, enable_lora=True)
    with pytest.raises(RequestError, match="has experts in place of an MLP"):
        llm.generate(
            {"prompt_token_ids": PROMPTS[0]}, lora_request=LoRARequest("a", 1, str(tmp_path / "mlp"))
        )


def test_what_experts_do_not_support_is_refused(tmp_path: Path) -> None:
    family, config = FAMILIES["qwen3-moe"]
    model = tiny_checkpoint(tmp_path, family, **config)
    checkpoint = Checkpoint.open(model)
    with pytest.raises(ConfigError, match=r"cannot be grown: .* differs from Llama"):
        checkpoint.grown(4, 200)
    with pytest.raises(ConfigError, match="tensor_parallel_size is not supported for Qwen3Moe"):
        LLM(model, tensor_parallel_size=2)


def test_more_experts_than_there_are_cannot_be_chosen(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "Mixtral", **SIZES)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_experts_per_tok": 3', '"num_experts_per_tok": 9'))
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        LLM(model)
