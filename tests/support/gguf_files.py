"""GGUF files written from a checkpoint by the gguf package, and their comparison with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_hybrids import DELTA_NAMES, HYBRID_TYPES, changed, delta_fields, file_name, layout
from helpers import answer, decoder_of, text_logits
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.names import own_names
from outrider.testing import random_prompts, tiny_tokenizer

Kind = gguf.GGMLQuantizationType
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = random_prompts(3)
SCALED = {  # where in a block the float16 scales lie
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "IQ3_S": [0], "IQ2_XS": [0], "TQ2_0": [64],
    "MXFP4": [],
}  # fmt: skip


def random_blocks(kind: str, shape: tuple[int, int], seed: int, size: float = 1.0) -> np.ndarray:
    """Bytes of a tensor: every bit random, but for the scales, whose size is that of a weight."""
    rng, (weights, width) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // weights, width), dtype=np.uint8)
    if kind == "MXFP4":  # a power of two in a byte
        blocks[:, 0] = rng.integers(120, 124, len(blocks)) + int(np.log2(size))
    for at in SCALED[kind]:
        blocks[:, at : at + 2] = rng.uniform(0.5, 1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    peak = np.abs(gguf.dequantize(blocks, Kind[kind])).max()
    for at in SCALED[kind]:
        blocks[:, at : at + 2] = (
            blocks[:, at : at + 2].copy().view(np.float16) * np.float16(size / peak)
        ).view(np.uint8)
    return blocks.reshape(shape[0], -1)


OUTPUT_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
ARCHITECTURE = {
    "LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3moe", "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3", "GptOssForCausalLM": "gpt-oss",
    "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3NextForCausalLM": "qwen3next",
}  # fmt: skip


def theirs(name: str, names: dict[str, str] = NAMES) -> str:
    if (whole := file_name(name)) is not None:
        return whole
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{suffix}"
    return f"{names[stem]}.{suffix}"


def interleaved(rows: np.ndarray, width: int) -> np.ndarray:
    """Row i and row i + half of every head side by side, as llama.cpp turns them."""
    order = []
    for head in range(len(rows) // width):
        for i in range(width // 2):
            order += [head * width + i, head * width + width // 2 + i]
    return rows[order]


def base_fields(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if inner := getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in HYBRID_TYPES:
        delta_fields(writer, config)
    elif experts := getattr(config, "num_local_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if inner := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(inner)


def tokenizer_fields(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in ("<|bos|>", "<|end|>", "<|pad|>") else 1 for word in words])
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def encoded(numbers: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """The numbers as the file holds them; random ones for the types that the package cannot write."""
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S"):
        return random_blocks(kind, numbers.shape, seed, 0.4)
    return gguf.quantize(np.ascontiguousarray(numbers), Kind[kind])


def write(
    path: Path,
    source: str | Path,
    kinds: Callable[[str], str] = lambda name: "F32",
    fields: Callable[[gguf.GGUFWriter], None] = tokenizer_fields,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The checkpoint in `source` as GGUF, tensors of type kinds(name); `source` gets the same rounding."""
    config = Checkpoint.open(str(source)).config
    writer = gguf.GGUFWriter(path, ARCHITECTURE[config.architectures[0]])
    base_fields(writer, config)
    fields(writer)
    file = Path(source) / "model.safetensors"
    tensors = load_file(file)
    usual = {stored: own for own, stored in own_names(tensors).items()}
    is_hybrid = config.model_type in HYBRID_TYPES
    names = NAMES | (OUTPUT_NORMS if config.model_type in ("gemma2", "gemma3_text") else {})
    names |= DELTA_NAMES if is_hybrid else {}
    joined: dict[str, list[tuple[int, np.ndarray]]] = {}  # experts of a layer are one tensor
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        own = usual.get(name, name)
        places = np.arange(tensor.numel()).reshape(tensor.shape)
        parts = layout(own, places, config) if is_hybrid else {own: places}
        for own, places in parts.items():
            kind = kinds(name) if tensor.dim() == 2 and places.ndim == 2 else "F32"
            rows = encoded(tensor.flatten().numpy()[places], kind, i)
            rounded = torch.from_numpy(np.array(gguf.dequantize(rows, Kind[kind]), dtype=np.float32))
            tensor.view(-1)[torch.from_numpy(places)] = rounded.view(places.shape)
            if is_hybrid:
                rows = changed(own, rows)
            if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
                rows = rows + 1
            if config.model_type in ("llama", "mixtral") and ("q_proj" in name or "k_proj" in name):
                rows = interleaved(rows, config.head_dim)
            expert = EXPERT.fullmatch(own)
            if expert is None:
                writer.add_tensor(theirs(own, names), rows, raw_dtype=Kind[kind])
                continue
            of_layer = joined.setdefault(theirs(expert[1] + expert[3]), [])
            of_layer.append((int(expert[2]), rows))
            if len(of_layer) == getattr(config, "num_experts" if is_hybrid else "num_local_experts"):
                stacked = np.stack([rows for _, rows in sorted(of_layer, key=itemgetter(0))])
                writer.add_tensor(theirs(expert[1] + expert[3]), stacked, raw_dtype=Kind[kind])
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(tensors, file, {"format": "pt"})
    return path


def logits(model: str | Path) -> torch.Tensor:
    return text_logits(decoder_of(model), PROMPTS[0] + PROMPTS[1])


def same(a: str | Path, b: str | Path) -> None:
    """Two models are one: logits as near as float32 lets them be, and the same greedy text."""
    torch.testing.assert_close(logits(a), logits(b), rtol=1e-4, atol=1e-4)
    one, two = (LLM(str(model), dtype="float32") for model in (a, b))
    for prompt in PROMPTS:
        assert (
            answer(one, prompt, GREEDY).outputs[0].token_ids
            == answer(two, prompt, GREEDY).outputs[0].token_ids
        )


def rope_fields(kind: str, **given: Any) -> Callable[[gguf.GGUFWriter], None]:
    def fields(writer: gguf.GGUFWriter) -> None:
        tokenizer_fields(writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(given["factor"])
        if "original_max_position_embeddings" in given:
            writer.add_rope_scaling_orig_ctx_len(given["original_max_position_embeddings"])
        if "attention_factor" in given:
            writer.add_rope_scaling_yarn_attn_factor(given["attention_factor"])

    return fields


LINEAR = {"factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_factors(width: int) -> np.ndarray:
    """As llama.cpp's converter computes them, one frequency at a time."""
    out = []
    for i in range(0, width, 2):
        length = 2 * np.pi * 10000.0 ** (i / width)
        if length < 32 / 4.0:
            out.append(1.0)
        elif length > 32 / 1.0:
            out.append(8.0)
        else:
            smooth = (32 / length - 1.0) / (4.0 - 1.0)
            out.append(1 / ((1 - smooth) / 8.0 + smooth))
    assert len(set(out)) > 2
    return np.array(out, dtype=np.float32)


def rope(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **given}}
