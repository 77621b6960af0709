"""The language model of a checkpoint that also reads images, and other names of tensors.

The reference is transformers' own model of the whole checkpoint.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_cases import needs_c
from helpers import check_speculation, transformers_tokens
from safetensors.torch import load_file, save_file

from outrider import LLM, ModelError, SamplingParams
from outrider.checkpoints.names import Prefixes, own_names
from outrider.checkpoints.text_part import text_part
from outrider.config import EngineOptions
from outrider.inspect.card import card_of
from outrider.models import export
from outrider.models.fallback.model import Fallback
from outrider.testing import random_model
from outrider.testing.checkpoints import TINY

NEW = 20
TEXT: dict[str, Any] = {**TINY, "head_dim": 16, "initializer_range": 0.25, "pad_token_id": 0}
TEXT |= {"eos_token_id": None, "bos_token_id": None}
EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES: dict[str, Any] = {"depth": 1, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 64}
THREE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
IMAGE = {"image_token_index": 299}
IMAGE_ID = {"image_token_id": 299, "video_token_id": 298, "vision_start_token_id": 297}
# model type -> text part, vision part, keys of the whole
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, {**EYE, "model_type": "clip_vision_model"}, IMAGE),
    "mistral3": ({"model_type": "mistral"}, {**EYE, "model_type": "pixtral", "head_dim": 16}, IMAGE),
    "qwen2_5_vl": (THREE, {**PATCHES, "intermediate_size": 48}, IMAGE_ID),
    "qwen3_vl": (
        THREE,
        {**PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        IMAGE_ID,
    ),
    "qwen3_5": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
        },
        {**PATCHES, "num_position_embeddings": 16},
        IMAGE_ID,
    ),
    "idefics3": ({"model_type": "llama"}, EYE, {"image_token_id": 299}),
    "gemma3": (
        {"num_hidden_layers": 3, "sliding_window": 11, "query_pre_attn_scalar": 24, "intermediate_size": 100},
        EYE,
        IMAGE,
    ),
    "gemma4": (
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "sliding_window": 11,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "num_kv_shared_layers": 2,
        },
        {**EYE, "head_dim": 16, "num_key_value_heads": 2},
        {"image_token_id": 299},
    ),
    "llama4": (
        {"num_local_experts": 4, "intermediate_size_mlp": 80, "num_hidden_layers": 4},
        {**EYE, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32},
        IMAGE,
    ),
}
LEAN = ("llava", "mistral3", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "idefics3")


def write(kind: str, folder: Path, tied: bool | None = None) -> Any:
    """Save a random checkpoint; return the model that transformers reads from it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text, eye, whole = WHOLE[kind]
    config = CONFIG_MAPPING[kind](text_config={**TEXT, **text}, vision_config=eye, **whole)
    if tied is not None:
        config.tie_word_embeddings = tied
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").to(torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    found = auto.from_pretrained(folder, attn_implementation="eager").eval()
    return found.language_model if kind == "llama4" else found  # the whole one fails without an image


def prompts(lengths: tuple[int, ...] = (5, 30)) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 290) for _ in range(length)] for length in lengths]


def text_of(folder: Path, **engine: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    llm = LLM(str(folder), max_model_len=120, **engine)
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), params)]


def theirs(model: Any) -> list[list[int]]:
    return [transformers_tokens(model, [prompt], NEW)[0] for prompt in prompts()]


@pytest.mark.parametrize("kind", WHOLE)
def test_probabilities_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    model, (prompt,) = write(kind, tmp_path), prompts((60,))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    expected = logits.log_softmax(-1)[range(59), prompt[1:]]
    llm = LLM(str(tmp_path), max_model_len=120)
    output = llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    found = [at[token].logprob for at, token in zip(output.prompt_logprobs, prompt) if at is not None]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=2e-3)
    assert isinstance(llm.engine.decoder, Fallback) == (kind not in LEAN)


def test_a_text_part_keeps_its_rope_scaling() -> None:
    from transformers import CONFIG_MAPPING

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    rope = {**yarn, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    text = {**TEXT, "rope_parameters": rope, "max_position_embeddings": 256}
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=PATCHES, **IMAGE_ID)
    part = text_part(config, {}, ["lm_head.weight"])
    assert part.model_type == "qwen2" and dict(part.rope_parameters) == yarn


@pytest.mark.parametrize("tied", [True, False])
def test_the_files_say_whether_the_head_is_the_embedding(tied: bool, tmp_path: Path) -> None:
    """Of Mistral 3 the whole config says it, and that of its text part says the opposite."""
    expected = theirs(write("mistral3", tmp_path, tied))
    assert tied or all(len(set(text)) > 4 for text in expected)
    assert any("lm_head" in name for name in load_file(tmp_path / "model.safetensors")) is not tied
    assert text_of(tmp_path) == expected


@needs_c
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma4"])
def test_speculation_changes_nothing(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    check_speculation(str(tmp_path), prompts())


def test_end_and_dtype_of_the_whole_config_hold_for_the_text(tmp_path: Path) -> None:
    write("llava", tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"eos_token_id": [7, 9], "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = LLM(str(tmp_path), dtype="float32").engine.checkpoint
    assert checkpoint.ending == {7, 9} and checkpoint.stored_dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llava", "gemma4"])
def test_the_card_counts_the_language_model_alone(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    card = card_of(EngineOptions(str(tmp_path)))
    tensors = load_file(tmp_path / "model.safetensors")
    own = [tensor.numel() for name, tensor in tensors.items() if "language_model" in name]
    assert card.refused is None and card.parameters == sum(own) < sum(map(torch.numel, tensors.values()))


def test_a_quantized_copy_has_the_text_part_alone(tmp_path: Path) -> None:
    write("llava", tmp_path / "whole")
    export.write(str(tmp_path / "whole"), tmp_path / "copy", 8)
    names = load_file(tmp_path / "copy" / "model.safetensors")
    assert all(name.startswith(("model.", "lm_head.")) for name in names)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert text_of(tmp_path / "copy") == text_of(tmp_path / "whole", quantization="int8")


def test_other_parts_without_a_decoder_of_their_own_are_refused(tmp_path: Path) -> None:
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    config = MllamaConfig(
        text_config={**TINY, "cross_attention_layers": [1], "pad_token_id": 0},
        vision_config=EYE | {"model_type": "mllama_vision_model"},
    )
    MllamaForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="mllama_text_model"):
        LLM(str(tmp_path))


# ---- names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.embed_tokens.weight", "model.norm.weight", "visual.norm.weight"], Prefixes()),
        (["embed_tokens.weight", "norm.weight"], Prefixes("", "")),
        (
            ["a.model.embed_tokens.weight", "a.model.norm.weight", "a.lm_head.weight", "b.lm_head.weight"],
            Prefixes("a.model.", "a."),
        ),
        (
            ["model.a.embed_tokens.weight_packed", "model.a.norm.weight", "lm_head.weight_packed"],
            Prefixes("model.a.", ""),
        ),
        (["transformer.wte.weight"], Prefixes()),
    ],
)
def test_prefixes_of_files(names: list[str], expected: Prefixes) -> None:
    assert Prefixes.of(names) == expected


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_head_beside_a_body_without_a_prefix_of_its_own(prefix: str) -> None:
    """The head's name begins as those of the body do."""
    usual = ["embed_tokens.weight", "norm.weight", "layers.0.mlp.up_proj.weight"]
    names = own_names([prefix + name for name in [*usual, "lm_head.weight"]])
    assert names == {
        **{f"model.{name}": prefix + name for name in usual},
        "lm_head.weight": f"{prefix}lm_head.weight",
    }


def test_two_language_models_in_one_checkpoint_are_refused() -> None:
    names = [f"{part}.{name}.weight" for part in ("a", "b") for name in ("embed_tokens", "norm")]
    with pytest.raises(ModelError, match="several language models"):
        own_names(names)


def test_exaone_has_the_names_of_gpt(tmp_path: Path) -> None:
    """transformers writes them as they are published."""
    model = random_model("Exaone", {**TEXT, "num_hidden_layers": 3})
    model.save_pretrained(tmp_path)
    assert "transformer.h.2.attn.attention.out_proj.weight" in load_file(tmp_path / "model.safetensors")
    expected = theirs(model)
    assert all(len(set(text)) > 4 for text in expected), "texts that repeat a token are not worth comparing"
    assert text_of(tmp_path) == expected


def test_a_copy_of_exaone_is_not_read_by_code_that_knows_other_names(tmp_path: Path) -> None:
    """It has Llama's names, which transformers' own Exaone reads, and the published code does not."""
    from transformers import AutoModelForCausalLM

    model = random_model("Exaone", {**TEXT, "num_hidden_layers": 3})
    model.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"}
    path.write_text(json.dumps(config))
    export.write(str(tmp_path / "source"), tmp_path / "copy", 32)
    assert "auto_map" not in json.loads((tmp_path / "copy" / "config.json").read_text())
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", trust_remote_code=True)
    assert theirs(found.eval()) == theirs(model)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write("llava", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        LLM(str(tmp_path))
