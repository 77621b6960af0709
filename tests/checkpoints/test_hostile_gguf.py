"""Corrupt and hostile GGUF files: with any key replaced or the file cut, loading works or names the fault."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import pytest
import torch
from gguf_files import Kind
from hostile import GREEDY, PROMPT, SECONDS

from outrider import LLM, ConfigError, ModelError, RequestError
from outrider.checkpoints.gguf.file import GgufFile
from outrider.checkpoints.hub import Checkpoint

# ---- GGUF


def field(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def strings(*values: str) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(
        struct.pack("<Q", len(v)) + v.encode() for v in values
    )


FIELDS: dict[str, tuple[int, bytes]] = {
    "general.architecture": (8, struct.pack("<Q", 5) + b"llama"),
    "general.alignment": (4, struct.pack("<I", 32)),
    "split.count": (2, struct.pack("<H", 1)),
    "llama.block_count": (4, struct.pack("<I", 1)),
    "llama.embedding_length": (4, struct.pack("<I", 32)),
    "llama.feed_forward_length": (4, struct.pack("<I", 32)),
    "llama.context_length": (4, struct.pack("<I", 64)),
    "llama.attention.head_count": (4, struct.pack("<I", 2)),
    "llama.attention.head_count_kv": (4, struct.pack("<I", 1)),
    "llama.attention.key_length": (4, struct.pack("<I", 16)),
    "llama.attention.sliding_window": (4, struct.pack("<I", 32)),
    "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
    "llama.rope.freq_base": (6, struct.pack("<f", 1e4)),
    "llama.rope.scaling.factor": (6, struct.pack("<f", 2.0)),
    "tokenizer.ggml.model": (8, struct.pack("<Q", 4) + b"none"),
    "tokenizer.ggml.tokens": (9, strings("a", "b")),
    "tokenizer.ggml.token_type": (9, struct.pack("<IQ2i", 5, 2, 1, 3)),
    "tokenizer.ggml.eos_token_id": (4, struct.pack("<I", 1)),
}
TENSORS = {
    "token_embd.weight": (32, 48),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (32, 16),
    "blk.0.attn_v.weight": (32, 16),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (32, 32),
    "blk.0.ffn_up.weight": (32, 32),
    "blk.0.ffn_down.weight": (32, 32),
}
VALUES: list[tuple[int, bytes]] = [
    (5, struct.pack("<i", -1)),
    (4, struct.pack("<I", 0)),
    (12, struct.pack("<d", 1e30)),
    (10, struct.pack("<Q", 10**12)),
    (6, struct.pack("<f", 1.5)),
    (6, struct.pack("<f", float("nan"))),
    (8, struct.pack("<Q", 1) + b"x"),
    (8, struct.pack("<Q", 0)),
    (9, struct.pack("<IQ", 4, 0)),
    (9, strings("x", "y")),
    (7, b"\1"),
    (10, struct.pack("<Q", 1 << 63)),
    (10, struct.pack("<Q", 1 << 40)),
    (9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)),
    (9, struct.pack("<IQ", 9, 2) * 2 + strings("x") * 4),
    (9, struct.pack("<IQ", 8, 1 << 62)),
    (9, struct.pack("<IQ", 4, 1 << 62)),
    (8, struct.pack("<Q", (1 << 64) - 1)),
    (99, b""),
]


def gguf_bytes(
    fields: dict[str, tuple[int, bytes]],
    tensors: dict[str, tuple[int, ...]] = TENSORS,
    offset: int | None = None,
) -> bytes:
    head, at = b"", 0
    for name, shape in tensors.items():
        begin = at if offset is None else offset
        head += (
            struct.pack("<Q", len(name))
            + name.encode()
            + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, begin)
        )
        at += 4 * torch.Size(shape).numel() if max(shape) < 1 << 20 else 0
    keys = b"".join(field(key, *value) for key, value in fields.items())
    top = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + keys + head
    weights = torch.linspace(-0.2, 0.2, at // 4).numpy().tobytes()
    return top + b"\0" * (-len(top) % 32) + weights


def answer_gguf(path: Path) -> None:
    llm = LLM(str(path), max_model_len=32, kv_cache_memory_bytes=1 << 22)
    _ = llm.engine.checkpoint.ending
    with contextlib.suppress(RequestError):
        llm.generate(PROMPT, GREEDY)


@pytest.mark.parametrize("key", FIELDS)
def test_every_key_of_a_gguf_file(key: str, tmp_path: Path) -> None:
    path, wrong = tmp_path / "model.gguf", list[str]()
    path.write_bytes(gguf_bytes(FIELDS))
    answer_gguf(path)
    for value in VALUES:
        path.write_bytes(gguf_bytes({**FIELDS, key: value}))
        began = time.process_time()
        try:
            answer_gguf(path)
        except (ModelError, ConfigError) as error:
            if not any(
                name in str(error) for name in (key, str(path), key.rpartition(".")[2], "intermediate_size")
            ):
                wrong.append(f"{value[1][:20]!r}: {error}")
        except Exception as error:
            wrong.append(f"{value[0]}, {value[1][:20]!r}: {type(error).__name__}: {error}")
        if time.process_time() - began > SECONDS:
            wrong.append(f"{value[1][:20]!r} takes too long")
    assert not wrong, "\n".join(wrong)


def test_a_bias_in_few_bits_has_the_shape_of_a_bias(tmp_path: Path) -> None:
    path, name = tmp_path / "model.gguf", b"blk.0.attn_q.bias"
    whole = gguf_bytes(FIELDS, {**TENSORS, name.decode(): (32,)})
    header = name + struct.pack("<IQ", 1, 32)
    assert whole.count(header) == 1
    path.write_bytes(whole.replace(header + bytes(4), header + struct.pack("<I", Kind.Q8_0)))
    bias = Checkpoint.open(str(path)).tensors().get("model.layers.0.self_attn.q_proj.bias", 32)
    assert bias.shape == (32,)


@pytest.mark.parametrize(
    "whole",
    [
        gguf_bytes(FIELDS, offset=1 << 62),
        gguf_bytes(FIELDS, offset=(1 << 64) - 32),
        gguf_bytes(FIELDS, {**TENSORS, "token_embd.weight": (1 << 40, 1 << 40)}),
        gguf_bytes(FIELDS, {**TENSORS, "token_embd.weight": (32, 0)}),
        gguf_bytes(FIELDS)[:8] + struct.pack("<QQ", 1 << 62, 1 << 62) + gguf_bytes(FIELDS)[24:],
        gguf_bytes(FIELDS)[:8] + struct.pack("<QQ", 1, 1 << 62) + gguf_bytes(FIELDS)[24:],
        b"",
        b"GGUF",
    ],
    ids=["offset", "last offset", "dimensions", "no elements", "counts", "keys", "empty", "magic"],
)
def test_gguf_headers_that_reach_beyond_the_file(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        GgufFile(tmp_path / "model.gguf")
