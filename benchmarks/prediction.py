"""Predicted output: speed when the answer repeats a text that comes with the request, by how much differs.

    python benchmarks/prediction.py [--model builtin-100m] [--prompts 5] [--rounds 2] [--json OUT]

The prediction of a prompt is its own answer after random edits: every token begins one with the given
probability, which replaces, inserts or drops 1 to 8 tokens.  "unrelated" is the answer to another prompt.
Ways take turns, prompt by prompt, one request at a time.  Ratios to plain decoding are medians over rounds,
of wall time and of the CPU time of all threads; the latter is the one to read on a busy machine, with
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import parser_of, settings, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions

QUESTIONS = Path(__file__).parent / "questions.jsonl"
RATES = (0.0, 0.02, 0.05, 0.1)
LENGTHS = (1, 1, 2, 3, 8)  # tokens of an edit
NEW = 128


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


@dataclass
class Way:
    """An engine, with or without a prediction, and what it has done.  Times are sums by round."""

    llm: LLM
    predicts: bool
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    drafted: int = 0

    def answer(self, prompt: str, params: SamplingParams, fresh: Any, round: int) -> list[int]:
        """fresh: memory of a drafter that has seen no text."""
        self.llm.engine.drafter.memory = copy.deepcopy(fresh)
        began, cpu_began = time.perf_counter(), time.process_time()
        (sample,) = self.llm.generate(prompt, params)[0].outputs
        spent = time.perf_counter() - began, time.process_time() - cpu_began
        for sums, seconds in zip((self.seconds, self.cpu_seconds), spent):
            sums += [0.0] * (round + 1 - len(sums))
            sums[round] += seconds
        self.tokens += len(sample.token_ids)
        self.steps += sample.speculation.steps
        self.drafted += sample.speculation.drafted
        return sample.token_ids

    def figures(self, plain: Way) -> dict[str, float]:
        def over(ours: list[float], theirs: list[float]) -> float:
            return statistics.median(b / a for a, b in zip(ours, theirs))

        return {
            "tokens/s": self.tokens / sum(self.seconds),
            "of plain": over(self.seconds, plain.seconds),
            "of plain by CPU time": over(self.cpu_seconds, plain.cpu_seconds),
            "tokens a step": self.tokens / self.steps,
            "drafted a token": self.drafted / self.tokens,
        }


def measure(llm: LLM, prompts: list[str], rounds: int, temperature: float) -> dict[str, dict[str, Any]]:
    """Figures by kind of prediction and way."""
    auto, own = llm.variant("auto"), llm.variant("prediction")
    fresh = {engine: copy.deepcopy(engine.engine.drafter.memory) for engine in (llm, auto, own)}
    ways = {"none": {"plain": Way(llm, False), "auto": Way(auto, False)}}

    def answer(way: Way, i: int, text: list[int] | None, round: int) -> list[int]:
        params = SamplingParams(
            temperature=temperature, seed=i, max_tokens=NEW, ignore_eos=True, prediction=text
        )
        return way.answer(prompts[i], params, fresh[way.llm], round)

    answers = [answer(Way(llm, False), i, None, 0) for i in track(range(len(prompts)), "answers")]
    texts = predictions(answers, seed=1)
    for label in texts:
        ways[label] = {"prediction": Way(own, True), "auto, prediction": Way(auto, True)}
    turns = [(round, i) for round in range(rounds) for i in range(len(prompts))]
    for round, i in track(turns, "rounds"):
        for label, kinds in ways.items():
            for name, way in kinds.items():
                found = answer(way, i, texts[label][i] if way.predicts else None, round)
                assert found == answers[i], f"{name}: the text differs"
    plain = ways["none"]["plain"]
    return {label: {name: way.figures(plain) for name, way in kinds.items()} for label, kinds in ways.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    given = parser.parse_args()
    questions = [json.loads(line)["turns"][0] for line in QUESTIONS.read_text().splitlines()]
    llm = LLM(given.model, max_num_seqs=1, max_model_len=1024, speculative_config=None)
    results = measure(llm, questions[: given.prompts], given.rounds, given.temperature)
    table = Table("prediction", "way", "tokens/s", "of plain", "by CPU time", "tokens a step", "drafted")
    for label, found in results.items():
        for way, figures in found.items():
            table.add_row(label, way, *(f"{value:.2f}" for value in figures.values()))
    Console().print(table)
    write(given.json, {**conditions(), **settings(given), "results": results})


if __name__ == "__main__":
    main()
