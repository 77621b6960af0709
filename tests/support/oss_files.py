"""Files of tiny gpt-oss models: experts in MXFP4 by their definition, and the same models in GGUF."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_files import base_fields, tokenizer_fields
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.testing import tiny_checkpoint

Kind = gguf.GGMLQuantizationType
YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3, "sliding_window": 9,
    "rope_parameters": YARN, "swiglu_limit": 1.5,
}  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
JOINED = re.compile(r".*\.experts\.(gate_up|down)_proj")
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.sinks": "attn_sinks", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def checkpoint(folder: Path, **config: Any) -> str:
    """A model with clamped gates, windows, YaRN, sinks and biases that all matter."""
    return tiny_checkpoint(folder, "GptOss", **CONFIG | config)


def numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., O, K] of blocks uint8 [..., O, K / 32, 16] and scales uint8 [..., O, K / 32]."""
    codes = torch.stack([blocks % 16, blocks // 16], dim=-1).flatten(-2).long()
    values = torch.tensor(E2M1 + [-value for value in E2M1])[codes]
    return (values * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)


def in_mxfp4(source: str, folder: Path) -> str:
    """A copy of a checkpoint with random experts in MXFP4; `source` gets the same numbers."""
    shutil.copytree(source, folder)
    dense = load_file(Path(source) / "model.safetensors")
    packed: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for name, tensor in dense.items():
        if not JOINED.fullmatch(name):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        dense[name] = numbers(blocks, scales).transpose(1, 2).contiguous()
    save_file(dense, Path(source) / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def in_gguf(path: Path, source: str) -> str:
    """The model of a folder in GGUF, experts in MXFP4 if they are so there; as llama.cpp's converter does."""
    config = Checkpoint.open(source).config
    writer = gguf.GGUFWriter(path, "gpt-oss")
    base_fields(writer, config)
    tokenizer_fields(writer)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    tensors = load_file(Path(source) / "model.safetensors")
    for name, tensor in tensors.items():
        for part, data, kind in _parts(name, tensor, tensors):
            writer.add_tensor(_gguf_name(part), data, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _parts(name: str, tensor: Tensor, tensors: dict[str, Tensor]) -> list[tuple[str, np.ndarray, str]]:
    """What a tensor of a folder is in GGUF: names with suffixes, data, types."""
    if name.endswith("_scales"):
        return []  # with its blocks
    if name.endswith("_blocks"):
        stem = name.removesuffix("_blocks")
        data, kind = _repacked(tensor, tensors[f"{stem}_scales"]), "MXFP4"
    elif JOINED.fullmatch(name):
        stem, data, kind = name, tensor.transpose(1, 2).contiguous().numpy(), "F32"
    elif name.endswith("_proj_bias"):
        return [(f"{part}.bias", data, "F32") for part, data in _split(name[:-5], tensor.numpy())]
    else:
        return [(name if name.endswith(("weight", "bias")) else f"{name}.weight", tensor.numpy(), "F32")]
    return [(f"{part}.weight", data, kind) for part, data in _split(stem, data)]


def _split(name: str, data: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Gate and up, whose outputs alternate; down alone."""
    if "gate_up_proj" not in name:
        return [(name, data)]
    parts = ("gate_proj", data[:, ::2]), ("up_proj", data[:, 1::2])
    return [(name.replace("gate_up_proj", part), np.ascontiguousarray(own)) for part, own in parts]


def _repacked(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """Blocks of ggml, uint8 [E, O, bytes]: the scale, then numbers i and i + 16 in byte i."""
    codes = torch.stack([blocks % 16, blocks // 16], dim=-1).flatten(-2)
    halves = codes[..., :16] + 16 * codes[..., 16:]
    return torch.cat([scales[..., None], halves], dim=-1).flatten(-2).numpy()


def _gguf_name(name: str) -> str:
    stem, suffix = name.removeprefix("model.").rsplit(".", 1)
    if not stem.startswith("layers."):
        return f"{NAMES[stem]}.{suffix}"
    _, layer, part = stem.split(".", 2)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"
