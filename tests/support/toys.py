"""A toy target whose text can be learnt in a few hundred steps, and how a head is taught it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider import LLM, SamplingParams
from outrider.core.step import FINAL
from outrider.heads.sample import Sample, TargetWeights, read_states, target_logits
from outrider.models.base import Model
from outrider.testing import random_model
from outrider.testing.checkpoints import TINY

V, HIDDEN, LAYERS = 512, TINY["hidden_size"], 8  # large enough for three different taps


def toy_target(folder: Path, **config: Any) -> str:
    """Save a random Llama of 8 layers whose next token depends mostly on the last one; return the folder.

    The layers add little to the scaled embedding.
    """
    sizes = {"vocab_size": V, "num_hidden_layers": LAYERS, "head_dim": 16, "initializer_range": 0.1}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = random_model("Llama", TINY | sizes | special | config, seed=7, vector_noise=0)
    model.model.embed_tokens.weight.data.mul_(10.0)
    model.lm_head.weight.data.mul_(4.0)
    model.save_pretrained(folder)
    return str(folder)


def read(model: Model, tokens: Sequence[int], wanted: Sequence[int]) -> Sample:
    """The sample of one text.  wanted: the states, as in `Needs.states`."""
    states = read_states(model, [tokens], {*wanted, FINAL})
    logits = target_logits(model, states[FINAL])
    return Sample(torch.tensor(tokens), {which: states[which] for which in wanted}, logits)


def asked(count: int = 8, length: int = 48, **params: Any) -> tuple[list[Any], list[SamplingParams]]:
    """Random prompts, and requests of sampled texts after them."""
    rng = random.Random(99)
    prompts = [{"prompt_token_ids": [rng.randrange(V) for _ in range(6)]} for _ in range(count)]
    given = {"temperature": 0.7, "max_tokens": length, "ignore_eos": True, **params}
    return prompts, [SamplingParams(**{"seed": i, **given}) for i in range(count)]


def samples(llm: LLM, wanted: Sequence[int], **given: Any) -> list[Sample]:
    """The texts of `acceptance`, unless others are asked for: a head learns to repeat them in few steps.

    It is right only where states and tokens align.
    """
    model: Model = llm.engine.decoder
    output = llm.generate(*asked(**given), use_tqdm=False)
    return [read(model, [*out.prompt_token_ids, *out.outputs[0].token_ids], wanted) for out in output]


def teach(
    network: nn.Module,
    loss: Callable[[Sample, TargetWeights], Tensor],
    data: Sequence[Sample],
    outer: TargetWeights,
    steps: int = 300,
    rate: float = 3e-3,
) -> float:
    """Adam, one batch of 8 texts a step; the mean loss of the last ten steps."""
    wanted = [p for p in network.parameters() if p.requires_grad]
    adam, rng, seen = torch.optim.Adam(wanted, lr=rate), random.Random(1), []
    for _ in range(steps):
        batch = rng.sample(list(data), 8)
        value = torch.stack([loss(sample, outer) for sample in batch]).mean()
        adam.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        adam.step()
        seen.append(float(value.detach()))
    return sum(seen[-10:]) / 10


def save_head(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors"
) -> str:
    """Writes a head as a checkpoint folder: safetensors, or a pickle of tensors, aliases and all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(
            {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / file
        )
    else:
        torch.save(tensors, folder / file)
    return str(folder)


def acceptance(
    target: str, speculation: dict[str, Any], count: int = 8, length: int = 48, **params: Any
) -> float:
    """Accepted / drafted tokens over some texts, which must equal plain decoding."""
    plain, fast = (
        LLM(target, dtype="float32", speculative_config=config).generate(
            *asked(count, length, **params), use_tqdm=False
        )
        for config in (None, speculation)
    )
    assert [out.outputs[0].token_ids for out in fast] == [out.outputs[0].token_ids for out in plain]
    stats = [out.outputs[0].speculation for out in fast]
    return sum(t.accepted for t in stats) / max(1, sum(t.drafted for t in stats))
