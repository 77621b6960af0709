"""Part `peer` of gpu.py: transformers on the pair of gpu_pair.py, plain and with the draft model, greedy.

The same weights in bfloat16, one request at a time: transformers drafts for a single request only.  Numbers
are rounded otherwise there, so texts may differ from Outrider's; `same_texts` counts those that do not.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import wide
from gpu_pair import LEAST_REQUESTS, TINY

from outrider import LLM, SamplingParams
from outrider.bench.prompts import PROMPTS, TASKS, rendered
from outrider.checkpoints.hub import Checkpoint

TOKENS, DRAFTED, ROUNDS = 96, 5, 2


def peer(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Tokens/s of transformers and of Outrider, in turns after a round that warms up."""
    checkpoint = wide.widened("builtin", TINY if tiny else wide.LLAMA_8B, device)
    with wide.opened_as("builtin-wide", checkpoint) as model:
        llm = LLM(model, speculative_config=None, device=device.type, max_model_len=512, max_num_seqs=1)
    drafting = llm.variant({"model": "builtin-draft", "num_speculative_tokens": DRAFTED})
    target = as_transformers(checkpoint, device)
    draft = as_transformers(Checkpoint.open("builtin-draft"), device)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    questions, tokens = [*TASKS, *PROMPTS], 4 if tiny else TOKENS
    prompts = [rendered(questions[i], llm.tokenizer) for i in range(1 if tiny else LEAST_REQUESTS)]
    ids = [prompt["prompt_token_ids"] for prompt in prompts]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, detokenize=False)
    runs = {
        "outrider": lambda: [list(llm.generate([p], params)[0].outputs[0].token_ids) for p in prompts],
        "outrider, draft model": lambda: [
            list(drafting.generate([p], params)[0].outputs[0].token_ids) for p in prompts
        ],
        "transformers": lambda: generated(target, None, ids, tokens, device),
        "transformers, draft model": lambda: generated(target, draft, ids, tokens, device),
    }
    texts, rates = dict[str, list[list[int]]](), dict[str, list[float]]()
    for i in range(1 if tiny else ROUNDS + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            texts[name] = run()
            taken = time.perf_counter() - began
            if i or tiny:
                rates.setdefault(name, []).append(round(sum(map(len, texts[name])) / taken, 1))
    expected = texts["outrider"]
    return {
        name: {
            "tokens_per_second": rates[name],
            "tokens": sum(map(len, texts[name])),
            "same_texts": sum(mine == other for mine, other in zip(texts[name], expected)),
            "texts": len(expected),
        }
        for name in runs
    }


def as_transformers(checkpoint: Checkpoint, device: torch.device) -> Any:
    """transformers' model with the weights of a Llama checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {key: value for key, value in vars(checkpoint.config).items() if key != "quantization_config"}
    config, source = LlamaConfig(**given), checkpoint.tensors()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(source.get(name, *parameter.shape))
            else:
                linear = source.linear(name.removesuffix(".weight"), *parameter.shape)
                parameter.copy_(wide.dense(linear))
    # its frequencies are no parameters
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model.eval()


@torch.inference_mode()
def generated(
    target: Any, draft: Any, prompts: Sequence[Sequence[int]], tokens: int, device: torch.device
) -> list[list[int]]:
    found = []
    for ids in prompts:
        given = torch.tensor([ids], device=device)
        mask = torch.ones_like(given)
        text = target.generate(
            given, attention_mask=mask, assistant_model=draft, do_sample=False, max_new_tokens=tokens
        )
        found.append(text[0, len(ids) :].tolist())
    return found
