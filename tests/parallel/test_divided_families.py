"""Every family of the lean decoder on several ranks: biases, norms of heads, windows, a shared embedding."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import token_prompts
from parallel_cases import PROMPTS, params_of

from outrider import LLM
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.testing import check_idle, tiny_checkpoint, use_example, visible_parts

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 13}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {}),
}
QUICK = ("biases", "Qwen3")


def computed(llm: LLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two rows of a prompt, and the last hidden states of all."""
    decoder, step, states = llm.engine.decoder, StepInput(), {FINAL: torch.empty(0)}
    step.chain(array("i", range(32)), 0, PROMPTS[0][:30])
    step.logits_rows = [3, 29]
    logits = decoder.forward_step(step.build(), decoder.pool(32), states)
    return logits.clone(), states[FINAL]


@pytest.mark.parametrize("divided", ["tensor", "pipeline"])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FAMILIES]
)
def test_families_are_those_of_one_process_and_keep_every_token(
    tmp_path: Path, family: str, divided: str
) -> None:
    name, config = FAMILIES[family]
    folder = tiny_checkpoint(tmp_path, name, **config)
    several = LLM(folder, max_model_len=64, **{f"{divided}_parallel_size": 2})
    torch.testing.assert_close(computed(several), computed(LLM(folder)), rtol=1e-4, atol=1e-4)
    texts = list[object]()
    for method in ("off", "draft_model"):
        use_example(several, method)
        outputs = several.generate(token_prompts(PROMPTS), params_of(0.8))
        texts.append([visible_parts(output.outputs) for output in outputs])
    assert texts[0] == texts[1] and sum(output.speculation.accepted for output in outputs) > 0
    check_idle(several)
