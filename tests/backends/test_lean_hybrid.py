"""Lean hybrids of odd sizes, from prefill to replayed drafts; scripts/sanitize runs it, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hybrid_texts import prompts, sampling, texts
from hybrids import write

from outrider import LLM

ODD: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 17,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 7,
}
SMALL: dict[str, Any] = {"linear_key_head_dim": 1, "linear_value_head_dim": 1, "linear_conv_kernel_dim": 2}
RECURRENT_FIRST = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("qwen3.5", ODD, {}),
        ("qwen3.5", {**SMALL, **RECURRENT_FIRST}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
        ("qwen3-next", {**ODD, "shared_expert_intermediate_size": 7}, {"quantization": "int8"}),
        ("qwen3.5-moe", {"shared_expert_intermediate_size": 1}, {"quantization": "int4"}),
    ],
)
def test_odd_sizes(family: str, config: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts in chunks of 11 tokens, rejected and replayed drafts, prefix hits, and a draft chain."""
    write(family, tmp_path, **config)
    llm = LLM(str(tmp_path), max_num_seqs=3, max_model_len=64, max_num_batched_tokens=11, **options)
    given = [*prompts((1, 23)), *prompts((23,))]
    given.append(given[1][:20] + given[2])
    params = [replace(each, max_tokens=6, n=1) for each in sampling(0.8, len(given))]
    expected = texts(llm, given, params)
    for drafts in (
        {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "recycle"},
        {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3},
    ):
        llm.use(drafts)
        assert texts(llm, given, params) == expected == texts(llm, given, params)
