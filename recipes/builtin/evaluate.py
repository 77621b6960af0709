"""Evaluation of an exported model: exact answers by kind, repeated 4-grams, and validation loss by source."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from . import prose, tasks
from .corpus import load_tokenizer
from .train import mean_loss

MAX_TOKENS = 400
NATURAL_REPEATS = 0.05  # kinds whose own answers repeat more than this are left out of the mean
SPLITS = ("values", "wordings")

# Greedy answers, as text, to prompts given as token ids.
Answer = Callable[[Sequence[list[int]]], list[str]]


def repeated(ids: list[int], size: int = 4) -> float:
    """Share of the n-grams that occurred before in the same text."""
    grams = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def questions(
    per_kind: int, split: str, kinds: Sequence[str] | None = None
) -> list[tuple[str, tasks.Turn, str]]:
    """Kind, turn and prompt text of every turn; earlier turns of a task hold their reference answers.

    kinds: None for all.
    """
    rows = []
    for kind in kinds or tasks.KINDS:
        rng = random.Random(f"evaluation {kind} {split}")
        for _ in range(per_kind):
            text = prose.BOS
            for turn in tasks.make(kind, rng, split).turns:
                rows.append((kind, turn, f"{text}{prose.USER}{turn.prompt}{prose.END}{prose.ASSISTANT}"))
                text += tasks.CHAT.format(turn.prompt, turn.answer)
    return rows


def score(
    answer: Answer, folder: Path, per_kind: int, split: str, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """Accuracy and repeats by kind and their means over kinds; `wrong` has one wrong answer of each kind."""
    tokenizer = load_tokenizer(folder)
    rows = questions(per_kind, split, kinds)
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for _, _, text in rows]
    found: dict[str, dict[str, list[float]]] = {
        k: {"right": [], "repeated": [], "natural": []} for k in kinds or tasks.KINDS
    }
    wrong: dict[str, list[str]] = {}
    for (kind, turn, _), given in zip(rows, answer(prompts)):
        right = turn.check(given)
        found[kind]["right"].append(right)
        found[kind]["repeated"].append(repeated(tokenizer.encode(given).ids))
        found[kind]["natural"].append(repeated(tokenizer.encode(turn.answer).ids))
        if not right:
            wrong.setdefault(kind, [turn.prompt, turn.answer, given])
    means = {
        k: {name: round(float(np.mean(v)), 4) for name, v in values.items()} for k, values in found.items()
    }
    plain = [v["repeated"] for v in means.values() if v["natural"] <= NATURAL_REPEATS]
    return {
        "turns": {kind: len(values["right"]) for kind, values in found.items()},
        "accuracy": round(float(np.mean([v["right"] for v in means.values()])), 4),
        "repeated_4_grams": round(float(np.mean(plain)), 4),
        "kinds": means,
        "wrong": wrong,
    }


def engine(model: str) -> Answer:
    """Greedy answers of Outrider's own engine."""
    from outrider import LLM, SamplingParams

    llm = LLM(model, speculative_config=None)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def answer(prompts: Sequence[list[int]]) -> list[str]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [o.outputs[0].text for o in outputs]

    return answer


def evaluate(out: Path, per_kind: int) -> None:
    """Evaluate OUT/target and OUT/draft where they are there; write <name>-eval.json and print a table."""
    found = [name for name in ("target", "draft") if (out / name).exists()]
    if not found:
        raise SystemExit(f"no model in {out}; run stage target first")
    for name in found:
        folder = out / name
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        files = sorted((out / "corpus").glob("val-*.npy"))
        losses = {f.stem.removeprefix("val-"): mean_loss(model, np.load(f), "cpu") for f in files}
        del model
        answer = engine(str(folder))
        report = {"loss": losses, **{split: score(answer, folder, per_kind, split) for split in SPLITS}}
        (out / f"{name}-eval.json").write_text(
            json.dumps(report, indent=1, ensure_ascii=False), encoding="utf8"
        )
        _show(name, report)


def _show(name: str, report: dict[str, Any]) -> None:
    print(f"{name}\nvalidation loss: " + ", ".join(f"{k} {v:.2f}" for k, v in report["loss"].items()))
    print(f"{'kind':16}" + "".join(f"{s:>10}" for s in SPLITS))
    for kind in tasks.KINDS:
        print(f"{kind:16}" + "".join(f"{report[s]['kinds'][kind]['right']:10.0%}" for s in SPLITS))
    print(f"{'all':16}" + "".join(f"{report[s]['accuracy']:10.1%}" for s in SPLITS))
    print(f"{'repeated 4-grams':16}" + "".join(f"{report[s]['repeated_4_grams']:10.1%}" for s in SPLITS))
