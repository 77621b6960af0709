"""Keys that belong to some families: soft caps, experts, sliding windows, and what runs on a CPU only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import logits, tokenizer_fields, write

from outrider import LLM, ConfigError, ModelError
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import FAMILIES, LIKE_LLAMA, Spec
from outrider.models.load import needs_fallback
from outrider.testing import tiny_checkpoint

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def edited(folder: str, **changes: Any) -> str:
    """The checkpoint in `folder`, with these keys in its config."""
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


# ---- experts


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2"])
def test_experts_of_a_dense_family_are_ignored(family: str, tmp_path: Path) -> None:
    """transformers ignores them, too."""
    folder = tiny_checkpoint(tmp_path / "m", family)
    expected = logits(folder)
    assert torch.equal(logits(edited(folder, **EXPERTS)), expected)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_experts_of_a_dense_gguf_architecture_are_ignored(family: str, tmp_path: Path) -> None:
    architecture = family.lower()

    def fields(writer: gguf.GGUFWriter) -> None:
        tokenizer_fields(writer)
        writer.add_uint32(f"{architecture}.expert_count", 4)
        writer.add_uint32(f"{architecture}.expert_used_count", 9)

    source = tiny_checkpoint(tmp_path / "source", family)
    plain = logits(write(tmp_path / "plain.gguf", source))
    assert torch.equal(logits(write(tmp_path / "stray.gguf", source, fields=fields)), plain)


# ---- soft caps and windows of Gemma


@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
@pytest.mark.parametrize("value", [-30.0, -1, 1e-38, 1e-5, 1e8, "x", True])
def test_a_soft_cap_out_of_range_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    """Kernels took a cap below 0 for none; one near 0 overflows."""
    folder = edited(tiny_checkpoint(tmp_path / "m", "Gemma2"), **{key: value})
    with pytest.raises(ModelError, match=f"{key} must be 0, for none, or a number"):
        LLM(folder)


def test_a_gguf_file_without_soft_caps_in_range_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "Gemma2", attn_logit_softcapping=4.0)
    path = write(tmp_path / "m.gguf", source)
    data, key = bytearray(path.read_bytes()), b"gemma2.attn_logit_softcapping"
    value = data.index(key) + len(key) + 4  # behind the type, 4 bytes
    data[value : value + 4] = torch.tensor([-4.0]).numpy().tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"m\.gguf: attn_logit_softcapping must be 0"):
        LLM(str(path))


@pytest.mark.parametrize("cap", [0.0, None])
def test_no_soft_cap(cap: float | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "Gemma2")
    spec = Checkpoint.open(edited(folder, attn_logit_softcapping=cap, final_logit_softcapping=cap)).spec
    assert isinstance(spec, Spec)
    assert (spec.variant.score_cap, spec.variant.logit_cap) == (0, 0)


def test_the_window_of_a_gemma_2_file_without_one(tmp_path: Path) -> None:
    """llama.cpp's default."""
    source = tiny_checkpoint(tmp_path / "source", "Gemma2", sliding_window=9)
    path = write(tmp_path / "m.gguf", source)
    key = b"gemma2.attention.sliding_window"
    path.write_bytes(path.read_bytes().replace(key, b"x" * len(key)))
    spec = Checkpoint.open(str(path)).spec
    assert isinstance(spec, Spec) and spec.windows == (4096, 0)


# ---- where families run


def test_families_whose_blocks_are_those_of_llama(tmp_path: Path) -> None:
    for name in FAMILIES:
        family = name.removesuffix("ForCausalLM")
        if family == "MiMo":  # has no config in transformers: Qwen2's decoder
            continue
        more = EXPERTS if family in ("Mixtral", "Qwen3Moe", "GptOss") else {}
        if family in ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"):
            more = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
            more["num_experts_per_tok"] = 2
        text = family + "Text" * (family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe"))  # the others have no images
        folder = tiny_checkpoint(tmp_path / family, text, **more)
        spec = Checkpoint.open(folder).spec
        assert isinstance(spec, Spec) and spec.like_llama == (name in LIKE_LLAMA), name


def test_a_refusal_does_not_list_what_it_refuses(tmp_path: Path) -> None:
    gemma = Checkpoint.open(tiny_checkpoint(tmp_path / "gemma", "Gemma2"))
    assert not needs_fallback(gemma, "int8", split=True)
    folder = tiny_checkpoint(tmp_path / "phi", "Phi")
    phi = Checkpoint.open(folder)
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM.*; PhiForCausalLM runs in its own numbers"):
        needs_fallback(phi, "int8")
    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM.*; PhiForCausalLM runs on one device"):
        needs_fallback(phi, split=True)
    with pytest.raises(ConfigError, match=r"PhiForCausalLM runs in one process") as error:
        LLM(folder, tensor_parallel_size=2)
    assert "Gemma" not in str(error.value) and "Mixtral" not in str(error.value)
