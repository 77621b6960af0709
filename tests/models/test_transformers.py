"""The lean decoder equals transformers for every architecture, flag and file layout it supports."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import decoder_of, text_logits, transformers_tokens

from outrider import LLM, SamplingParams
from outrider.backends.select import fast_bfloat16

NEW = 48
LENGTHS = (1, 9, 30, 70)  # five prompts of each, so that transformers can batch them without padding


def rope(kind: str, **given: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **given}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
LONG = {
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "factor": 4.0,
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("Llama", {"num_hidden_layers": 3}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim-24": ("Llama", {"head_dim": 24}),
    "llama-head-dim-40": ("Llama", {"head_dim": 40}),
    "llama-llama3-rope": ("Llama", LLAMA3),
    "llama-linear-rope": ("Llama", rope("linear", factor=4.0)),
    "llama-longrope-short": ("Llama", rope("longrope", **LONG, original_max_position_embeddings=256)),
    "llama-yarn-rope": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 13}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-bias-tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "mixtral-window": ("Mixtral", {**EXPERTS, "sliding_window": 13}),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 11,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "intermediate_size": 100,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def prompts(vocabulary: int = 300) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in LENGTHS for _ in range(5)]


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def theirs(model: Any, new: int = NEW) -> list[list[int]]:
    """transformers' greedy continuations; the prompts of one length at a time."""
    out: list[list[int]] = []
    for length in LENGTHS:
        out += transformers_tokens(model, [prompt for prompt in prompts() if len(prompt) == length], new)
    return out


def ours(folder: Path, new: int = NEW, **engine: Any) -> list[list[int]]:
    llm = LLM(str(folder), max_num_seqs=20, seed=0, **engine)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], params)
    llm.engine.check()
    return [o.outputs[0].token_ids for o in outputs]


def assert_same(expected: list[list[int]], got: list[list[int]], new: int = NEW) -> None:
    """Token for token: no two logits here are so near that float32 sums in another order exchange them."""
    for prompt, a, b in zip(prompts(), expected, got, strict=True):
        assert len(a) == len(b) == new
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
        assert at is None, f"prompt of {len(prompt)}: token {at} is {b[at]}, expected {a[at]}"


def assert_varied(texts: list[list[int]]) -> None:
    """The outputs are worth comparing: they differ from each other and do not repeat one token."""
    assert len({tuple(t) for t in texts}) >= 18
    assert sum(len(set(t)) for t in texts) / len(texts) > 12


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_transformers(name: str, checkpoint: Any) -> None:
    family, config = MODELS[name]
    folder = checkpoint(family, **config)
    expected = theirs(reference(folder))
    assert_varied(expected)
    assert_same(expected, ours(folder))


@pytest.mark.parametrize(
    "name", ["llama-biases", "mistral-window", "qwen3", "mixtral-window", "gemma2", "gemma3"]
)
def test_torch_kernels_equal_transformers(
    name: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    family, config = MODELS[name]
    folder, new = checkpoint(family, **config), 16  # behind 13, the longest window
    assert_same(theirs(reference(folder), new), ours(folder, new), new)


def logits(folder: Path, ids: list[int], dtype: torch.dtype, max_len: int = 256) -> torch.Tensor:
    return text_logits(decoder_of(folder, dtype, max_len), ids)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3Text"])
@pytest.mark.parametrize("backend", ["", "torch"])
def test_float32_logits_are_those_of_transformers(
    family: str, backend: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    folder, ids = checkpoint(family), prompts()[-1]
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(folder, ids, torch.float32), expected, rtol=1e-3, atol=5e-4)


def test_llama_ignores_a_sliding_window(checkpoint: Any) -> None:
    """In one forward: only transformers' cache heeds the key, and drops what its attention would read."""
    folder, ids = checkpoint("Llama", sliding_window=5), prompts()[-1]
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(logits(folder, ids, torch.float32), expected, rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("length", [64, 100])
@pytest.mark.parametrize(
    "scaling",
    [
        {**rope("dynamic", factor=4.0), "max_position_embeddings": 64},
        rope("longrope", **LONG, original_max_position_embeddings=64),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_rope_that_depends_on_the_length_is_taken_for_the_longest_text(
    scaling: dict[str, Any], length: int, checkpoint: Any
) -> None:
    """Up to 64 positions nothing is scaled; beyond, all are, as transformers does for that length."""
    folder, ids = checkpoint(**scaling), (prompts()[-1] * 2)[:length]
    with torch.inference_mode():
        expected = reference(folder)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits(folder, ids, torch.float32, length), expected, rtol=1e-3, atol=5e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Gemma3Text"])
def test_bfloat16_logits_are_near_those_of_transformers_in_float32(family: str, checkpoint: Any) -> None:
    """Only K and V are rounded to bfloat16 (8 bits); sums and activations stay float32.

    So the logits stay within a few percent of their spread; stock bfloat16 is several times further away.
    """
    folder, ids = checkpoint(family, dtype=torch.bfloat16), prompts()[-1]
    model = reference(folder)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
        stock = model.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float()
    ours = logits(folder, ids, torch.bfloat16)
    error, stock_error = ((x - expected).pow(2).mean().sqrt().item() for x in (ours, stock))
    assert error < 0.02 * expected.std()
    assert error < stock_error
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_auto_dtype_follows_the_checkpoint(checkpoint: Any) -> None:
    assert LLM(str(checkpoint())).engine.decoder.dtype == torch.float32
    if fast_bfloat16(torch.device("cpu")):
        assert LLM(str(checkpoint(dtype=torch.bfloat16))).engine.decoder.dtype == torch.bfloat16
    assert LLM(str(checkpoint(dtype=torch.bfloat16)), dtype="float32").engine.decoder.dtype == torch.float32
    assert LLM(str(checkpoint()), dtype="bfloat16").engine.decoder.dtype == torch.bfloat16


def as_bin(source: Path, target: Path, shards: int) -> Path:
    """The same checkpoint in torch's own files, as old checkpoints have them."""
    from safetensors.torch import load_file

    tensors = load_file(source / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    if shards == 1:
        torch.save(tensors, target / "pytorch_model.bin")
        return target
    where = {}
    names = sorted(tensors)
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: tensors[name] for name in names[i::shards]}, target / file)
        where |= dict.fromkeys(names[i::shards], file)
    (target / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return target


def test_every_file_layout_loads_equal(checkpoint: Any, tmp_path: Path) -> None:
    whole, sharded = checkpoint(), checkpoint(max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    ids = prompts()[-1]
    expected = logits(whole, ids, torch.float32)
    for folder in (sharded, as_bin(whole, tmp_path / "one", 1), as_bin(whole, tmp_path / "many", 3)):
        assert torch.equal(logits(folder, ids, torch.float32), expected)


def test_safetensors_go_before_bin(checkpoint: Any, tmp_path: Path) -> None:
    """Where a folder has both, the .bin is not even opened."""
    for file in checkpoint().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    ids = prompts()[-1]
    assert torch.equal(logits(tmp_path, ids, torch.float32), logits(checkpoint(), ids, torch.float32))
