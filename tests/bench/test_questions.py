"""Forms of files for --prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, RequestError, SamplingParams
from outrider.bench.questions import Question, prompts_of, read
from outrider.engine.chat_template import render

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi"}, Question("all", ("Hi",))),
        ({"prompt": "Hi", "response": "x", "category": "qa"}, Question("qa", ("Hi",))),
        ({"turns": ["Hi", "And?"]}, Question("all", ("Hi", "And?"))),
        ({"messages": [SYSTEM, USER, ANSWER]}, Question("all", ("Hi",), before=(SYSTEM,))),
        ({"messages": [PARTS]}, Question("all", ("Hi",))),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, Question("all", ("Hi",))),
        ({"custom_id": "1", "body": {"model": "m", "messages": [USER]}}, Question("all", ("Hi",))),
        ({"text": "Hi"}, Question("all", ("Hi",), raw=True)),
    ],
    ids=str,
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", "list of .json"])
def test_prompts_have_the_forms_of_other_programs(
    record: dict[str, Any], expected: Question, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{suffix.split('.')[-1]}"
    given = [record] if suffix == "list of .json" else record
    path.write_text(json.dumps(given, indent=None if suffix == ".jsonl" else 1))
    assert read(path) == [expected]


@pytest.mark.parametrize("record", [{"messages": [SYSTEM]}, {"prompt": ""}, {"messages": []}], ids=str)
def test_a_line_without_a_prompt_is_named(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "Hi"}\n' + json.dumps(record))
    with pytest.raises(RequestError, match=r"a\.jsonl, line 2: (neither messages|no message)"):
        read(path)


def test_an_entry_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "Hi"}, {"prompt": ""}], indent=1))
    with pytest.raises(RequestError, match=r"a\.json, entry 2: neither messages"):
        read(path)


def test_a_text_is_asked_once_among_all_turns(tmp_path: Path) -> None:
    llm, path = LLM("builtin", max_model_len=256), tmp_path / "a.jsonl"
    path.write_text('{"text": "The cat"}\n{"turns": ["Hi", "And?"]}')
    params = SamplingParams(temperature=0, max_tokens=2)
    prompts, _ = prompts_of(llm, read(path), params, all_turns=True)
    assert len(prompts) == 3
    assert prompts[0][1]["prompt_token_ids"] == llm.tokenizer.encode("The cat")


def test_messages_before_the_last_one_are_in_the_prompt(tmp_path: Path) -> None:
    llm, path = LLM("builtin", max_model_len=256), tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "Hello"}, USER]}))
    params = SamplingParams(max_tokens=4)
    ((_, prompt),) = prompts_of(llm, read(path), params)[0]
    messages = json.loads(path.read_text())["messages"]
    assert prompt["prompt_token_ids"] == render(llm.tokenizer, {"messages": messages})["prompt_token_ids"]
    ((_, raw),) = prompts_of(llm, read(path, raw=True), params)[0]
    assert raw["prompt_token_ids"] == llm.tokenizer.encode("Hi\n\nHello\n\nHi")
