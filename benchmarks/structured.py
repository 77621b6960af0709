"""Constrained output: tokens/s with and without speculation, and whether every answer that stops is valid.

    python benchmarks/structured.py [--model builtin-100m] [--draft builtin-draft] [--rounds 2] [--json OUT]

All schemas of benchmarks/schemas.jsonl that the library takes.  Speed: one request at a time, greedy; ways
take turns, schema by schema, and ratios are medians over rounds.  Validity: also `--samples` answers of each
schema at T = 0.8, in batches, with `auto`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
from core import conditions
from rich.console import Console
from rich.table import Table

from outrider import LLM, CompletionOutput, SamplingParams

SCHEMAS = Path(__file__).parent / "schemas.jsonl"
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
NEW, LONGEST = 120, 400  # tokens of an answer at most, in the rounds and in the samples
WARM_UP = 4  # schemas


@dataclass(frozen=True)
class Schema:
    name: str
    schema: Any

    @property
    def prompt(self) -> str:
        return f"An example of {self.name} as JSON:\n"

    def params(self, compact: bool | None, **more: Any) -> SamplingParams:
        """compact: without whitespace that JSON leaves open; None: without the schema."""
        form = None if compact is None else {"json": self.schema, "disable_any_whitespace": compact}
        return SamplingParams(**{"temperature": 0, "max_tokens": NEW, "structured_outputs": form, **more})

    def is_valid(self, text: str) -> bool:
        check = jsonschema.Draft202012Validator(self.schema, format_checker=CHECKER)
        return bool(check.is_valid(json.loads(text)))


@dataclass
class Way:
    """One engine, and what it did in each round.  Counts are of all rounds."""

    llm: LLM
    constrained: bool = True
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0

    def answer(self, schema: Schema, compact: bool) -> CompletionOutput:
        params = schema.params(compact if self.constrained else None)
        self.llm.engine.forget_prefixes()
        began = time.perf_counter()
        (sample,) = self.llm.generate(schema.prompt, params)[0].outputs
        self.seconds[-1] += time.perf_counter() - began
        self.tokens += len(sample.token_ids)
        self.steps += sample.speculation.steps
        return sample

    def rates(self) -> list[float]:
        return [self.tokens / len(self.seconds) / seconds for seconds in self.seconds]

    def figures(self, constrained: Way, unconstrained: Way) -> dict[str, Any]:
        def over(other: Way) -> float:
            return round(median(a / b for a, b in zip(self.rates(), other.rates())), 3)

        return {
            "tokens/s": round(median(self.rates()), 1),
            "tokens": self.tokens // len(self.seconds),
            "tokens a step": round(self.tokens / self.steps, 2),
            "of constrained": over(constrained),
            "of unconstrained": over(unconstrained),
        }


def ways(llm: LLM, draft: str) -> dict[str, Way]:
    model = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    configs: dict[str, Any] = {
        "forced text": {"method": "grammar"},
        "n-gram": {"method": "ngram"},
        "draft model": model,
        "auto": "auto",
        "auto, with the draft model": {"method": "auto", "model": draft},
    }
    plain = {"unconstrained": Way(llm, False), "constrained": Way(llm)}
    return plain | {label: Way(llm.variant(config)) for label, config in configs.items()}


def taken(llm: LLM) -> tuple[list[Schema], list[str]]:
    """The schemas that the library takes, and the names of those that it refuses."""
    every = [Schema(**json.loads(line)) for line in SCHEMAS.read_text().splitlines()]
    outputs = llm.generate([s.prompt for s in every], [s.params(True, max_tokens=1) for s in every])
    refused = [schema.name for schema, output in zip(every, outputs) if output.error is not None]
    return [schema for schema in every if schema.name not in refused], refused


def speed(chosen: dict[str, Way], schemas: Sequence[Schema], compact: bool, rounds: int) -> dict[str, Any]:
    """Figures by way.  Raises AssertionError if the text of a way differs, or an answer is invalid."""
    stopped = 0
    for round in range(-1, rounds):  # the first one warms up
        for way in chosen.values():
            way.seconds.append(0.0)
            if round == 0:
                way.seconds, way.tokens, way.steps = [0.0], 0, 0
        for schema in schemas[:WARM_UP] if round < 0 else schemas:
            samples = {label: way.answer(schema, compact) for label, way in chosen.items()}
            texts = {sample.text for label, sample in samples.items() if chosen[label].constrained}
            assert len(texts) == 1, f"{schema.name}: the text differs"
            if round == 0 and samples["constrained"].finish_reason == "stop":
                stopped += 1
                assert schema.is_valid(*texts), f"{schema.name}: {texts}"
    plain, free = chosen["constrained"], chosen["unconstrained"]
    figures = {label: way.figures(plain, free) for label, way in chosen.items()}
    return {"answers": len(schemas), "stopped and valid": stopped, "ways": figures}


def validity(llm: LLM, schemas: Sequence[Schema], samples: int) -> dict[str, Any]:
    """Sampled answers: how many stop, and of those how many are valid."""
    found: dict[str, Any] = {}
    for compact in (False, True):
        params = [s.params(compact, temperature=0.8, seed=1, n=samples, max_tokens=LONGEST) for s in schemas]
        outputs = llm.generate([schema.prompt for schema in schemas], params)
        answers = [(s, sample) for s, output in zip(schemas, outputs) for sample in output.outputs]
        ended = [(s, sample.text) for s, sample in answers if sample.finish_reason == "stop"]
        wrong = [(s.name, text) for s, text in ended if not s.is_valid(text)]
        counts = {"answers": len(answers), "stopped": len(ended), "valid": len(ended) - len(wrong)}
        found["none" if compact else "any"] = {**counts, "invalid": wrong}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--draft", default="builtin-draft")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take one schema of so many")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=16, max_model_len=1024, speculative_config=None)
    schemas, refused = taken(llm)
    schemas = schemas[:: given.every]
    table = Table("whitespace", "way", "tokens/s", "tokens", "tokens a step", "of constrained",
                  "of unconstrained")  # fmt: skip
    found: dict[str, Any] = {"schemas": len(schemas), "refused": refused}
    found["sampled"] = validity(llm.variant("auto"), schemas, given.samples)
    for compact in (False, True):
        name = "none" if compact else "any"
        found[name] = speed(ways(llm, given.draft), schemas, compact, given.rounds)
        for label, figures in found[name]["ways"].items():
            table.add_row(name, label, *map(str, figures.values()))
    Console(width=110).print(table)
    print(json.dumps({**found, "any": None, "none": None}, ensure_ascii=False))
    if given.json:
        settings = {key: value for key, value in vars(given).items() if key != "json"}
        told = {"conditions": conditions(), **settings, **found}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
