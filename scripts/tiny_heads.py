"""Train the small built-in heads on text of the built-in target.

    python scripts/tiny_heads.py --prompts prompts.jsonl --minutes 15

prompts.jsonl: one {"prompt": text in the chat format} a line.  The target computes every text once for all
heads; each head has its method's own loss.  The heads let users try a method without a download.  They are
weak: published heads see far more text.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import BUILTIN
from outrider.checkpoints.hub import Checkpoint
from outrider.core.step import FINAL
from outrider.draft.dflash.network import Network as DFlash
from outrider.draft.dflash.network import Shape
from outrider.draft.eagle.network import Network as Eagle
from outrider.draft.eagle3.network import Network as Eagle3
from outrider.draft.eagle3.network import Settings
from outrider.draft.hydra.network import Network as Hydra
from outrider.draft.medusa.network import Network as Medusa
from outrider.draft.mlp_speculator.network import Network as Mlp
from outrider.draft.mtp.network import Network as Mtp
from outrider.draft.redrafter.network import Network as ReDrafter
from outrider.heads.base import FINGERPRINT
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights, read
from outrider.models.export import packed, scheme

TEXTS, LENGTH, BATCH, RATE, KNOWN = 700, 160, 8, 1.5e-3, 2048
BITS = 8
TAPS = (2, 4, 5)  # of the target's 8 layers, as EAGLE-3 takes them


def heads_for(hidden: int, vocabulary: int, known: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Every head and the states it reads.  All of them together are smaller than the draft model."""
    block = {"heads": 6, "kv_heads": 2, "head_dim": 64, "inner": 512}
    return {
        "eagle": (Eagle(Sizes(hidden, **block), vocabulary, bias=False), (FINAL,)),
        "eagle3": (
            Eagle3(Settings(vocabulary, hidden, target_hidden=hidden, taps=TAPS, drafted=known, **block)),
            TAPS,
        ),
        "medusa": (Medusa(hidden, vocabulary, heads=3, own=False), (FINAL,)),
        "hydra": (Hydra(hidden, vocabulary, heads=1, layers=1, own=False), (FINAL,)),
        "mlp_speculator": (
            Mlp(hidden, 128, vocabulary, n_predict=3, tie_weights=True, scale_input=True),
            (FINAL,),
        ),
        "redrafter": (ReDrafter(hidden, vocabulary, layers=1, exit_dim=160), (FINAL,)),
        "dflash": (
            DFlash(Shape(hidden, layers=1, vocabulary=vocabulary, taps=TAPS, block=4, mask=2, **block)),
            TAPS,
        ),
        "mtp": (Mtp(Sizes(hidden, **block), vocabulary, first=8, steps=3), (FINAL,)),
    }


def texts(llm: LLM, prompts: list[str], console: Console) -> list[list[int]]:
    """Outputs of the target, half of them greedy, half at temperature 0.8."""
    params = [
        SamplingParams(temperature=0.8 * (i % 2), max_tokens=LENGTH, seed=i) for i in range(len(prompts))
    ]
    encoded = [llm.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
    with console.status(f"{len(prompts)} outputs of the built-in target"):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in encoded], params)
    return [(out.prompt_token_ids + list(out.outputs[0].token_ids))[-2 * LENGTH :] for out in outputs]


def train(
    llm: LLM,
    networks: dict[str, tuple[Any, tuple[int, ...]]],
    data: list[list[int]],
    minutes: float,
    console: Console,
) -> dict[str, float]:
    """AdamW for each, with a linearly decaying rate.  Returns the mean loss of the last ten steps."""
    model, rng, outer = llm.engine.decoder, random.Random(0), TargetWeights.of(llm.engine.decoder)
    taps = sorted({tap for _, wanted in networks.values() for tap in wanted})
    adams = {
        name: torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        for name, (network, _) in networks.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in networks}
    began = time.perf_counter()
    with Progress(console=console) as bar:
        task = bar.add_task("training", total=1.0)
        while (done := (time.perf_counter() - began) / 60 / minutes) < 1:
            batch = [read(model, rng.choice(data), taps) for _ in range(BATCH)]
            for name, (network, _) in networks.items():
                for group in adams[name].param_groups:
                    group["lr"] = RATE * min(1.0, (1 + len(losses[name])) / 20) * (1 - done)
                value = torch.stack([network.loss(sample, outer) for sample in batch]).mean()
                adams[name].zero_grad()
                value.backward()
                nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                adams[name].step()
                losses[name].append(float(value.detach()))
            bar.update(task, completed=done)
    return {name: sum(of[-10:]) / len(of[-10:]) for name, of in losses.items()}


def save(name: str, network: Any) -> int:
    """Write a network in 8 bits; returns the bytes of the weights."""
    folder = BUILTIN / name
    folder.mkdir(parents=True, exist_ok=True)
    target = {FINGERPRINT: Checkpoint.open("builtin").fingerprint}
    config = {**network.config(), **target, "torch_dtype": "bfloat16", "quantization_config": scheme(BITS)}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for key, tensor in network.state_dict().items():
        if tensor.data_ptr() not in seen:  # tied tensors are written once
            seen.add(tensor.data_ptr())
            tensors[key] = (
                tensor.detach()
                .to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
                .clone()
                .contiguous()
            )
    save_file(packed(tensors.items(), BITS), folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--heads", nargs="*")
    given = parser.parse_args()
    console, llm = Console(), LLM(model="builtin", max_num_seqs=32)
    lines = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    data = texts(llm, random.Random(0).sample(lines, min(TEXTS, len(lines))), console)
    counted = Counter(token for text in data for token in text)
    known = tuple(sorted(token for token, _ in counted.most_common(KNOWN)))
    networks = heads_for(llm.engine.decoder.spec.hidden, llm.engine.target.vocabulary, known)
    networks = {name: of for name, of in networks.items() if not given.heads or name in given.heads}
    uniform = math.log(llm.engine.target.vocabulary)
    console.print(f"{sum(map(len, data)):,} tokens; the loss of a uniform q is {uniform:.2f}")
    ended = train(llm, networks, data, given.minutes, console)
    table = Table("head", "weights", "bytes", "loss")
    for name, (network, _) in networks.items():
        size = save(name, network)
        table.add_row(
            name, f"{sum(p.numel() for p in network.parameters()):,}", f"{size:,}", f"{ended[name]:.3f}"
        )
    console.print(table)
