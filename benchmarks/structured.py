"""Constrained output: tokens/s with and without speculation, and whether every answer that stops is valid.

    python benchmarks/structured.py [--model builtin] [--draft builtin-draft] [--rounds 3] [--json OUT]

One request at a time, greedy, a few schemas of benchmarks/schemas.jsonl, in rounds that take all ways in
turn; the median round counts.  `--model DIR/target --draft DIR/draft` measures the pair of grow.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jsonschema
from core import conditions
from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams

SCHEMAS = Path(__file__).parent / "schemas.jsonl"
NAMES = (
    "person",
    "order",
    "address",
    "function call",
    "movie review",
    "configuration",
    "array of objects",
    "refs",
)
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
NEW = 120


def ways(draft: str) -> dict[str, tuple[bool, dict[str, Any] | None]]:
    """Label -> whether output is constrained, and the speculative_config."""
    model = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    return {
        "unconstrained": (False, None),
        "constrained": (True, None),
        "+ forced text": (True, {"method": "grammar"}),
        "+ n-gram": (True, {"method": "ngram"}), "+ draft model": (True, model),
    }  # fmt: skip


def entries() -> list[dict[str, Any]]:
    every = {entry["name"]: entry for entry in map(json.loads, SCHEMAS.read_text().splitlines())}
    return [every[name] for name in NAMES]


class Measured:
    """What one way did: tokens and seconds of each round, and of the last one steps and valid answers."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.texts: list[str] = []
        self.tokens = self.steps = self.stopped = self.valid = 0

    def round(self, llm: LLM, constrained: bool, compact: bool) -> None:
        self.texts, self.tokens, self.steps, self.stopped, self.valid = [], 0, 0, 0, 0
        llm.engine.forget_prefixes()
        began = time.perf_counter()
        for entry in entries():
            form = {"json": entry["schema"], "disable_any_whitespace": compact} if constrained else None
            params = SamplingParams(temperature=0, max_tokens=NEW, structured_outputs=form)
            (sample,) = llm.generate(f"An example of {entry['name']} as JSON:\n", params)[0].outputs
            self.texts.append(sample.text)
            self.tokens += len(sample.token_ids)
            self.steps += sample.speculation.steps
            self.stopped += sample.finish_reason == "stop"
            if constrained and sample.finish_reason == "stop":
                check = jsonschema.Draft202012Validator(entry["schema"], format_checker=CHECKER)
                self.valid += check.is_valid(json.loads(sample.text))
        self.rates.append(self.tokens / (time.perf_counter() - began))

    def figures(self) -> dict[str, Any]:
        return {
            "tokens/s": round(statistics.median(self.rates), 1),
            "rounds": [round(rate, 1) for rate in self.rates],
            "tokens": self.tokens, "tokens a step": round(self.tokens / self.steps, 2),
            "stopped": self.stopped, "valid": self.valid,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="builtin-draft")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=1, speculative_config=None)
    chosen, results = ways(given.draft), dict[str, Any]()
    table = Table("whitespace", "way", "tokens/s", "of constrained", "tokens a step", "stopped", "valid")
    for compact in (False, True):
        measured = {label: Measured() for label in chosen}
        engines = {label: llm.variant(config) for label, (_, config) in chosen.items()}
        for _ in range(given.rounds + 1):  # the first warms up
            for label, (constrained, _) in chosen.items():
                measured[label].round(engines[label], constrained, compact)
        plain = measured["constrained"]
        for label, way in measured.items():
            del way.rates[0]
            found = way.figures()
            found["of constrained"] = round(
                statistics.median(a / b for a, b in zip(way.rates, plain.rates)), 2
            )
            assert label == "unconstrained" or way.texts == plain.texts, f"{label}: the text differs"
            results.setdefault("none" if compact else "any", {})[label] = found
            shown = [
                found[key] for key in ("tokens/s", "of constrained", "tokens a step", "stopped", "valid")
            ]
            table.add_row("none" if compact else "any", label, *map(str, shown))
    Console(width=110).print(table)
    if given.json:
        told = {"conditions": conditions(), "model": given.model, "schemas": NAMES, "by whitespace": results}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
