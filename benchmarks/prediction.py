"""Predicted output: tokens/s when the answer repeats a text that comes with the request, by how much differs.

    python benchmarks/prediction.py [--model builtin-100m] [--rounds 3] [--cpu-time] [--json OUT]

The prediction of a prompt is its own answer after random edits: every token begins one with the given
probability, which replaces, inserts or drops 1 to 8 tokens.  "unrelated" is the answer to another prompt.
Ways take turns, prompt by prompt, one request at a time; ratios to plain decoding are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import conditions
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams

QUESTIONS = Path(__file__).parent / "questions.jsonl"
RATES = (0.0, 0.02, 0.05, 0.1)
LENGTHS = (1, 1, 2, 3, 8)  # tokens of an edit
NEW = 160


def edited(ids: list[int], rate: float, rng: random.Random) -> list[int]:
    """A text with edits, each of a random kind and length, at this rate by token."""
    made: list[int] = []
    at = 0
    while at < len(ids):
        if rng.random() >= rate:
            made.append(ids[at])
            at += 1
            continue
        kind, length = rng.choice(("replace", "insert", "drop")), rng.choice(LENGTHS)
        if kind != "drop":
            made += rng.choices(ids, k=length)
        if kind != "insert":
            at += length
    return made


def predictions(answers: list[list[int]], seed: int) -> dict[str, list[list[int]]]:
    """Label -> a prediction for each answer."""
    rng = random.Random(seed)
    found = {f"{rate:.0%} of tokens edited": [edited(ids, rate, rng) for ids in answers] for rate in RATES}
    return {**found, "unrelated": [*answers[1:], answers[0]]}


def ways(llm: LLM) -> dict[str, tuple[LLM, bool]]:
    """Label -> the engine, and whether it gets the prediction."""
    auto = llm.variant("auto")
    return {
        "plain": (llm, False),
        "auto": (auto, False),
        "prediction": (llm.variant("prediction"), True),
        "auto, prediction": (auto, True),
    }


def measure(
    llm: LLM, prompts: list[str], rounds: int, temperature: float, clock: Callable[[], float]
) -> dict[str, dict[str, Any]]:
    """Figures by kind of prediction and way."""

    def answer(engine: LLM, i: int, prediction: list[int] | None) -> Any:
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=NEW, ignore_eos=True, prediction=prediction
        )
        engine.engine.drafter.memory = copy.deepcopy(fresh[engine])  # of no text
        return engine.generate(prompts[i], params)[0].outputs[0]

    chosen = ways(llm)
    fresh = {engine: copy.deepcopy(engine.engine.drafter.memory) for engine, _ in chosen.values()}
    answers = [answer(llm, i, None).token_ids for i in range(len(prompts))]
    results: dict[str, dict[str, Any]] = {}
    for label, texts in predictions(answers, seed=1).items():
        seconds = {way: [0.0] * rounds for way in chosen}
        steps, drafted = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
        for round in range(rounds):
            for i, text in enumerate(texts):
                for way, (engine, told) in chosen.items():
                    began = clock()
                    sample = answer(engine, i, text if told else None)
                    seconds[way][round] += clock() - began
                    assert sample.token_ids == answers[i], f"{way}: the text differs"
                    steps[way] += sample.speculation.steps
                    drafted[way] += sample.speculation.drafted
        tokens = NEW * len(prompts)
        results[label] = {
            way: {
                "tokens/s": tokens / statistics.median(seconds[way]),
                "of plain": statistics.median(p / s for p, s in zip(seconds["plain"], seconds[way])),
                "tokens a step": tokens * rounds / steps[way],
                "drafted a token": drafted[way] / tokens / rounds,
            }
            for way in chosen
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--cpu-time", action="store_true", help="of all threads, for a busy machine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    questions = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()]
    llm = LLM(given.model, max_num_seqs=1, max_model_len=1024, speculative_config=None)
    clock = time.process_time if given.cpu_time else time.perf_counter
    results = measure(llm, questions[: given.prompts], given.rounds, given.temperature, clock)
    table = Table("prediction", "way", "tokens/s", "of plain", "tokens a step", "drafted a token")
    for label, found in results.items():
        for way, figures in found.items():
            table.add_row(label, way, *(f"{value:.2f}" for value in figures.values()))
    Console().print(table)
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key != "json"}
        given.json.write_text(json.dumps({**conditions(), **settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
