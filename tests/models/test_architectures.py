"""A checkpoint whose config names its class otherwise, or not at all, is loaded by its model_type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from families import write
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.errors import ModelError
from outrider.models.fallback.model import Fallback

PROMPT = {"prompt_token_ids": list(range(7, 40))}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def named(source: Path, folder: Path, name: str | None) -> Path:
    """The same checkpoint with another name of its class, or without one."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = None if name is None else [name]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def text(folder: Path) -> list[int]:
    return LLM(str(folder)).generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Llama", None),
        ("Llama", "LLaMAForCausalLM"),
        ("Llama", "LlamaModel"),
        ("Llama", "MedusaModelLlama"),
        ("Mistral", "MedusaModelMistral"),
        ("Qwen3", None),
    ],
)
def test_names_of_the_lean_decoder(family: str, name: str | None, checkpoint: Any, tmp_path: Path) -> None:
    """Qwen3 without a name still has its query and key norms."""
    folder = checkpoint(family)
    other = named(folder, tmp_path, name)
    assert not isinstance(LLM(str(other)).engine.decoder, Fallback)
    assert text(other) == text(folder)


@pytest.mark.parametrize("name", [None, "GPT2Model"])
def test_names_of_the_fallback(name: str | None, tmp_path: Path) -> None:
    write("gpt2", tmp_path / "named")
    assert text(named(tmp_path / "named", tmp_path / "other", name)) == text(tmp_path / "named")


def test_stablelm_under_its_first_names(tmp_path: Path) -> None:
    """The same tensors; two keys of the config have other names."""
    write("stablelm", tmp_path / "new", layer_norm_eps=0.03)
    folder = named(tmp_path / "new", tmp_path / "old", "StableLMEpochForCausalLM")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": "stablelm_epoch",
        "norm_eps": config.pop("layer_norm_eps"),
        "rope_pct": rope["partial_rotary_factor"],
        "rope_theta": rope["rope_theta"],
        "auto_map": {"AutoConfig": "configuration_stablelm_epoch.StableLMEpochConfig"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert text(folder) == text(tmp_path / "new")


def bare(source: Path, folder: Path) -> Path:
    """As `LlamaModel.save_pretrained` writes it: no head, and no prefix of the body."""
    named(source, folder, "LlamaModel")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
        file,
    )
    return folder


def test_a_body_without_prefix(checkpoint: Any, tmp_path: Path) -> None:
    tied = checkpoint(tie_word_embeddings=True)
    assert text(bare(tied, tmp_path / "tied")) == text(tied)
    with pytest.raises(ModelError, match="lm_head"):
        LLM(str(bare(checkpoint(), tmp_path / "untied")))


@pytest.mark.parametrize(
    "name", ["LlamaForSequenceClassification", "LlamaForCausalLMEagle3", "LlamaForTokenClassification"]
)
def test_other_tasks_are_refused_by_name(name: str, checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=name):
        LLM(str(named(checkpoint(), tmp_path, name)))
