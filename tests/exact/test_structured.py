"""Constrained output of the built-in model is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider import LLM, RequestError, SamplingParams

SCHEMAS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl").read_text().splitlines()
]
REFUSED = {
    "map of integers": "propertyNames", "allOf of objects": "unevaluatedProperties", "unique items": "uniqueItems",
    "not": "not", "if then else": "if, then", "dependent required": "dependentRequired", "contains": "contains",
}  # fmt: skip
VALIDATOR = jsonschema.Draft202012Validator


@pytest.fixture(scope="module")
def builtin() -> LLM:
    return LLM("builtin", max_num_seqs=16)


def of_schema(schema: Any, **given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "structured_outputs": {"json": schema}, **given})


def test_every_output_that_stops_is_valid(builtin: LLM) -> None:
    assert len(SCHEMAS) >= 60
    prompts = [f"An example of {entry['name']} as JSON:\n" for entry in SCHEMAS]
    params = [of_schema(entry["schema"], seed=seed) for seed, entry in enumerate(SCHEMAS)]
    refused, stopped = {}, 0
    for entry, output in zip(SCHEMAS, builtin.generate(prompts, params)):
        if output.error is not None:
            refused[entry["name"]] = str(output.error)
            continue
        (sample,) = output.outputs
        if sample.finish_reason == "stop":
            stopped += 1
            checker = VALIDATOR.FORMAT_CHECKER
            VALIDATOR(entry["schema"], format_checker=checker).validate(json.loads(sample.text))
    assert refused.keys() == REFUSED.keys()
    assert all(f": {REFUSED[name]} " in told for name, told in refused.items())
    assert stopped >= 0.8 * (len(SCHEMAS) - len(refused))


def test_a_schema_that_is_refused_fails_its_own_request_only(builtin: LLM) -> None:
    good, bad = of_schema({"type": "boolean"}), of_schema({"not": {}})
    outputs = builtin.generate(["a", "a"], [good, bad])
    assert outputs[0].outputs[0].text in ("true", "false")
    assert isinstance(outputs[1].error, RequestError) and "not is not supported" in str(outputs[1].error)
