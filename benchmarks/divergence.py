"""How far fewer bits of weights, K/V and activations move the answers of a model.

    python benchmarks/divergence.py --model FOLDER [--json OUT]

FOLDER holds bfloat16 weights; those of the built-in target are stored in 8 bits.  The model writes texts at
T = 0.8, and every form reads them.  Rounded activations give the same bits on every instruction set
(csrc/pairs.h).
"""

from __future__ import annotations

import json
from typing import Any

import torch
from command_line import parser_of, write
from rich.console import Console
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.bench.prompts import PROMPTS, rendered
from outrider.core.step_input import StepInput

FORMS: dict[str, dict[str, Any]] = {
    "bfloat16 activations": {"activations": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "K/V int8": {"kv_cache_dtype": "int8"},
}


def distributions(llm: LLM, text: list[int]) -> Tensor:
    """Log-probabilities [tokens, V] of the token after each position, at T = 1."""
    decoder = llm.engine.decoder
    x = decoder.forward(StepInput.of_ids(text), decoder.pool(len(text)))
    return decoder.logits(x, list(range(len(text)))).double().log_softmax(-1)


def compare(before: Tensor, after: Tensor) -> Tensor:
    """[3, tokens]: KL in nats, whether the likeliest token is the same, overlap of the distributions."""
    kl = (before.exp() * (before - after)).sum(-1)
    same = (before.argmax(-1) == after.argmax(-1)).double()
    return torch.stack([kl, same, torch.minimum(before.exp(), after.exp()).sum(-1)])


def divergence(model: str) -> dict[str, dict[str, float]]:
    """Every form against the model with all its bits, over all positions of the texts."""
    whole = LLM(model, speculative_config=None, activations="float32")
    outputs = whole.generate(
        [rendered(prompt, whole.tokenizer) for prompt in PROMPTS],
        SamplingParams(temperature=0.8, seed=1, max_tokens=160),
    )
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    before, made = [distributions(whole, text) for text in texts], {}
    for name, form in FORMS.items():
        llm = LLM(model, speculative_config=None, **{"activations": "float32", **form})
        pairs = zip(before, texts)
        found = torch.cat([compare(known, distributions(llm, text)) for known, text in pairs], dim=1)
        kl, same, overlap = found.mean(1).tolist()
        made[name] = {"mean KL": kl, "99th percentile of KL": float(found[0].quantile(0.99))}
        made[name] |= {"same greedy token": same, "overlap": overlap, "tokens": found.shape[1]}
    return made


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    found = {"conditions": conditions(), "divergence": divergence(given.model)}
    Console().print_json(json.dumps(found))
    write(given.json, found)
