"""GGUF files, written by the gguf package or by hand, give the same model as a safetensors checkpoint."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    GREEDY,
    LINEAR,
    LLAMA3,
    PROMPTS,
    SCALED,
    YARN,
    Kind,
    base_fields,
    llama3_factors,
    logits,
    random_blocks,
    rope,
    rope_fields,
    same,
    tokenizer_fields,
    write,
)
from helpers import answer, check_speculation, weight_bytes

from outrider import LLM, ModelError, OutriderError
from outrider.checkpoints.gguf import blocks
from outrider.checkpoints.hub import Checkpoint
from outrider.config import EngineOptions
from outrider.core.quantized import QuantizedWeight
from outrider.inspect.card import card_of
from outrider.testing import tiny_checkpoint

BITS = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q2_K": 4,
    "Q3_K": 4,
    "Q4_K": 4,
    "Q5_0": 8,
    "Q5_1": 8,
    "Q8_0": 8,
    "Q5_K": 8,
    "Q6_K": 8,
    "IQ4_NL": 4,
    "IQ4_XS": 4,
    "MXFP4": 4,
}


@pytest.mark.parametrize("kind", SCALED)
def test_blocks_equal_the_values_of_the_gguf_package(kind: str) -> None:
    rows = random_blocks(kind, (6, 768), 1)
    found = blocks.unpack(kind, rows, gguf.GGML_QUANT_SIZES[Kind[kind]][1])
    if kind in BITS:
        assert isinstance(found, QuantizedWeight) and found.bits == BITS[kind]
        levels = found.levels or range(-8, 8)
        assert found.bits == 8 or {*found.values.unique().tolist()} <= {*levels}
        found = found.dense()
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(
        found, torch.from_numpy(gguf.dequantize(rows, Kind[kind])), rtol=1e-6, atol=1e-6
    )


# ---- whole files


EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama-head-24": ("Llama", {"head_dim": 24}, {}),
    "llama-linear": ("Llama", rope("linear", LINEAR), {"fields": rope_fields("linear", **LINEAR)}),
    "llama-yarn": ("Llama", rope("yarn", YARN), {"fields": rope_fields("yarn", **YARN)}),
    "llama-3": ("Llama", rope("llama3", LLAMA3), {"extra": {"rope_freqs.weight": llama3_factors(16)}}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 32}, {}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}, {}),
    "mixtral": ("Mixtral", EXPERTS, {}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}, {}),
    "gemma2": (
        "Gemma2",
        {"sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
        {},
    ),
    "gemma3": ("Gemma3Text", {"sliding_window": 9, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_gguf_output_equals_the_checkpoints(name: str, tmp_path: Path) -> None:
    family, config, how = MODELS[name]
    source = tiny_checkpoint(tmp_path / "source", family, **config)
    same(source, write(tmp_path / "model.gguf", source, **how))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of 256 weights, as the K formats need them."""
    return tiny_checkpoint(
        tmp_path_factory.mktemp("wide"),
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        num_hidden_layers=1,
    )


def mixed(kind: str) -> Callable[[str], str]:
    """One type for all; in the mixes that llama-quantize makes V and the head have more bits."""
    more = {"Q4_K": "Q6_K", "Q2_K": "Q3_K", "Q4_0": "Q8_0"}.get(kind, kind)
    return lambda name: more if "v_proj" in name or "lm_head" in name else kind


@pytest.mark.parametrize("kind", ["F16", "BF16", *BITS, "IQ3_S"])
def test_every_ggml_type_unpacks_to_its_values(
    kind: str, wide: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels use the values as stored; the C kernels also round activations to 8 bits."""
    source = shutil.copytree(wide, tmp_path / "source")
    file = write(tmp_path / "model.gguf", source, mixed(kind))
    expected, rounded = logits(source), logits(file)
    assert (rounded - expected).pow(2).mean().sqrt() < 0.05 * expected.std()
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    torch.testing.assert_close(logits(file), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16"])
def test_card_memory_equals_the_loaded_size(kind: str, wide: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", shutil.copytree(wide, tmp_path / "source"), mixed(kind))
    card = card_of(EngineOptions(str(file)))
    assert card.weight_bytes == pytest.approx(weight_bytes(LLM(str(file))), rel=0.06), (
        "up to the padding of 300 tokens to 320"
    )
    assert card.parameters == card_of(EngineOptions(wide)).parameters and kind in card.stored_as


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_experts_in_few_bits_are_their_values(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}
    source = tiny_checkpoint(tmp_path / "source", "Qwen3Moe", **config)
    file = write(
        tmp_path / "model.gguf", source, lambda name: "F32" if name.endswith("gate.weight") else kind
    )
    card = card_of(EngineOptions(str(file)))
    assert card.weight_bytes == pytest.approx(
        weight_bytes(LLM(str(file))), rel=0.3
    )  # routers of 4 are padded to 64
    assert card.parameters == card_of(EngineOptions(source)).parameters
    check_speculation(str(file), PROMPTS)
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    torch.testing.assert_close(logits(file), logits(source), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_speculation_changes_nothing(kind: str, wide: str, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", shutil.copytree(wide, tmp_path / "source"), mixed(kind))
    check_speculation(str(file), PROMPTS)


# ---- finding files


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 file with a tokenizer."""
    folder = tmp_path_factory.mktemp("plain")
    return write(folder / "model.gguf", tiny_checkpoint(folder / "source"))


def test_a_folder_with_one_gguf_file_opens_it(plain: Path) -> None:
    assert torch.equal(logits(plain.parent), logits(plain))


def test_a_folder_with_two_gguf_files_is_refused(plain: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(plain, tmp_path / name)
    with pytest.raises(ModelError, match=r"holds 2 GGUF files.*a\.gguf"):
        LLM(str(tmp_path))


def test_a_file_drafts_for_a_folder_and_a_folder_for_a_file(plain: Path) -> None:
    source, prompt = str(plain.parent / "source"), PROMPTS[0]
    expected = answer(LLM(source), prompt, GREEDY).outputs[0].token_ids
    for model, draft in ((source, str(plain)), (str(plain), source)):
        llm = LLM(model, speculative_config={"model": draft, "num_speculative_tokens": 3})
        output = answer(llm, prompt, GREEDY)
        assert output.outputs[0].token_ids == expected
        assert output.speculation.acceptance > 0.9


def test_sharded_gguf_files_open_as_one_model(plain: Path, tmp_path: Path) -> None:
    """The first shard holds the metadata, the second all tensors that the first does not."""
    reader = gguf.GGUFReader(plain)
    for i, part in enumerate((reader.tensors[:5], reader.tensors[5:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-{i + 1:05}-of-00002.gguf", "llama")
        writer.add_uint16("split.count", 2)
        if i == 0:
            base_fields(writer, Checkpoint.open(str(plain)).config)
            tokenizer_fields(writer)
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for model in (tmp_path, tmp_path / "m-00001-of-00002.gguf"):
        assert torch.equal(logits(model), logits(plain))
    with pytest.raises(ModelError, match="give the first"):
        LLM(str(tmp_path / "m-00002-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"there is no file .*m-00002-of-00002\.gguf"):
        LLM(str(tmp_path))


def test_auto_dtype_and_quantization_follow_the_file(plain: Path, wide: str, tmp_path: Path) -> None:
    assert LLM(str(plain)).engine.decoder.dtype == torch.float32
    file = write(tmp_path / "model.gguf", shutil.copytree(wide, tmp_path / "source"), lambda name: "Q8_0")
    assert Checkpoint.open(str(file)).config.dtype == torch.bfloat16
    many, few = LLM(str(file)), LLM(str(file), quantization="int4")
    assert weight_bytes(LLM(str(file), quantization="int8")) == weight_bytes(many)
    assert weight_bytes(few) < 0.8 * weight_bytes(many)


# ---- what is wrong with a file


def test_a_truncated_file_raises_one_error(plain: Path, tmp_path: Path) -> None:
    whole, file = plain.read_bytes(), tmp_path / "cut.gguf"
    for length in (0, 3, 10, 24, 100, 1000, 5000, 20_000, len(whole) - 1000, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf.* (truncated|corrupt)"):
            LLM(str(file))


def test_a_flipped_header_is_an_error_of_ours_or_none(plain: Path, tmp_path: Path) -> None:
    """No byte of the header makes anything else of it."""
    whole, file, rng = plain.read_bytes(), tmp_path / "bad.gguf", np.random.default_rng(0)
    for at in [*range(4, 64), *rng.integers(64, 9000, 60).tolist()]:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            checkpoint = Checkpoint.open(str(file))
            assert checkpoint.ending is not None and hasattr(checkpoint, "tokenizer")
        except OutriderError as error:
            assert str(file) in str(error)


def changed(plain: Path, tmp_path: Path, old: bytes, new: bytes) -> str:
    whole = plain.read_bytes()
    assert len(old) == len(new) and whole.count(old) >= 1
    (tmp_path / "bad.gguf").write_bytes(whole.replace(old, new, 1))
    return str(tmp_path / "bad.gguf")


def number(key: bytes, kind: int, value: bytes) -> bytes:
    return key + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF\x03", b"GGUF\x07", "version 2 or 3"),
        (b"GGUF\x03\0\0\0", b"GGUF\0\0\0\x03", "little-endian"),
        (b"GGUF", b"GGML", "not a little-endian GGUF file"),
        (
            b"\x05\0\0\0\0\0\0\0llama",
            b"\x05\0\0\0\0\0\0\0mamba",
            "'mamba', which is not supported.  Supported: llama, qwen2, qwen3",
        ),
        (b"llama.block_count", b"llama.block_caunt", "no llama.block_count"),
        (
            number(b"llama.block_count", 4, b"\x02\0\0\0"),
            number(b"llama.block_count", 4, b"\x01\0\0\0"),
            "more layers than block_count 1",
        ),
        (
            number(b"llama.block_count", 4, b"\x02\0\0\0"),
            number(b"llama.block_count", 4, b"\x03\0\0\0"),
            "model.layers.2",
        ),
        (
            number(b"attention.head_count", 4, b"\x04\0\0\0"),
            number(b"attention.head_count", 4, b"\0\0\0\0"),
            "head_count is 0",
        ),
        (
            number(b"attention.head_count", 4, b"\x04\0\0\0"),
            number(b"attention.head_count", 5, b"\xff" * 4),
            "head_count is -1",
        ),
        (
            number(b"attention.head_count", 4, b"\x04\0\0\0"),
            number(b"attention.head_count", 6, b"\0\0\x80\x40"),
            "head_count is 4.0",
        ),
        (
            number(b"value_length", 4, b"\x10\0\0\0"),
            number(b"value_length", 4, b"\x20\0\0\0"),
            "value_length 32",
        ),
        (
            number(b"embedding_length", 4, b"\x40\0\0\0"),
            number(b"embedding_length", 4, b"\x60\0\0\0"),
            "the metadata asks for",
        ),
        (
            b"blk.1.ffn_up.weight",
            b"blk.1.ffn_ap.weight",
            "'blk.1.ffn_ap.weight', which the lean decoder does not compute",
        ),
        (b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight", "no tensor 'model.layers.1.mlp.up_proj.weight'"),
        (b"token_embd.weight", b"token_embd.woight", "token_embd"),
        (b"ggml.merges", b"ggml.morges", "merges"),
        (b"gpt-2", b"gpt-9", "'gpt-9' are unknown"),
        (
            number(b"bos_token_id", 4, b"\0\0\0\0"),
            number(b"bos_token_id", 4, b"\0\0\1\0"),
            "tokenizer's metadata",
        ),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    old: bytes, new: bytes, message: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        LLM(changed(plain, tmp_path, old, new))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_another_architecture_is_named_before_its_tensors(plain: Path, tmp_path: Path) -> None:
    file = Path(changed(plain, tmp_path, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0bloom"))
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_ab.weight"))
    with pytest.raises(ModelError, match="architecture 'bloom', which is not supported"):
        LLM(str(file))


def test_an_unknown_type_is_named(plain: Path, tmp_path: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    dimensions = struct.pack("<IQQ", 2, 96, 64)
    with pytest.raises(ModelError, match=r"'blk\.0\.ffn_down\.weight' has the type 177"):
        LLM(
            changed(
                plain,
                tmp_path,
                name + dimensions + struct.pack("<I", 0),
                name + dimensions + struct.pack("<I", 177),
            )
        )
    with pytest.raises(ModelError, match="hold 96 weights, no multiple of 256"):
        LLM(
            changed(
                plain,
                tmp_path,
                name + dimensions + struct.pack("<I", 0),
                name + dimensions + struct.pack("<I", Kind.Q4_K),
            )
        )
