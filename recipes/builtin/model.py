"""Shapes of the family, fresh weights, and export in the Hugging Face layout."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .prose import BOS, END, PAD, SPECIAL

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-shaped model with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 8192
    head_size: int = 64
    context: int = 1024


TARGET = Shape(hidden=384, layers=8, heads=6, kv_heads=2, mlp=1024)
DEEP = Shape(hidden=384, layers=24, heads=6, kv_heads=2, mlp=3200)  # 101 M weights, as builtin-100m
DRAFT = Shape(hidden=384, layers=2, heads=6, kv_heads=2, mlp=1024)


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A model with seeded weights; output projections start at zero."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=True,
        max_position_embeddings=shape.context,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=SPECIAL.index(END),
        pad_token_id=SPECIAL.index(PAD),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            torch.nn.init.zeros_(weight)
    return model


def export(model: LlamaForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write bf16 weights, tokenizer and chat template; the folder appears as a whole."""
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.config.use_cache = True
    copy.save_pretrained(temporary)
    shutil.copy(tokenizer, temporary / "tokenizer.json")
    (temporary / "chat_template.jinja").write_text(TEMPLATE, encoding="utf8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": model.config.max_position_embeddings,
    }
    (temporary / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf8")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)
