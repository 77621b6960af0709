"""Medusa's heads as files of every layout, naive ones in float64, and their drafts in an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from toys import HIDDEN, V

from outrider import LLM, SamplingParams
from outrider.core.tree import DraftTree
from outrider.draft.medusa import Medusa
from outrider.testing import check_tree

Parts = list[
    tuple[list[tuple[Tensor, Tensor | None]], Tensor | None]
]  # of each head: its blocks, and its lm_head
Named = dict[str, Tensor]
CONFIG = {
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}  # as published, the 2 is wrong
PT, SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"


def parts_of(
    heads: int = 3, blocks: int = 1, shared: bool = True, bias: bool = True, own: bool = True
) -> Parts:
    torch.manual_seed(5)

    def block() -> tuple[Tensor, Tensor | None]:
        return torch.randn(HIDDEN, HIDDEN) * 0.2, torch.randn(HIDDEN) * 0.2 if bias else None

    made: Parts = []
    for _ in range(heads):
        one = [block() for _ in range(1 if shared else blocks)]
        made.append(((one * blocks)[:blocks], torch.randn(V, HIDDEN) * 0.3 if own else None))
    return made


def reference(parts: Parts, prefix: str = "") -> Named:
    """The names of v0.1; a shared block is the same tensor under several."""
    named: Named = {}
    for i, (blocks, lm_head) in enumerate(parts):
        for j, (weight, bias) in enumerate(blocks):
            named[f"{prefix}{i}.{j}.linear.weight"] = weight
            if bias is not None:
                named[f"{prefix}{i}.{j}.linear.bias"] = bias
        if lm_head is not None:
            named[f"{prefix}{i}.{len(blocks)}.weight"] = lm_head
    return named


def vllm(parts: Parts, prefix: str = "") -> Named:
    named: Named = {}
    for i, (blocks, lm_head) in enumerate(parts):
        for j, (weight, bias) in enumerate(blocks):
            named[f"{prefix}blocks.{i}.layers.{j}.weight"] = weight
            if bias is not None:
                named[f"{prefix}blocks.{i}.layers.{j}.bias"] = bias
        if lm_head is not None:
            named[f"{prefix}lm_heads.{i}.weight"] = lm_head
    return named


def naive(parts: Parts, states: Tensor, lm_head: Tensor | None = None) -> Tensor:
    """[n, heads, V] in float64, from the description."""
    output = []
    for blocks, own in parts:
        x = states.double()
        for weight, bias in blocks:
            y = x @ weight.double().T + (0 if bias is None else bias.double())
            x = x + y / (1 + (-y).exp())
        matrix = lm_head if own is None else own
        assert matrix is not None
        output.append(x @ matrix.double().T)
    return torch.stack(output, dim=1)


def save_merged(folder: Path, target: str, parts: Parts) -> str:
    """Heads beside a whole model, in two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = {**load_file(Path(target) / "model.safetensors"), **reference(parts, "medusa_head.")}
    names, shards = sorted(whole), ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    where = {name: shards[i * 2 // len(names)] for i, name in enumerate(names)}
    for shard in shards:
        torch.save({name: whole[name] for name in names if where[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = json.loads((Path(target) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 2, "medusa_num_layers": 1}))
    return str(folder)


def drafter_of(llm: LLM, folder: str, **options: Any) -> Medusa:
    return Medusa(Medusa.Options(model=folder, **options), llm.engine.target)


def without(named: Named, *names: str) -> Named:
    return {name: tensor for name, tensor in named.items() if name not in names}


def listened(llm: LLM, prompt: list[int], **params: Any) -> list[tuple[list[int], DraftTree]]:
    """The tokens of a row and the draft tokens after them, step by step."""
    heard: list[tuple[list[int], DraftTree]] = []
    propose = llm.engine.drafter.propose

    def listening(batch: Any) -> Any:
        draft = propose(batch)
        for step, tree in zip(batch, draft.trees):
            check_tree(tree, step.budget)
            heard.append((list(step.row.tokens), tree))
        return draft

    asked = SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, "seed": 3, **params})
    llm.engine.drafter.propose = listening  # type: ignore[method-assign]
    try:
        llm.generate({"prompt_token_ids": prompt}, asked)
    finally:
        llm.engine.drafter.propose = propose  # type: ignore[method-assign]
    return [(tokens, tree) for tokens, tree in heard if tree.tokens]


class Beside:
    """The target in transformers, and naive heads behind its last states."""

    def __init__(self, llm: LLM, parts: Parts) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(llm.engine.options.model).float().eval()
        self.parts = parts

    def __call__(self, tokens: list[int]) -> Tensor:
        """Logits float64 [heads, V]: head i for the i-th token after `tokens`, whose last one is pending."""
        with torch.no_grad():
            state = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1:]
        return naive(self.parts, state)[0]
