"""Tiny checkpoints of one network under several tokenizers: other ids, spellings and words."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.testing import tiny_checkpoint, tiny_tokenizer

LETTER = bytes_to_unicode()
OCTET = {letter: byte for byte, letter in LETTER.items()}

Words = Sequence[bytes | str]  # id -> bytes of the token, or the role of a special one
Merges = list[tuple[bytes, bytes]]


def tiny_words() -> tuple[Words, Merges]:
    """Words of the tokens of `tiny_tokenizer`, and its merges."""
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    words = sorted(core["vocab"], key=core["vocab"].__getitem__)
    return ["bos", "eos", "pad", *map(_word_bytes, words[3:])], [
        (_word_bytes(a), _word_bytes(b)) for a, b in core["merges"]
    ]


def letters() -> tuple[Words, Merges]:
    """One token a character and no merges: a text is tokenised in one way only."""
    return ["bos", "eos", "pad", b"\n", *(bytes([c]) for c in range(0x20, 0x7F))], []


def _word_bytes(word: str) -> bytes:
    return bytes(OCTET[c] for c in word) if set(word) <= OCTET.keys() else word.encode()


def byte_level(words: Words, merges: Merges) -> Any:
    """Spelled as GPT-2, Llama 3 and Qwen do."""
    from tokenizers import decoders, pre_tokenizers

    names = {"bos": "<|bos|>", "eos": "<|end|>", "pad": "<|pad|>"}
    made = _tokenizer(words, merges, lambda output: "".join(LETTER[b] for b in output), names)
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.backend_tokenizer.decoder = decoders.ByteLevel()
    return made


def sentencepiece(words: Words, merges: Merges) -> Any:
    """Spelled as Llama 2 and Mistral do, with a space put before every text and BOS before that."""
    from tokenizers import decoders, normalizers, processors

    def spell(output: bytes) -> str:
        return (
            output.decode().replace(" ", "▁")
            if output.isascii() and output != b"\n"
            else f"<0x{output[0]:02X}>"
        )

    made = _tokenizer(words, merges, spell, {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}, byte_fallback=True)
    core = made.backend_tokenizer
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words.index("bos"))]
    )
    return made


def _tokenizer(
    words: Words, merges: Merges, spell: Callable[[bytes], str], names: dict[str, str], **given: Any
) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        names[output] if isinstance(output, str) else spell(output): i for i, output in enumerate(words)
    }
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[(spell(a), spell(b)) for a, b in merges], **given))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **{f"{role}_token": name for role, name in names.items()}
    )


def checkpoint_of(
    folder: Path,
    words: Words,
    merges: Merges,
    kind: Callable[[Words, Merges], Any] = byte_level,
    **config: Any,
) -> str:
    """A random model with this tokenizer."""
    path = tiny_checkpoint(folder, vocab_size=len(words), **config)
    kind(words, merges).save_pretrained(folder)
    return path


def twin(
    source: str,
    folder: Path,
    words: Words,
    merges: Merges,
    kind: Callable[[Words, Merges], Any],
    keep: float = 1.0,
) -> str:
    """The network of `source`, whose tokens say `words`, with its ids shuffled, under a tokenizer of its own.

    keep: the share of words that the tokenizer still has; the others represent something that the source does
    not know.
    """
    rng, order = random.Random(7), list(range(len(words)))
    rng.shuffle(order)  # old id -> new id
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.empty_like(weights[name])
        moved[torch.tensor(order)] = weights[name]
        weights[name] = moved
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    lost = {
        output
        for output in words
        if isinstance(output, bytes) and (len(output) > 1 or keep == 0) and rng.random() > keep
    }
    new: list[bytes | str] = [b""] * len(words)
    for i, output in enumerate(words):
        new[order[i]] = f"<unknown {i}>".encode() if output in lost else output
    kept = [(a, b) for a, b in merges if a + b not in lost]
    kind(new, kept).save_pretrained(folder)
    roles = {f"{role}_token_id": order[words.index(role)] for role in ("bos", "eos", "pad")}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **roles}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": roles["eos_token_id"]}))
    return str(folder)
