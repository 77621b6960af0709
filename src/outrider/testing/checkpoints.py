"""Tiny checkpoints with random weights, for tests that load a model from disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
BOS, EOS, PAD = 0, 1, 2
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 300 tokens.

    They are BOS, EOS and PAD, printable ASCII, some halves of UTF-8 characters, and pairs of common letters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letter_of = bytes_to_unicode()  # type: ignore[no-untyped-call]
    octets = [0x0A, *range(0x20, 0x7F), 0xC3, 0xE2, *range(0x80, 0x90)]
    words = ["<|bos|>", "<|end|>", "<|pad|>", *(letter_of[octet] for octet in octets)]
    common = [letter_of[ord(character)] for character in " etaoinshrdlu"]
    merges = list(itertools.product(common, repeat=2))[: VOCABULARY - len(words)]
    words += [first + second for first, second in merges]
    words += [f"<|spare {i}|>" for i in range(VOCABULARY - len(words))]
    core = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=merges))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)  # type: ignore[no-untyped-call]


def random_model(family: str, config: dict[str, Any], seed: int = 0, vector_noise: float = 0.2) -> Any:
    """A transformers model of a family ("Llama", "Qwen3", "GPT2", ...) with random float32 weights.

    config: every key of the family's config that matters.
    vector_noise: standard deviation added to biases and norm weights. A fresh model has them at 0 and 1, so
    code that omits one of them would still pass a test.
    """
    import transformers

    settings = getattr(transformers, f"{family}Config")(**config)
    # Falcon's eager attention adds its ALiBi biases twice
    attention = "sdpa" if config.get("alibi") else "eager"
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(settings, attn_implementation=attention).to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        if vector_noise and (parameter.dim() == 1 or name.endswith("bias")):
            parameter.data.add_(torch.randn_like(parameter) * vector_noise)
    return model


def tiny_checkpoint(
    folder: str | Path, family: str = "Llama", seed: int = 0, eos: Sequence[int] = (EOS,), **config: Any
) -> str:
    """Save a random float32 model of two layers and 300 tokens with its tokenizer; return the folder.

    eos: the ids that end a text. config: further keys of the family's config. The weights are large
    (initializer_range 0.25), so that the output depends on every token of the context.
    """
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    sizes = TINY | special | {"head_dim": 16, "initializer_range": 0.25}
    random_model(family, sizes | config, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    ending = json.dumps({"eos_token_id": list(eos)})
    (Path(folder) / "generation_config.json").write_text(ending, encoding="utf-8")
    return str(folder)


def bare_checkpoint(
    folder: str | Path,
    family: str = "Llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vector_noise: float = 0.2,
    max_shard_size: str | None = None,
    **config: Any,
) -> Path:
    """Save a random model of two layers without tokenizer and special tokens; return the folder.

    config: further keys of the family's config. max_shard_size: as for `save_pretrained`.
    """
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = random_model(family, TINY | special | {"initializer_range": 0.2} | config, seed, vector_noise)
    shards = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(folder, **shards)
    return Path(folder)
