"""Constrained output is valid, and the same with and without speculation."""

from __future__ import annotations

import gc
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from covering import parametrized
from drafter_cases import DRAFTERS, use_drafter
from helpers import answer, token_prompts, unpaced
from scene import outcome
from scipy.stats import chi2_contingency

from outrider import LLM, RequestError, SamplingParams, verify
from outrider.sampling.grammar.state import GrammarState
from outrider.testing import KnownTexts, check_idle, check_statistics, random_prompts

SCHEMAS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "benchmarks" / "schemas.jsonl").read_text().splitlines()
]
REFUSED = {
    "map of integers": "propertyNames", "allOf of objects": "unevaluatedProperties",
    "unique items": "uniqueItems",
    "not": "not", "if then else": "if, then", "dependent required": "dependentRequired",
    "contains": "contains",
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
    assert all(f": {REFUSED[name]} " in message for name, message in refused.items())
    assert stopped >= 0.8 * (len(SCHEMAS) - len(refused))


def test_a_schema_that_is_refused_fails_its_own_request_only(builtin: LLM) -> None:
    good, bad = of_schema({"type": "boolean"}), of_schema({"not": {}})
    outputs = builtin.generate(["a", "a"], [good, bad])
    assert outputs[0].outputs[0].text in ("true", "false")
    assert isinstance(outputs[1].error, RequestError) and "not is not supported" in str(outputs[1].error)


# ---- the same text with and without speculation

TEMPERATURES = (0.0, 0.8)
ITEMS = {"type": "array", "items": {"enum": ["aa", "a b", "é"]}, "minItems": 2, "maxItems": 3}
RECORD = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 5}, "items": ITEMS, "last": {"type": "boolean"}},
}
RECORD |= {"required": [*RECORD["properties"]], "additionalProperties": False}  # type: ignore[dict-item,misc]
NESTED = 'root ::= "(" root? ")" | "<" [a-c]{1,3} ">"'
TAGS = {"triggers": ["a", "e"], "structures": [{"begin": "a<", "schema": ITEMS, "end": ">"},
        {"begin": "e", "schema": {"enum": [12345, 12346]}, "end": ";"}]}  # fmt: skip
ASKS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": RECORD, "disable_any_whitespace": True}},
    {"structured_outputs": {"json": RECORD}, "n": 2},
    {},
    {"structured_outputs": {"grammar": NESTED}, "logprobs": 2, "top_p": 0.9},
    {"structured_outputs": {"regex": "[a-e]+(, [a-e]{2})*"}, "stop": [", "], "repetition_penalty": 1.2},
    {"structured_outputs": {"choice": ["no", "not at all", "not now"]}, "min_tokens": 3},
    {"structured_outputs": {"json_object": True}, "ignore_eos": True, "presence_penalty": 0.5},
    {"structured_outputs": {"structural_tag": TAGS}, "logit_bias": {4: -100.0}},
    {"structured_outputs": {"json": RECORD}, "speculate": False},
]  # fmt: skip
PROMPTS = random_prompts(len(ASKS), seed=3)
TURNS = {(drafter, TEMPERATURES[i % 2]) for i, drafter in enumerate(DRAFTERS)}
alternately = parametrized({"drafter": DRAFTERS, "temperature": TEMPERATURES}, TURNS)


def asks(temperature: float) -> list[SamplingParams]:
    given = {"temperature": temperature, "max_tokens": 40}
    return [SamplingParams(seed=20 + i, **given, **ask) for i, ask in enumerate(ASKS)]


@pytest.fixture(scope="module")
def expected(llama: str, plain: LLM) -> dict[float, list[Any]]:
    """What plain decoding emits, each prompt alone."""
    return {
        t: [outcome(answer(plain, prompt, params)) for prompt, params in zip(PROMPTS, asks(t))]
        for t in TEMPERATURES
    }


@pytest.fixture(scope="module")
def known(plain: LLM, expected: dict[float, list[Any]]) -> KnownTexts:
    texts = KnownTexts()
    for t in TEMPERATURES:
        for prompt, params in zip(PROMPTS, asks(t)):
            texts.learn(prompt, int(params.seed or 0), answer(plain, prompt, params).outputs)
    return texts


@alternately
def test_every_drafter_emits_the_text_of_plain_decoding(
    fast: LLM,
    random_draft: str,
    known: KnownTexts,
    expected: dict[float, list[Any]],
    drafter: str,
    temperature: float,
) -> None:
    """Every request of `ASKS` with every drafter, greedy or sampled in turn."""
    use_drafter(fast, drafter, known, random_draft)
    outputs = fast.generate(token_prompts(PROMPTS), asks(temperature))
    assert [outcome(output) for output in outputs] == expected[temperature]
    for output in outputs:
        check_statistics(output.outputs)
    declines = drafter in ("off", "auto") or drafter.startswith("adaptive")  # forced text too, in such a mix
    assert outputs[0].outputs[0].speculation.drafted > 0 or declines
    assert not outputs[-1].outputs[0].speculation.drafted
    check_idle(fast)


@pytest.mark.parametrize(("stop", "reason"), [(30, "stop"), (300, "error")])
@pytest.mark.parametrize("seconds", [0.2, 0.0])
def test_a_row_fails_for_its_output_and_not_for_longer_drafts(
    monkeypatch: pytest.MonkeyPatch, seconds: float, stop: int, reason: str
) -> None:
    """The library follows some 40 tokens of this text, and fewer with drafts that reach further."""
    monkeypatch.setattr("outrider.sampling.grammar.state.MOST_SECONDS", seconds)
    llm = LLM("builtin", speculative_config={"method": "ngram", "num_speculative_tokens": 60})
    assert llm.tokenizer is not None
    first, then = llm.tokenizer.encode("bcd", add_special_tokens=False)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=100,
        stop=["cd" * stop],
        logit_bias={first: 80.0, then: 100.0},
        structured_outputs={"regex": "[xy]+|b(.*c.{300}|.*d.{200}|.*e.{250})*"},
    )
    outputs = [
        llm.generate(["A", "B"], [replace(params, **given), SamplingParams(max_tokens=1)])[0]
        for given in ({"speculate": False}, {}, {"prediction": "b" + "cd" * 99})
    ]
    samples = [output.outputs[0] for output in outputs]
    assert {sample.finish_reason for sample in samples} == {reason}
    assert samples[1].token_ids == samples[2].token_ids == samples[0].token_ids
    assert len({str(output.error) for output in outputs}) == 1
    assert all(sample.speculation.drafted for sample in samples[1:])
    check_idle(llm)


def test_forced_text_is_drafted_beside_any_method_but_not_without_speculation(llama: str) -> None:
    params = asks(0.0)[0]
    llm = LLM(llama, speculative_config={"method": "scripted", "num_speculative_tokens": 2})
    sample = answer(llm, PROMPTS[0], params).outputs[0]
    assert sample.speculation.accepted >= 10, "more than the depth of the method in a step"
    assert answer(llm, PROMPTS[2], asks(0.0)[2]).outputs[0].speculation.drafted == 0
    llm.use(None)
    assert answer(llm, PROMPTS[0], params).outputs[0].speculation.drafted == 0
    llm.use({"method": "scripted", "num_speculative_tokens": 2, "disable_by_batch_size": 1})
    outputs = llm.generate(token_prompts(PROMPTS[:2]), [params, params])
    assert sum(output.outputs[0].speculation.drafted for output in outputs) < sample.speculation.drafted


@pytest.mark.parametrize("adaptive", [False, True])
def test_forced_text_has_its_own_name_and_obeys_the_limit_of_its_request(llama: str, adaptive: bool) -> None:
    llm = LLM(llama, speculative_config={"method": "scripted", "adaptive": adaptive})
    sample = answer(llm, PROMPTS[0], asks(0.0)[0]).outputs[0]
    assert set(sample.token_sources) == {"grammar", None} and len(sample.speculation.accepted_lengths) > 2
    sample = answer(llm, PROMPTS[0], replace(asks(0.0)[0], max_draft_tokens=1)).outputs[0]
    assert len(sample.speculation.accepted_lengths) <= 2


def test_preempted_rows_keep_their_place_in_the_grammar(llama: str, expected: dict[float, list[Any]]) -> None:
    llm = LLM(llama, max_num_seqs=4, max_model_len=112, enable_prefix_caching=False)
    slot = (llm.engine.decoder.footprint + llm.engine.drafter.footprint(llm.engine.device)).total()
    tight = LLM(
        llama,
        max_num_seqs=4,
        max_model_len=112,
        kv_cache_memory_bytes=slot * 160,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram"},
    )
    unpaced(tight)
    outputs = tight.generate(token_prompts(PROMPTS), asks(0.8))
    assert tight.engine.scheduler.preemptions > 0
    assert [outcome(output) for output in outputs] == expected[0.8]


# ---- the other rules: the distribution of plain decoding, and never a forbidden token


@pytest.mark.parametrize("rule", [name for name in verify.names() if name != "match"])
def test_rules_judge_by_the_masked_distribution(llama: str, random_draft: str, plain: LLM, rule: str) -> None:
    choice = ["no", "note", "yes", "yet"]
    params = SamplingParams(
        n=160, seed=1, max_tokens=8, structured_outputs={"choice": choice}, logit_bias={4: 1.0}
    )
    config = {
        "method": "draft_model",
        "model": random_draft,
        "num_speculative_tokens": 3,
        "verification": rule,
    }
    config["lossless"] = verify.rule(rule).lossless
    counts = []
    for llm in (plain, LLM(llama, max_num_seqs=64, speculative_config=config)):
        output = answer(llm, PROMPTS[0], params)
        found = Counter(sample.text for sample in output.outputs)
        assert found.keys() <= {*choice}
        counts.append([found[text] + 1 for text in choice])
    assert sum(sample.speculation.drafted for sample in output.outputs) > 160
    if config["lossless"]:
        assert chi2_contingency(counts).pvalue > 1e-3, counts


def test_a_row_whose_grammar_is_too_complex_holds_no_memory(builtin: LLM) -> None:
    """What its matcher had computed stayed until a collection of all generations: 200 MB."""
    params = SamplingParams(max_tokens=8, structured_outputs={"regex": "a{1000000}"})

    def states() -> list[GrammarState]:
        return [each for each in gc.get_objects() if type(each) is GrammarState]

    gc.collect()
    before = states()
    gc.disable()
    try:
        _, output = builtin.generate(["x", "aaaa"], [SamplingParams(max_tokens=1), params])
        assert "too complex to follow" in str(output.error)
        assert [each for each in states() if each not in before] == []
    finally:
        gc.enable()
