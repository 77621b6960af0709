"""The context under each RoPE scaling, and transformers' text on both sides of a border."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import transformers_tokens

from outrider import LLM, SamplingParams
from outrider.checkpoints.context import Context
from outrider.errors import ConfigError, RequestError

SHORT, LONG = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 4.0}
BORDER = 64


def scaled(kind: str, **given: Any) -> dict[str, Any]:
    return {"rope_scaling": {"type": kind, **given}}


@pytest.mark.parametrize(
    ("family", "config", "tokens", "unscaled"),
    [
        ("Qwen2", {"max_position_embeddings": 32768}, 32768, 32768),
        (
            "Qwen2",
            {
                "max_position_embeddings": 32768,
                **scaled("yarn", factor=4.0, original_max_position_embeddings=32768),
            },
            131072,
            131072,
        ),
        (
            "DeepseekV3",
            {
                "max_position_embeddings": 163840,
                **scaled("yarn", factor=40.0, original_max_position_embeddings=4096),
            },
            163840,
            163840,
        ),
        ("Llama", {"max_position_embeddings": 4096, **scaled("linear", factor=4.0)}, 16384, 16384),
        ("Llama", {"max_position_embeddings": 4096, **scaled("yarn", factor=2.0)}, 8192, 8192),
        ("Llama", {"max_position_embeddings": 4096, **scaled("dynamic", factor=2.0)}, 8192, 4096),
        (
            "Llama",
            {
                "max_position_embeddings": 131072,
                **scaled(
                    "llama3",
                    factor=8.0,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                    original_max_position_embeddings=8192,
                ),
            },
            131072,
            131072,
        ),
        (
            "Phi3",
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "num_attention_heads": 4,
                "hidden_size": 64,
                **scaled("longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8),
            },
            131072,
            4096,
        ),
        (
            "Gemma3Text",
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            131072,
            131072,
        ),
    ],
)
def test_scaling_extends_the_context_as_in_vllm(
    family: str, config: dict[str, Any], tokens: int, unscaled: int
) -> None:
    """As vLLM derives max_model_len."""
    made = getattr(transformers, f"{family}Config")(**config)
    assert Context.of(made) == Context(tokens, unscaled)


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def theirs(folder: Path, prompt: list[int], new: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return transformers_tokens(model, [prompt], new)[0]


def greedy(llm: LLM, asked: list[list[int]], new: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], params)
    llm.engine.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", ["Llama", "Olmo2"])
@pytest.mark.parametrize(
    "config",
    [scaled("linear", factor=4.0), scaled("yarn", factor=4.0, original_max_position_embeddings=BORDER)],
    ids=["linear", "yarn"],
)
def test_text_beyond_the_unscaled_positions_is_that_of_transformers(
    family: str, config: dict[str, Any], checkpoint: Any
) -> None:
    """In the lean decoder and in transformers' own code."""
    folder, asked = checkpoint(family, max_position_embeddings=BORDER, **config), prompts(40, 150)
    assert greedy(LLM(str(folder)), asked, 32) == [theirs(folder, prompt, 32) for prompt in asked]
    assert LLM(str(folder), max_model_len=200).engine.max_len == 200
    with pytest.raises(ConfigError, match="at most 256"):
        LLM(str(folder), max_model_len=257)


def longrope(checkpoint: Any, family: str) -> Path:
    """Llama runs in the lean decoder, Phi-3 in transformers' own code."""
    own = {"original_max_position_embeddings": BORDER}
    if family == "Llama":
        return Path(checkpoint(rope_parameters={**LONGROPE, "rope_theta": 1e4, **own}))
    return Path(checkpoint(family, rope_parameters={**LONGROPE, "rope_theta": 1e4}, **own))


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_longrope_on_both_sides_of_the_border(
    family: str, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By default short factors, and no text beyond; with a longer max_model_len, long ones and a warning."""
    folder = longrope(checkpoint, family)
    short, long, straddling = prompts(BORDER - 24, BORDER + 40, BORDER - 4)
    with caplog.at_level(logging.WARNING, "outrider"):
        llm = LLM(str(folder))
        assert llm.engine.max_len == BORDER
        assert greedy(llm, [short], 24) == [theirs(folder, short, 24)]
        assert "scaled for texts" not in caplog.text
        with pytest.raises(RequestError, match="raise max_model_len"):
            llm.generate({"prompt_token_ids": long})
        longer = LLM(str(folder), max_model_len=200)
        assert "scaled for texts of 200 tokens" in caplog.text
    assert greedy(longer, [long], 24) == [theirs(folder, long, 24)]
    assert greedy(longer, [short], 24) != greedy(llm, [short], 24)
    fast = longer.variant({"method": "ngram", "num_speculative_tokens": 3})
    for _ in range(2):  # the second time the prompts' pages are found in the prefix index
        assert greedy(fast, [straddling, long], 40) == greedy(longer, [straddling, long], 40)


def test_dynamic_scaling_leaves_the_default_context_alone(checkpoint: Any) -> None:
    folder = checkpoint(max_position_embeddings=BORDER, **scaled("dynamic", factor=4.0))
    (short,) = prompts(BORDER - 24)
    llm = LLM(str(folder))
    assert greedy(llm, [short], 24) == [theirs(folder, short, 24)]
    assert LLM(str(folder), max_model_len=4 * BORDER).engine.max_len == 4 * BORDER
