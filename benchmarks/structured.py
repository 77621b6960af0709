"""Constrained output: speed with and without speculation, and whether every answer that stops is valid.

    python benchmarks/structured.py [--model builtin-100m] [--draft builtin-draft] [--every 4] [--json OUT]

All schemas of benchmarks/schemas.jsonl that the library takes.  Speed, on one schema of `--every`: one
request at a time, greedy; ways take turns, schema by schema.  The unconstrained answers are as long as the
constrained ones.  Times are wall time and the CPU time of all threads; the latter is the one to read on a
busy machine, with OMP_NUM_THREADS=1.  Validity: also `--samples` answers of each schema at T = 0.8, in
batches, with `auto`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from command_line import parser_of, settings, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider import LLM, CompletionOutput, SamplingParams
from outrider.bench.conditions import conditions

SCHEMAS = Path(__file__).parent / "schemas.jsonl"
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
NEW, LONGEST = 120, 400  # tokens of an answer at most, for speed and in the samples
WARM_UP = 2  # schemas
WHITESPACE = {False: "any", True: "none"}


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


class Answer(NamedTuple):
    """One answer of a way.  cpu_seconds: of all threads."""

    tokens: int
    steps: int
    seconds: float
    cpu_seconds: float


@dataclass
class Way:
    """One engine, and what it has answered, by name of the schema."""

    llm: LLM
    constrained: bool = True
    answers: dict[str, Answer] = field(default_factory=dict)

    def answer(self, schema: Schema, compact: bool, most: int) -> CompletionOutput:
        """most: tokens."""
        params = schema.params(
            compact if self.constrained else None, max_tokens=most, ignore_eos=not self.constrained
        )
        self.llm.engine.forget_prefixes()
        began, cpu_began = time.perf_counter(), time.process_time()
        (sample,) = self.llm.generate(schema.prompt, params)[0].outputs
        spent = time.perf_counter() - began, time.process_time() - cpu_began
        self.answers[schema.name] = Answer(len(sample.token_ids), sample.speculation.steps, *spent)
        return sample

    def sums(self) -> Answer:
        return Answer(*map(sum, zip(*self.answers.values())))

    def figures(self, constrained: Way, unconstrained: Way) -> dict[str, Any]:
        own = self.sums()
        figures: dict[str, Any] = {
            "tokens/s": round(own.tokens / own.seconds, 1),
            "tokens": own.tokens,
            "tokens a step": round(own.tokens / own.steps, 2),
        }
        for name, other in (("constrained", constrained.sums()), ("unconstrained", unconstrained.sums())):
            scale = own.tokens / other.tokens
            figures[f"of {name}"] = round(other.seconds * scale / own.seconds, 3)
            figures[f"of {name}, by CPU time"] = round(other.cpu_seconds * scale / own.cpu_seconds, 3)
        ratios = {
            name: round(constrained.answers[name].cpu_seconds / answer.cpu_seconds, 3)
            for name, answer in self.answers.items()
        }
        return {**figures, "of constrained by schema, by CPU time": ratios}


def ways(llm: LLM, draft: str | None) -> dict[str, Way]:
    configs: dict[str, Any] = {
        "forced text": {"method": "grammar"},
        "n-gram": {"method": "ngram"},
        "auto": "auto",
    }
    if draft is not None:
        configs["draft model"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
        configs["auto, with the draft model"] = {"method": "auto", "model": draft}
    plain = {"constrained": Way(llm), "unconstrained": Way(llm, False)}
    return plain | {label: Way(llm.variant(config)) for label, config in configs.items()}


def taken(llm: LLM) -> tuple[list[Schema], list[str]]:
    """The schemas that the library takes, and the names of those that it refuses."""
    every = [Schema(**json.loads(line)) for line in SCHEMAS.read_text().splitlines()]
    outputs = llm.generate([s.prompt for s in every], [s.params(True, max_tokens=1) for s in every])
    refused = [schema.name for schema, output in zip(every, outputs) if output.error is not None]
    return [schema for schema in every if schema.name not in refused], refused


def speed(
    chosen: dict[str, Way], warm_up: Sequence[Schema], schemas: Sequence[Schema], compact: bool
) -> dict[str, Any]:
    """Figures by way.  Raises AssertionError if the text of a way differs, or an answer is invalid."""
    stopped = 0
    for schema in warm_up:
        for way in chosen.values():
            way.answer(schema, compact, NEW)
    for way in chosen.values():
        way.answers.clear()
    for schema in track(schemas, f"speed, {WHITESPACE[compact]} whitespace"):
        samples, most = dict[str, CompletionOutput](), NEW
        for label, way in chosen.items():
            samples[label] = way.answer(schema, compact, NEW if way.constrained else most)
            most = len(samples["constrained"].token_ids)
        texts = {sample.text for label, sample in samples.items() if chosen[label].constrained}
        assert len(texts) == 1, f"{schema.name}: the text differs"
        if samples["constrained"].finish_reason == "stop":
            stopped += 1
            assert schema.is_valid(*texts), f"{schema.name}: {texts}"
    plain, free = chosen["constrained"], chosen["unconstrained"]
    figures = {label: way.figures(plain, free) for label, way in chosen.items()}
    return {"answers": len(schemas), "stopped and valid": stopped, "ways": figures}


def validity(llm: LLM, schemas: Sequence[Schema], samples: int) -> dict[str, Any]:
    """Sampled answers: how many stop, and of those how many are valid."""
    found: dict[str, Any] = {}
    for compact, name in WHITESPACE.items():
        params = [s.params(compact, temperature=0.8, seed=1, n=samples, max_tokens=LONGEST) for s in schemas]
        outputs = llm.generate([schema.prompt for schema in schemas], params)
        answers = [(s, sample) for s, output in zip(schemas, outputs) for sample in output.outputs]
        ended = [(s, sample.text) for s, sample in answers if sample.finish_reason == "stop"]
        wrong = [(s.name, text) for s, text in ended if not s.is_valid(text)]
        counts = {"answers": len(answers), "stopped": len(ended), "valid": len(ended) - len(wrong)}
        found[name] = {**counts, "invalid": wrong}
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="builtin-100m")
    parser.add_argument("--draft", help="a draft model, for two ways more")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--every", type=int, default=4, help="speed on one schema of so many")
    given = parser.parse_args()
    llm = LLM(given.model, max_num_seqs=16, max_model_len=1024, speculative_config=None)
    schemas, refused = taken(llm)
    table = Table(
        "whitespace",
        "way",
        "tokens/s",
        "tokens",
        "tokens a step",
        "of constrained",
        "by CPU",
        "of unconstrained",
        "by CPU",
    )
    found: dict[str, Any] = {"schemas": len(schemas), "refused": refused}
    found["sampled"] = validity(llm.variant("auto"), schemas, given.samples)
    timed = schemas[:: given.every]
    warm_up = [schema for schema in schemas if schema not in timed][:WARM_UP]
    for compact, name in WHITESPACE.items():
        found[name] = speed(ways(llm, given.draft), warm_up, timed, compact)
        for label, figures in found[name]["ways"].items():
            table.add_row(name, label, *map(str, [*figures.values()][:-1]))
    Console(width=110).print(table)
    print(json.dumps({**found, "any": None, "none": None}, ensure_ascii=False))
    write(given.json, {"conditions": conditions(), **settings(given), **found})


if __name__ == "__main__":
    main()
