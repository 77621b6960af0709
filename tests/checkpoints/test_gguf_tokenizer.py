"""The tokenizer of a GGUF file reads and writes what the one that the file was made from does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from outrider import ModelError
from outrider.checkpoints.gguf.file import GgufFile
from outrider.checkpoints.gguf.tokenizer import read_end_tokens, read_tokenizer
from outrider.engine.detokenizer import Detokenizer
from outrider.testing import tiny_tokenizer

TEXTS = [
    "hello world",
    "  two  spaces\n\n\tand tabs ",
    "I'll say: it's 12345 o'clock, isn't IT?",
    "naïve café — “quotes” … 🦙🦙 漢字 កាន់",
    "x=3.14; y = x**2  # 100%",
    "<|bos|>in the middle<|end|>",
    "",
    " ",
    "\n",
    "a" * 30,
    "ÀÉ'S we'Ll",
    "decomposed cafe\u0301",
]


def file_of(path: Path, **fields: Any) -> GgufFile:
    """A GGUF file with nothing but tokenizer metadata; keys without the leading 'tokenizer.ggml.'."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


# ---- byte-level BPE


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    """A byte-level tokenizer that has learned from TEXTS, with three special tokens at the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer, core.decoder = pre_tokenizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(["<|bos|>", "<|end|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
    )


def fields_of(tokenizer: Any) -> dict[str, Any]:
    import json

    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "tokens": words,
        "token_type": [3 if word in tokenizer.all_special_tokens else 1 for word in words],
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "padding_token_id": tokenizer.pad_token_id,
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def split(*patterns: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def published(pre: str) -> tuple[Any, Any]:
    """Pre-tokenizer and normalizer of the models of that name, as their tokenizer.json has them."""
    from tokenizers import normalizers, pre_tokenizers

    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return plain, None
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]), None
    if pre == "llama-bpe":
        return split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), None
    if pre == "tekken":
        return split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), None
    if pre == "gpt-4o":
        return split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), None
    if pre == "qwen35":
        return split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ), normalizers.NFC()
    assert pre == "qwen2"
    return split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ), normalizers.NFC()


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "tekken", "gpt-4o", "qwen2", "qwen35"])
def test_byte_level_ids_and_texts(pre: str, tmp_path: Path) -> None:
    source = trained(*published(pre))
    ours = read_tokenizer(file_of(tmp_path / "m.gguf", pre=pre, add_bos_token=False, **fields_of(source)))
    for text in TEXTS:
        ids = source.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == source.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|bos|>", "<|end|>", "<|pad|>")
    assert ours.get_vocab() == source.get_vocab()
    assert ours.apply_chat_template([{"content": "hi"}], tokenize=False) == "<|bos|>hi"


@pytest.mark.parametrize(
    ("pre", "given", "bos"),
    [
        ("gpt-2", {}, False),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("gpt-2", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_if_the_metadata_say_so(
    pre: str, given: dict[str, Any], bos: bool, tmp_path: Path
) -> None:
    fields = fields_of(trained(published(pre)[0]))
    ours = read_tokenizer(file_of(tmp_path / "m.gguf", pre=pre, **given, **fields))
    ids = ours.encode("hello")
    assert (ids[0] == fields["bos_token_id"]) == bos
    assert ours.decode(ids, skip_special_tokens=True) == "hello"
    assert ours.encode("hello", add_special_tokens=False) == ids[bos:]


@pytest.mark.parametrize(
    ("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)]
)
def test_a_word_that_is_a_token_may_be_taken_whole(pre: str, whole: bool, tmp_path: Path) -> None:
    """Llama 3's merges do not lead to every token of its vocabulary."""
    fields = fields_of(trained(published(pre)[0]))
    fields["tokens"] += ["zqzq"]
    fields["token_type"] += [1]
    ours = read_tokenizer(file_of(tmp_path / "m.gguf", pre=pre, add_bos_token=False, **fields))
    assert (ours.encode("zqzq") == [len(fields["tokens"]) - 1]) == whole


# ---- SentencePiece

PIECES = [
    "▁",
    "▁h",
    "▁he",
    "ll",
    "o",
    "▁hello",
    "l",
    "h",
    "e",
    "w",
    "r",
    "d",
    "or",
    "▁w",
    "▁wor",
    "ld",
    "▁world",
    "lo",
    "a",
    "b",
    "ab",
]


def sentencepiece_fields() -> dict[str, Any]:
    octets = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, *PIECES, "<extra>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0, 0.0, 0.0, *[0.0] * 256, *(-float(i) for i in range(len(PIECES))), 0.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, **ids}


def naive(text: str, fields: dict[str, Any]) -> list[int]:
    """SentencePiece's BPE: join the neighbours with the highest-scoring union, the leftmost first."""
    score = {
        t: s for t, s, kind in zip(fields["tokens"], fields["scores"], fields["token_type"]) if kind == 1
    }
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [fields["tokens"].index(part)] if part in score else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_ids_and_texts(tmp_path: Path) -> None:
    fields = sentencepiece_fields()
    ours = read_tokenizer(file_of(tmp_path / "m.gguf", **fields))
    for text in ["hello world", "hello", "worldhello ab", "  ab  ba", "héllo 漢", "lolollo", "a\nb"]:
        ids = ours.encode(text)
        assert ids == [1, *naive(text, fields)], text
        assert ours.decode(ids, skip_special_tokens=True) == text
        reader = Detokenizer(ours)
        for token in ids:
            reader.feed(token)
        reader.flush()
        assert reader.text == text
    assert ours.encode("ab<extra>ab</s>")[-6:].count(fields["tokens"].index("<extra>")) == 1
    assert ours.encode("ab</s>")[-1] == 2


def test_a_file_may_ask_for_no_space_and_no_bos(tmp_path: Path) -> None:
    ours = read_tokenizer(
        file_of(tmp_path / "m.gguf", **sentencepiece_fields(), add_space_prefix=False, add_bos_token=False)
    )
    tokens = sentencepiece_fields()["tokens"]
    assert ours.encode("ab") == [tokens.index("ab")]
    assert ours.decode(ours.encode("ab ab")) == "ab ab"


# ---- the rest


def test_ending_ids_come_from_the_metadata_and_from_well_known_control_tokens(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(8)]
    words[5], words[6], words[7] = "<|im_end|>", "<|endoftext|>", "<|eot_id|>"
    common = {
        "model": "gpt2",
        "tokens": words,
        "token_type": [1, 1, 1, 1, 1, 3, 3, 1],
        "eos_token_id": 2,
        "eot_token_id": 3,
    }
    assert read_end_tokens(file_of(tmp_path / "m.gguf", **common)) == {
        2,
        3,
        5,
        6,
    }  # "<|eot_id|>" is an ordinary word here
    assert read_end_tokens(file_of(tmp_path / "n.gguf", model="none")) == frozenset()


def test_the_end_of_a_message_of_gpt_oss_is_no_end_of_the_text(tmp_path: Path) -> None:
    """Its answer follows what it thinks."""
    tokens = ["a", "<|end|>", "<|return|>", "<|call|>"]
    common: dict[str, Any] = {"token_type": [1, 3, 3, 3], "scores": [0.0] * 4, "eos_token_id": 2}
    assert read_end_tokens(file_of(tmp_path / "m.gguf", tokens=tokens, **common)) == {2, 3}
    tokens[3] = "b"
    assert read_end_tokens(file_of(tmp_path / "n.gguf", tokens=tokens, **common)) == {1, 2}


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    assert read_tokenizer(file_of(tmp_path / "m.gguf")) is None


@pytest.mark.parametrize(
    ("given", "message"), [({"model": "t5"}, "'t5'"), ({"pre": "nobody-9"}, "'nobody-9'")]
)
def test_an_unknown_tokenizer_is_named_with_the_cure(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = file_of(tmp_path / "m.gguf", **{**fields_of(tiny_tokenizer()), **given})
    with pytest.raises(ModelError, match=rf'{message}.*LLM\(tokenizer="a folder"\)'):
        read_tokenizer(file)
