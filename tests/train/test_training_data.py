"""Forms of training data, and what is done with bad lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM
from outrider.bench.conversations import example_of
from outrider.errors import RequestError
from outrider.train.data import read

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Good night"},
]


def line(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_conversations_end_with_the_last_user_message() -> None:
    found = example_of(line({"messages": CHAT}), ".jsonl")
    assert [dict(one) for one in found.messages] == CHAT[:4] and found.answer == "Good night"
    named = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    found = example_of(line({"conversations": named}), ".jsonl")
    assert [dict(one) for one in found.messages] == CHAT[1:2] and found.answer == "Hello"


@pytest.mark.parametrize(
    ("record", "asked", "answer"),
    [
        ({"prompt": "P", "response": "R"}, "P", "R"),
        ({"question": "Q", "answer": "A"}, "Q", "A"),
        ({"prompt": "P", "answer": "A"}, "P", "A"),
        ({"prompt": "P"}, "P", ""),
        ({"instruction": "I", "input": "more", "output": "O"}, "I\nmore", "O"),
        ({"category": "math", "turns": ["T", "later"]}, "T", ""),
    ],
)
def test_pairs_and_turns_are_conversations(record: dict[str, Any], asked: str, answer: str) -> None:
    found = example_of(line(record), ".jsonl")
    assert [dict(one) for one in found.messages] == [{"role": "user", "content": asked}]
    assert found.answer == answer


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b'{"text": " "}', b'{"messages": [{"role": "user"}]}', b"[" * 100_000]
)
def test_other_lines_are_refused(bad: bytes) -> None:
    with pytest.raises(RequestError):
        example_of(bad, ".jsonl")


def test_a_text_file_has_a_text_in_every_paragraph(target: LLM, run_options: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat\nsat on the mat\n\n\nrain fell on the roof\n\nshe said no, and ran home\n")
    given = run_options("medusa", tmp_path, data=(str(path),), regenerate=False)
    items, (source,) = read(target, given)
    tokenizer = target.tokenizer
    assert [tokenizer.decode(item.prompt + item.answer) for item in items][:2] == [
        "the cat\nsat on the mat", "rain fell on the roof"
    ]  # fmt: skip
    assert all(len(item.prompt) == 1 for item in items) and source.lines == 3 and not source.bad


def test_a_json_file_may_be_one_list(target: LLM, run_options: Any, tmp_path: Path) -> None:
    """ShareGPT's form.  What is no conversation in it is named by its number."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "the cat"}, 7, {"prompt": "abc"}], indent=1))
    items, (source,) = read(target, run_options("medusa", tmp_path, data=(str(path),)))
    assert len(items) == 2 and source.lines == 3
    assert source.bad == ["entry 2: neither messages nor turns, prompt or text: 7"]


def test_texts_are_cut_and_long_prompts_left_out(target: LLM, run_options: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    records = [{"prompt": "the cat " * n, "response": "ate it all up " * 9} for n in (1, 2, 40)]
    path.write_bytes(b"\n".join(line(one) for one in records))
    given = run_options("medusa", tmp_path, data=(str(path),), regenerate=False)
    items, (source,) = read(target, given)
    assert [len(item.prompt) + len(item.answer) for item in items] == [24, 24]
    assert len(source.bad) == 1 and source.bad[0].startswith("line 3: a prompt of")
    assert len(read(target, run_options("medusa", tmp_path, data=(str(path),), limit=2))[0]) == 2
    path.write_text("nothing\n")
    with pytest.raises(RequestError, match=r"0 usable texts, and at least 2 .*\. line 1: no JSON"):
        read(target, given)
    with pytest.raises(RequestError, match="cannot be read"):
        read(target, run_options("medusa", tmp_path, data=("missing.jsonl",)))


def test_lines_that_the_tokenizer_cannot_read_are_left_out(
    target: LLM, run_options: Any, tmp_path: Path
) -> None:
    """Half of a surrogate pair, of an emoji that was cut."""
    path = tmp_path / "a.jsonl"
    good = {"prompt": "the cat", "response": "ate it all up"}
    wrong = [{"text": "a \ud83d"}, {**good, "response": "a \ud83d"}, {**good, "prompt": "a \ud83d"}]
    path.write_bytes(b"\n".join(line(one) for one in (good, *wrong, good)))
    items, (source,) = read(target, run_options("medusa", tmp_path, data=(str(path),), regenerate=False))
    assert len(items) == 2 and [bad.split(":")[0] for bad in source.bad] == ["line 2", "line 3", "line 4"]
    assert all("cannot" in bad for bad in source.bad)
