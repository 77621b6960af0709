"""Heads of the family, trained on the target's own answers to tasks of all kinds."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from . import prompts

LENGTH = 384  # tokens of a text
SIZES: dict[str, dict[str, Any]] = {  # of a method's network, small enough to be shipped
    "eagle": {"inner": 512},
    "eagle3": {"inner": 512, "draft_vocab_size": 4096, "test_steps": 4},
    "medusa": {"heads": 3, "own": False},
    "hydra": {"heads": 2, "layers": 1, "prefix": False, "own": False, "dropout": 0.0},
    "mlp_speculator": {"inner": 128, "quantization": "int4"},
    "mtp": {"inner": 512},
    "redrafter": {"layers": 1, "exit_dim": 160, "quantization": "int4"},
    "dflash": {"inner": 512, "layers": 1, "block": 4, "mask_token": 2, "quantization": "int4"},
}
SHARED = {"length": LENGTH, "answer_tokens": 96, "batch": 8, "quantization": "int8"}

# Further training of the shipped heads by gpu.py, from the shipped weights: options of all, and of some.
TRAINED_ON_GPU: dict[str, dict[str, Any]] = {
    "all": {
        "optimizer": "muon", "rate": 0.0015, "dtype": "bfloat16", "quantization": "int8",
        "evaluate_every": 1_000_000, "evaluate_prompts": 64,
    },
    "eagle3": {"test_steps": 6, "rate": 0.001},
    "draft_model": {"layers": 2, "inner": 1024, "rate": 0.0005},
}  # fmt: skip


def write_prompts(path: Path, count: int) -> None:
    """Write prompts for the target; the file appears as a whole."""
    lines = [json.dumps(one, ensure_ascii=False) + "\n" for one in prompts.records(count, 0, None, seed=0)]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines), encoding="utf8")
    temporary.replace(path)


def train_heads(out: Path, count: int, steps: int, seconds: float) -> bool:
    """Train every head for OUT/target, or go on; False if the time ran out before the last one was done.

    All share the target's answers, and those of the same states its states: OUT/heads/cache.
    """
    from rich.console import Console

    from outrider import LLM
    from outrider.config import options
    from outrider.train.methods import method
    from outrider.train.report import Report
    from outrider.train.run import train

    folder, ends = out / "heads", time.perf_counter() + seconds
    folder.mkdir(exist_ok=True)
    asked = folder / f"prompts-{count}.jsonl"
    if others := [path for path in folder.glob("prompts-*.jsonl") if path != asked]:
        raise SystemExit(f"the heads learn from {others[0]}, not from {count} prompts: give another --out")
    if not asked.exists():
        write_prompts(asked, count)
    llm = LLM(str(out / "target"), max_num_seqs=32, max_model_len=LENGTH, speculative_config=None)
    given = {
        **SHARED,
        "data": [str(asked)],
        "cache": str(folder / "cache"),
        "steps": steps,
    }
    for name, sizes in SIZES.items():
        left = (ends - time.perf_counter()) / 60
        if left <= 0:
            return False
        own = {**given, **sizes, "out": str(folder / name), "minutes": None if math.isinf(left) else left}
        print(f"head {name}", flush=True)
        checked = options(method(name).Options, own, "training option")
        if not train(llm, name, checked, Report(Console())).finished:
            return False
    return True
