"""GGUF files of models with gated delta rules give the same model as a safetensors checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import GREEDY, PROMPTS, logits, tokenizer_fields, write
from helpers import answer, check_speculation, decoder_of, weight_bytes
from hybrids import DELTA, ROUTED
from safetensors.torch import load_file

from outrider import LLM, ModelError
from outrider.checkpoints.gguf import delta_rule
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import Spec
from outrider.config import EngineOptions
from outrider.core.quantized import QuantizedWeight
from outrider.inspect.card import card_of
from outrider.testing import tiny_checkpoint

SIZES = {key: value for key, value in DELTA.items() if key != "vocab_size"}
SHARED = {**ROUTED, "shared_expert_intermediate_size": 40}
HALF: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", {}),
    "qwen3.5-tied": ("Qwen3_5Text", {"tie_word_embeddings": True, **HALF}),
    "qwen3.5-three-values-a-key": ("Qwen3_5Text", {"linear_num_value_heads": 6}),
    "qwen3.5-one-value-a-key": ("Qwen3_5Text", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
    "qwen3.5-moe": ("Qwen3_5MoeText", SHARED),
    "qwen3-next": ("Qwen3Next", {**SHARED, "linear_num_value_heads": 6}),
}


def source(name: str, folder: Path, **more: Any) -> str:
    family, own = MODELS[name]
    return tiny_checkpoint(folder, family, **{**SIZES, **own, **more})


def bfloat16(name: str) -> str:
    return "BF16"


@pytest.mark.parametrize("name", MODELS)
def test_gguf_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """All bits of them: the weights are the same numbers in another order."""
    folder = source(name, tmp_path / "source")
    file = write(tmp_path / "model.gguf", folder, bfloat16)
    assert torch.equal(logits(folder), logits(file))
    ours, theirs = (Checkpoint.open(str(path)).spec for path in (folder, file))
    assert isinstance(ours, Spec) and isinstance(theirs, Spec)
    assert ours.recurrent == theirs.recurrent and ours.experts == theirs.experts
    assert ours.rotated == theirs.rotated != 0


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", source("qwen3.5", tmp_path / "source"), lambda name: "Q8_0")
    check_speculation(str(file), PROMPTS)


def test_hybrids_in_gguf_draft_chains(tmp_path: Path) -> None:
    folder = source("qwen3.5", tmp_path / "source")
    file = str(write(tmp_path / "model.gguf", folder))
    expected = answer(LLM(folder, dtype="float32"), PROMPTS[0], GREEDY).outputs[0].token_ids
    llm = LLM(file, dtype="float32", speculative_config={"model": file, "num_speculative_tokens": 3})
    output = answer(llm, PROMPTS[0], GREEDY)
    assert output.outputs[0].token_ids == expected and output.speculation.acceptance > 0.9


# ---- few bits

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_value_head_dim": 64}


@pytest.mark.parametrize(
    ("kind", "dim"), [("Q8_0", 64), ("Q4_0", 64), ("Q4_K", 64), ("Q6_K", 64), ("Q8_0", 24)]
)
def test_weights_in_few_bits_are_their_values(
    kind: str, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of gates too, and where a group with a scale has numbers of two heads (24)."""
    folder = source("qwen3.5", tmp_path / "source", **{**WIDE, "linear_value_head_dim": dim})
    file = write(tmp_path / "model.gguf", folder, lambda name: kind)
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    torch.testing.assert_close(logits(file), logits(folder), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_weights_in_few_bits_stay_packed(kind: str, tmp_path: Path) -> None:
    folder = source("qwen3.5", tmp_path / "source", **WIDE)
    file = str(write(tmp_path / "model.gguf", folder, lambda name: kind))
    card = card_of(EngineOptions(file))
    assert card.weight_bytes == pytest.approx(weight_bytes(LLM(file)), rel=0.06)
    assert card.weight_bytes < card_of(EngineOptions(folder)).weight_bytes / 3
    assert card.parameters == card_of(EngineOptions(folder)).parameters


def test_inputs_move_with_the_scales_of_their_groups() -> None:
    values = torch.randint(-8, 8, (3, 8 * 32), dtype=torch.int8)
    weight = QuantizedWeight(values, torch.rand(3, 8), torch.rand(3, 8), 4, 32)
    rule = delta_rule.DeltaRule(2, 4, 16, 64, 4, (True,))
    moved = delta_rule.in_order("model.layers.0.linear_attn.out_proj.weight", weight, rule)
    assert isinstance(moved, QuantizedWeight) and moved.bits == 4
    heads = weight.dense().view(3, 4, 64)
    assert torch.equal(moved.dense().view(3, 4, 64), heads[:, [0, 2, 1, 3]])


# ---- metadata


def with_fields(
    change: Callable[[gguf.GGUFWriter, dict[str, gguf.GGUFValue]], None],
) -> Callable[[gguf.GGUFWriter], None]:
    """Fields whose last are changed; keys have the architecture before them."""

    def fields(writer: gguf.GGUFWriter) -> None:
        tokenizer_fields(writer)
        change(writer, writer.kv_data[0])

    return fields


def without(key: str, **more: int) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter, fields: dict[str, gguf.GGUFValue]) -> None:
        fields.pop(f"qwen35.{key}", None)
        for name, value in more.items():
            writer.add_uint32(f"qwen35.{name}", value)

    return with_fields(change)


def test_older_files_name_an_interval_of_attention(tmp_path: Path) -> None:
    """Every fourth layer without one."""
    folder = source("qwen3.5", tmp_path / "source")
    fields = without("attention.recurrent_layers", full_attention_interval=2)
    assert torch.equal(logits(folder), logits(write(tmp_path / "a.gguf", folder, fields=fields)))
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    other = source("qwen3.5", tmp_path / "other", layer_types=kinds)
    fields = without("attention.recurrent_layers")
    assert torch.equal(logits(other), logits(write(tmp_path / "b.gguf", other, fields=fields)))


def test_prediction_layers_are_not_read(tmp_path: Path) -> None:
    folder = source("qwen3.5", tmp_path / "source")

    def change(writer: gguf.GGUFWriter, fields: dict[str, gguf.GGUFValue]) -> None:
        fields["qwen35.block_count"].value = 5
        fields["qwen35.attention.recurrent_layers"].value.append(False)
        writer.add_nextn_predict_layers(1)

    extra = {
        f"blk.4.{name}.weight": np.ones((64,), dtype=np.float32)
        for name in ("nextn.enorm", "nextn.eh_proj", "attn_norm", "ffn_up")
    }
    file = write(tmp_path / "model.gguf", folder, fields=with_fields(change), extra=extra)
    assert torch.equal(logits(folder), logits(file))
    with pytest.raises(ModelError, match="prediction layers are not read"):
        LLM(str(file), speculative_config={"method": "mtp"})


def test_older_files_of_qwen3_next_join_four_outputs(tmp_path: Path) -> None:
    """Those of q, k, v and z, head of keys by head of keys, as checkpoints do."""
    folder = source("qwen3-next", tmp_path / "source")
    file, names = write(tmp_path / "model.gguf", folder), load_file(Path(folder) / "model.safetensors")
    extra = {
        f"blk.{layer}.ssm_in.weight": names[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].numpy()
        for layer in (0, 2)
    }
    whole = write(tmp_path / "both.gguf", folder, extra=extra).read_bytes()
    for layer in (0, 2):  # which no checkpoint asks for
        name = f"blk.{layer}.attn_qkv.weight".encode()
        assert whole.count(name) == 1
        whole = whole.replace(name, f"blk.{layer}.ffn_gate.weight".encode())
    (tmp_path / "old.gguf").write_bytes(whole)
    assert torch.equal(logits(file), logits(tmp_path / "old.gguf"))


HOSTILE: dict[str, tuple[str, Any, str]] = {
    "no sizes": ("ssm.state_size", None, r"has no qwen35\.ssm\.state_size"),
    "no heads": ("ssm.time_step_rank", 0, r"ssm\.inner_size 96 is no multiple of ssm\.time_step_rank 0"),
    "parts of heads": ("ssm.inner_size", 97, r"ssm\.inner_size 97 is no multiple of ssm\.time_step_rank 4"),
    "no keys": ("ssm.group_count", 0, "linear_num_key_heads"),
    "other heads": ("ssm.group_count", 3, "must be a multiple"),
    "a wide state": ("ssm.state_size", 1 << 30, "linear_key_head_dim"),
    "more keys": ("ssm.state_size", 17, r"in_proj_qkv\.weight has shape"),
    "taps": ("ssm.conv_kernel", 1 << 20, "linear_conv_kernel_dim"),
    "all recurrent": ("attention.recurrent_layers", [True] * 4, "all of its layers are recurrent"),
    "few flags": ("attention.recurrent_layers", [True, False], "no list of a flag for each of 4 layers"),
    "a flag": ("attention.recurrent_layers", True, "no list of a flag"),
    "no flags": ("attention.recurrent_layers", [1, 0, 1, 0], "no list of a flag"),
    "another layer": ("attention.recurrent_layers", [False] * 3 + [True], r"no tensor .*self_attn"),
    "nothing rotated": ("rope.dimension_count", 0, r"rope\.dimension_count"),
    "more rotated": ("rope.dimension_count", 17, r"rope\.dimension_count"),
    "layers": ("block_count", (1 << 31) - 1, "block_count"),
    "no layers": ("nextn_predict_layers", 4, "block_count"),
    "fewer layers": ("nextn_predict_layers", 9, "block_count"),
    "words": ("nextn_predict_layers", "x", "nextn_predict_layers"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_are_refused(case: str, tmp_path: Path) -> None:
    key, value, message = HOSTILE[case]

    def change(writer: gguf.GGUFWriter, fields: dict[str, gguf.GGUFValue]) -> None:
        fields.pop(f"qwen35.{key}", None)
        if value is not None:
            add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}.get(type(value))
            (add or writer.add_array)(f"qwen35.{key}", value)

    file = write(tmp_path / "a.gguf", source("qwen3.5", tmp_path / "source"), fields=with_fields(change))
    with pytest.raises(ModelError) as error:
        decoder_of(file)
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


def test_a_missing_interval_is_no_division_by_zero(tmp_path: Path) -> None:
    fields = without("attention.recurrent_layers", full_attention_interval=0)
    file = write(tmp_path / "a.gguf", source("qwen3.5", tmp_path / "source"), fields=fields)
    with pytest.raises(ModelError, match="full_attention_interval"):
        Checkpoint.open(str(file))


def test_a_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "source", "Qwen3")
    extra = {"blk.0.ssm_a": np.ones((4,), dtype=np.float32)}
    with pytest.raises(ModelError, match=r"'blk\.0\.ssm_a', which the lean decoder does not compute"):
        LLM(str(write(tmp_path / "model.gguf", folder, extra=extra)))
