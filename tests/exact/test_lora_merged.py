"""The text of an adapter is that of merged weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import pairwise
from helpers import token_prompts, write_adapter
from safetensors.torch import load_file, save_file

from outrider import LLM, LoRARequest, SamplingParams
from outrider.testing import random_prompts, tiny_checkpoint, visible_parts

PROMPTS = random_prompts(6, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ODD = {"hidden_size": 60, "intermediate_size": 90, "head_dim": 14}  # no whole vectors
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "two": {"projections": "q v", "binary": True},
    "patterns": {
        "r": 3,
        "rank_pattern": {"k_proj": 9, "layers.1.mlp.down_proj": 1},
        "alpha_pattern": {".*o_proj": 1, "k_proj": 32},
    },
    "stabilised": {"r": 16, "use_rslora": True, "rank_pattern": {"q_proj": 4}},
}


def merged(model: str, to: Path, matrices: dict[str, Any], scale: Callable[[str, int], float]) -> str:
    shutil.copytree(model, to)
    weights = load_file(to / "model.safetensors")
    for module, (a, b) in matrices.items():
        weights[f"{module}.weight"] = (
            weights[f"{module}.weight"].double() + scale(module, a.shape[0]) * (b.double() @ a.double())
        ).float()
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return str(to)


SCALES: dict[str, Callable[[str, int], float]] = {
    "all": lambda module, rank: 8 / 4,
    "two": lambda module, rank: 8 / 4,
    "patterns": lambda module, rank: (
        (1 if module.endswith("o_proj") else 32 if module.endswith("k_proj") else 8) / rank
    ),
    "stabilised": lambda module, rank: 8 / rank**0.5,
}


@pairwise(family=["Llama", "Qwen2", "Qwen3", "Gemma2"], kind=list(ADAPTERS), backend=["c", "torch"])
def test_adapters_emit_the_tokens_of_merged_weights(
    family: str, kind: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy tokens of W + scale B A in float32.

    Qwen2 has biases, Qwen3 norms of queries and keys, Gemma 2 norms of what is added.
    """
    monkeypatch.setenv("OUTRIDER_KERNELS", backend)
    model = tiny_checkpoint(tmp_path / "model", family, **(ODD if family == "Llama" else {}))
    matrices = write_adapter(tmp_path / "adapter", model, **ADAPTERS[kind])
    expected = LLM(merged(model, tmp_path / "merged", matrices, SCALES[kind])).generate(
        token_prompts(PROMPTS), GREEDY
    )
    llm = LLM(model, enable_lora=True)
    got = llm.generate(
        token_prompts(PROMPTS), GREEDY, lora_request=LoRARequest("it", 1, str(tmp_path / "adapter"))
    )
    assert [visible_parts(o.outputs) for o in got] == [visible_parts(o.outputs) for o in expected]
    base = llm.generate(token_prompts(PROMPTS), GREEDY)
    assert (
        sum(visible_parts(a.outputs) != visible_parts(b.outputs) for a, b in zip(got, base))
        > len(PROMPTS) // 2
    ), "the adapter says nothing new"
