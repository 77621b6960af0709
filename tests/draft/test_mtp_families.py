"""Prediction layers with experts, compressed attention, windows or gates: those of transformers' own code."""

from __future__ import annotations

import json
import random
import re
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES as OF_TRANSFORMERS
from families import LATENT, NEW
from hybrids import HYBRIDS
from packed_files import FORMATS
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.config import EngineOptions
from outrider.core.step_input import StepInput
from outrider.draft.mtp import Mtp
from outrider.errors import ModelError
from outrider.inspect.card import card_of
from outrider.testing import tiny_checkpoint

HIDDEN, LAYERS = 64, 2
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gates": HYBRIDS["qwen3-next"],
    "gates-dense": HYBRIDS["qwen3.5"],
    "experts": OF_TRANSFORMERS["glm4-moe"],
    "compressed": ("DeepseekV3", {**LATENT, "head_dim": LATENT["qk_rope_head_dim"]}),
    "windows": (
        "Mellum",
        {
            **NEW,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_mtp_layers": 1,
        },
    ),
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


def with_layer(tmp_path: Path, family: str, config: dict[str, Any], qwen: bool) -> Path:
    """A checkpoint whose last layer became a prediction layer behind the others, under published names."""
    longer = {**config, "num_hidden_layers": LAYERS + 1}
    if types := config.get("layer_types"):
        longer["layer_types"] = [*types[:LAYERS], types[LAYERS - 1]]
    folder = Path(tiny_checkpoint(tmp_path, family, **longer))
    tensors, at = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS}."
    torch.manual_seed(1)
    shapes = {
        "enorm": (HIDDEN,),
        "hnorm": (HIDDEN,),
        "eh_proj": (HIDDEN, 2 * HIDDEN),
        "shared_head.norm": (HIDDEN,),
    }
    for name, shape in shapes.items():
        tensors[f"{QWEN[name] if qwen else at + name}.weight"] = torch.randn(shape) * 0.2 + (len(shape) == 1)
    if qwen:
        tensors = {name.replace(at, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    for key in ("layer_types", "mlp_layer_types"):
        if key in settings:
            settings[key] = settings[key][:LAYERS]
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, config = FAMILIES[request.param]
    return with_layer(tmp_path, family, config, qwen=family in ("Mellum", "Qwen3Next", "Qwen3_5Text"))


def reference(folder: Path, ids: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
    """States and logits of transformers' own prediction layer for pairs of a state and the token after it."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    if not isinstance(model._keys_to_ignore_on_load_unexpected, list):  # how the class names its tensors
        model._keys_to_ignore_on_load_unexpected = []
    model._keys_to_ignore_on_load_unexpected += [rf"layers\.{LAYERS}\.", r"^mtp\."]
    if not hasattr(model.config, "num_mtp_layers"):
        model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    layers = MtpModel.from_pretrained(model).eval()
    cache = MtpCache(config=model.config.get_mtp_config())
    positions = torch.arange(len(ids))[None]
    with torch.no_grad():
        out = layers.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([ids]))
        return out[0], layers._project_to_logits(out)[0]


def test_a_layer_is_that_of_transformers(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", speculative_config={"method": "mtp"})
    drafter = llm.engine.drafter
    assert isinstance(drafter, Mtp)
    ids, states = [5, 9, 40, 3, 77, 12, 8, 30, 31, 32, 33, 34], torch.randn(12, HIDDEN)
    step_input, pool = StepInput(), drafter.net.stack.pool(64)
    step_input.chain(array("i", range(1, 60)), 0, ids)
    out = drafter.net.forward(step_input.build(), pool, drafter.net.from_states(states))
    expected, logits = reference(folder, ids, states)
    assert torch.allclose(drafter.net.from_output(out), expected, atol=1e-3)
    assert torch.allclose(drafter.net.logits(out), logits, atol=1e-3)


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_text_is_that_of_plain_decoding(folder: Path, tree: str) -> None:
    prompts = [
        {"prompt_token_ids": ids} for ids in ([5, 9, 40, 3], [7, 7, 7, 8, 9, 10, 11, 12, 13, 14], [20])
    ]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    config = {"method": "mtp", "tree": tree, "num_speculative_tokens": 3}
    plain = LLM(str(folder), dtype="float32", speculative_config="off").generate(prompts, params)
    llm = LLM(str(folder), dtype="float32", speculative_config=config)
    drafted = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert all(o.speculation.drafted for o in drafted)


def test_a_card_names_the_layers_that_a_checkpoint_ships(folder: Path) -> None:
    assert card_of(EngineOptions(str(folder))).prediction_layers == 1
    assert card_of(EngineOptions("builtin")).prediction_layers == 0


def test_layers_of_another_family_are_refused(tmp_path: Path) -> None:
    family, config = FAMILIES["experts"]
    head = with_layer(tmp_path / "head", family, config, qwen=False)
    target = tiny_checkpoint(tmp_path / "target", "Llama", **NEW)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not run .* Give a head with such"):
        LLM(target, dtype="float32", speculative_config={"method": "mtp", "model": str(head)})


def test_layers_that_lack_or_add_a_tensor_are_refused(tmp_path: Path) -> None:
    folder = with_layer(tmp_path, *FAMILIES["experts"], qwen=False)
    path, name = folder / "model.safetensors", f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    tensors = load_file(path)
    for change, reason in (
        ({name: None}, "lacks 0.self_attn.o_proj"),
        ({f"{name}s": 1}, "has 0.self_attn.o_proj.weights"),
    ):
        changed = {**tensors, **{key: torch.ones(4) for key, value in change.items() if value}}
        for key, value in change.items():
            if value is None:
                del changed[key]
        save_file(changed, path, {"format": "pt"})
        with pytest.raises(ModelError, match=reason):
            LLM(str(folder), dtype="float32", speculative_config={"method": "mtp"})


def test_layers_of_a_quantized_target_are_expanded_with_it(tmp_path: Path) -> None:
    folder = with_layer(tmp_path, *FAMILIES["experts"], qwen=False)
    path, rng = folder / "model.safetensors", random.Random(1)
    tensors = load_file(path)
    for name in [name for name in tensors if re.search(r"_proj\.weight$", name)]:
        scaled, _ = FORMATS["fp8-blocks"][0](*tensors.pop(name).shape, rng)
        tensors |= {f"{name.removesuffix('.weight')}.{key}": tensor for key, tensor in scaled.items()}
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = FORMATS["fp8-blocks"][1]
    (folder / "config.json").write_text(json.dumps(settings))
    llm = LLM(str(folder), dtype="float32", speculative_config={"method": "mtp"})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert llm.generate({"prompt_token_ids": [5, 9, 40]}, params)[0].speculation.drafted


def test_layers_larger_than_their_file_are_refused_before_they_are_made(tmp_path: Path) -> None:
    folder = with_layer(tmp_path / "head", *FAMILIES["experts"], qwen=False)
    family, config = FAMILIES["experts"]
    dense = {**config, "first_k_dense_replace": LAYERS, "moe_intermediate_size": 1 << 20}
    target = Path(tiny_checkpoint(tmp_path / "target", family, **dense))
    with pytest.raises(ModelError, match=r"weights by the config, and the file has [\d,]+: one of its sizes"):
        LLM(str(target), dtype="float32", speculative_config={"method": "mtp", "model": str(folder)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_weights_of_other_types_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = with_layer(tmp_path, *FAMILIES["experts"], qwen=False)
    path, name = folder / "model.safetensors", f"model.layers.{LAYERS}.self_attn.o_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(dtype)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"o_proj\.weight is torch\.\w+, without scales"):
        LLM(str(folder), dtype="float32", speculative_config={"method": "mtp"})


@pytest.mark.parametrize("option", ["quantization", "draft_tensor_parallel_size"])
def test_options_of_lean_layers_are_refused(tmp_path: Path, option: str) -> None:
    folder = with_layer(tmp_path, *FAMILIES["experts"], qwen=False)
    config = {"method": "mtp", option: "int8" if option == "quantization" else 2}
    with pytest.raises(Exception, match=option):
        LLM(str(folder), dtype="float32", speculative_config=config)
