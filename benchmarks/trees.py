"""Tokens per step and speed of a head by the depth and the nodes of its trees.

    python benchmarks/trees.py [--head builtin-eagle3] [--questions question.jsonl] [--json OUT]
        [--rounds 3] [--count 12] [--trees 5:8 7:8 8:8 chain:4 …]

Counted are greedy answers of at most 128 tokens to a task of each kind with held-out wordings (`counts`):
they depend on no clock.  With `--rounds`, the grown target answers `--count` of them with 64 tokens, one at a
time, all trees and plain decoding in turns; `--questions` adds as many questions of Spec-Bench.  A time is
the sum over the prompts of the fastest round, from the first token on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command_line import write

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.checkpoints.hub import GROWN

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.builtin.compare import asked
from recipes.builtin.evaluate import questions

TREES = ("chain:4", "chain:8", "5:8", "7:8", "8:8", "8:12", "8:16", "8:24", "8:32", "8:59", "adaptive:8")
PLAIN = "plain"
LONGEST = 200  # tokens of a prompt that is timed
Ids = list[list[int]]


def config_of(head: str, tree: str) -> dict[str, Any]:
    """The speculative_config of "DEPTH:NODES", "chain:DEPTH" or "adaptive:DEPTH"."""
    first, second = tree.split(":")
    if first == "chain":
        return {"model": head, "tree": "chain", "num_speculative_tokens": int(second)}
    if first == "adaptive":
        return {"model": head, "adaptive": True, "num_speculative_tokens": int(second)}
    return {"model": head, "num_speculative_tokens": int(first), "nodes": int(second)}


def tasks(llm: LLM) -> Ids:
    texts = [text for _, _, text in questions(1, "wordings")]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def counted(llm: LLM, prompts: Ids, config: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per step: mean of the requests, of all steps, and both for answers of 24 tokens or more."""
    params = SamplingParams(temperature=0, max_tokens=128, detokenize=False)
    llm.use(config)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    llm.use(None)
    found = [output.outputs[0].speculation for output in outputs]
    result = dict[str, float]()
    for name, some in {"": found, ", 24 tokens": [one for one in found if one.emitted >= 24]}.items():
        steps, emitted = sum(one.steps for one in some), sum(one.emitted for one in some)
        result[f"mean{name}"] = round(statistics.mean(one.tokens_per_step for one in some), 3)
        result[f"all steps{name}"] = round(emitted / steps, 3)
    return result


def timed(llm: LLM, prompts: Ids, configs: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Speed-up and tokens per step by tree."""
    params = SamplingParams(temperature=0, max_tokens=64, detokenize=False)
    variants = {name: llm.variant(config) for name, config in configs.items()}
    seconds = {name: [[0.0] * rounds for _ in prompts] for name in variants}
    emitted, steps = dict.fromkeys(variants, 0), dict.fromkeys(variants, 0)
    for variant in variants.values():
        variant.generate({"prompt_token_ids": prompts[0]}, params)  # warm up
    for turn in range(rounds):
        for i, ids in enumerate(prompts):
            for name, variant in variants.items():
                variant.engine.forget_prefixes()
                answer = variant.generate({"prompt_token_ids": ids}, params)[0].outputs[0]
                seconds[name][i][turn] = answer.token_times[-1] - answer.token_times[0]
                emitted[name] += answer.speculation.emitted
                steps[name] += answer.speculation.steps
    least = {name: sum(map(min, of_prompts)) for name, of_prompts in seconds.items()}
    return {
        name: {
            "speed-up": round(least[PLAIN] / least[name], 3),
            "tokens per step": round(emitted[name] / steps[name], 3),
        }
        for name in variants
    }


def spread(prompts: Sequence[list[int]], count: int) -> Ids:
    return [prompts[i * len(prompts) // count] for i in range(min(count, len(prompts)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", default="builtin-eagle3")
    parser.add_argument("--trees", nargs="+", default=TREES)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    configs = {tree: config_of(given.head, tree) for tree in given.trees}
    small = LLM("builtin", max_num_seqs=16, max_model_len=640, speculative_config=None)
    found: dict[str, Any] = {"conditions": conditions(), "counts": {}}
    prompts = tasks(small)
    for tree, config in configs.items():
        found["counts"][tree] = counted(small, prompts, config)
        print(f"{tree:12s} {found['counts'][tree]}", flush=True)
    groups = {"held out": spread([ids for ids in prompts if len(ids) <= LONGEST], given.count)}
    if given.questions:
        groups["Spec-Bench"] = spread(asked(small, given.questions)["Spec-Bench"], given.count)
    if given.rounds:
        grown = LLM(GROWN, max_num_seqs=1, max_model_len=640, speculative_config=None)
        for group, some in groups.items():
            found[group] = timed(grown, some, {PLAIN: None, **configs}, given.rounds)
            for tree, result in found[group].items():
                print(f"{group:12s} {tree:12s} {result}", flush=True)
    if given.json:
        write(given.json, found)


if __name__ == "__main__":
    main()
