"""`outrider run-batch`: every request of a file has an answer, also after an interruption."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from outrider import LLM, SamplingParams
from outrider.engine.engine import Engine

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "How many centimeters are 48 meters?"}]


def line(name: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def answers(path: Path) -> dict[str | None, dict[str, Any]]:
    return {each["custom_id"]: each for each in map(json.loads, path.read_text().split("\n")[:-1])}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"


def test_every_route_answers_as_the_offline_api(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    requests = [
        line("text", COMPLETIONS, prompt="Once", max_tokens=8, temperature=0),
        line("chat", CHAT, messages=MESSAGES, max_tokens=8, temperature=0),
        line("items", RESPONSES, input="Hello", max_output_tokens=8),
        line("anthropic", "/v1/messages", model="builtin", messages=MESSAGES, max_tokens=8),
    ]
    asked.write_text("\n\n".join(requests))
    result = run("run-batch", "builtin", "-i", asked, "-o", out)
    assert result.status == 0, result.err
    found = answers(out)
    usages = [each["response"]["body"]["usage"] for each in found.values()]
    tokens = sum(usage.get("completion_tokens", usage.get("output_tokens")) for usage in usages)
    assert f"4 answered; {tokens} tokens" in result.out
    assert [found[name]["response"]["status_code"] for name in ("text", "chat", "items", "anthropic")] == [
        200
    ] * 4
    llm = LLM("builtin", speculative_config=None)
    params = SamplingParams(temperature=0, max_tokens=8)
    text, chat = found["text"]["response"]["body"], found["chat"]["response"]["body"]
    assert text["choices"][0]["text"] == llm.generate("Once", params)[0].outputs[0].text
    assert chat["choices"][0]["message"]["content"] == llm.chat(MESSAGES, params)[0].outputs[0].text


def test_lines_that_are_no_requests_are_answered_with_their_fault(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    lines = {
        "no JSON": "{",
        "custom_id must be a string, got 1": json.dumps({"custom_id": 1}),
        "method must be POST, got 'GET'": line("get", COMPLETIONS).replace("POST", "GET"),
        "url must be one of": line("url", "/v1/embeddings"),
        "body must be an object, got 3": json.dumps({**json.loads(line("body", CHAT)), "body": 3}),
        "unknown field 'model'": json.dumps({**json.loads(line("model", CHAT)), "model": "builtin"}),
        "leave stream out": line("stream", CHAT, stream=True),
        "the custom_id 'url' occurs twice": line("url", COMPLETIONS),
    }
    refused = line("refused", COMPLETIONS, prompt="Once", max_tokens=-1)
    asked.write_text("\n".join([*lines.values(), refused]))
    result = run("run-batch", "builtin", "-i", asked, "-o", out)
    assert result.status == 0 and "1 refused, 8 that are no requests; 0 tokens" in result.out, result.err
    found = [json.loads(each) for each in out.read_text().split("\n")[:-1]]
    faults = [each["error"]["message"] for each in found if each["response"] is None]
    assert all(any(start in fault for fault in faults) for start in lines), faults
    (response,) = [each["response"] for each in found if each["response"]]
    assert response["status_code"] == 400 and response["body"]["error"]["param"] == "max_tokens"


def test_resume_asks_only_for_what_has_no_answer(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    body = {"prompt": "Once\u2028", "max_tokens": 4, "echo": True}  # Python's splitlines cuts at U+2028
    lines = (line(str(n), COMPLETIONS, seed=n, **body) for n in range(6))
    asked.write_text("\n".join(lines).replace("\\u2028", "\u2028"))
    assert run("run-batch", "builtin", "-i", asked, "-o", out).status == 0
    whole = answers(out)
    kept = out.read_text().split("\n")[:-1][:3]
    refused = json.dumps({"custom_id": "5", "response": {"status_code": 429}})
    stranger = kept[0].replace('"custom_id": "', '"custom_id": "of another run ')
    cut = out.read_text().split("\n")[3][:80]
    kept.append(stranger)
    out.write_text("\n".join([*kept, refused, cut]))
    result = run("run-batch", "builtin", "-i", asked, "-o", out)
    assert result.status == 2 and "--resume keeps them" in result.err
    result = run("run-batch", "builtin", "-i", asked, "-o", out, "--resume")
    assert result.status == 0 and "3 answered, 3 kept from before" in result.out, result.err
    assert out.read_text().split("\n")[:-1][:4] == kept
    found = answers(out)
    del found[json.loads(stranger)["custom_id"]]
    texts = {name: each["response"]["body"]["choices"][0]["text"] for name, each in found.items()}
    assert texts == {name: each["response"]["body"]["choices"][0]["text"] for name, each in whole.items()}
    assert "all 6 requests have an answer" in run("run-batch", "-i", asked, "-o", out, "--resume").out


def test_an_engine_that_has_stopped_ends_the_run(
    run: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = files
    asked.write_text("\n".join(line(str(n), COMPLETIONS, prompt="Once", max_tokens=4) for n in range(40)))

    def fail(engine: Engine) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(Engine, "step", fail)
    result = run("run-batch", "builtin", "-i", asked, "-o", out, "--max-num-seqs", 2)
    assert result.status == 2 and "broken" in result.err
    assert len(out.read_text().split("\n")[:-1]) < 40, "the rest is left for --resume"


def test_files_are_required_and_checked_before_the_model(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    assert "-i FILE -o FILE" in run("run-batch", "/missing/model", "-i", asked).err
    assert "cannot be read" in run("run-batch", "/missing/model", "-i", asked, "-o", out).err
    asked.write_text(line("a", COMPLETIONS))
    assert "is a folder" in run("run-batch", "/missing/model", "-i", asked, "-o", out.parent).err


def answer(name: object, text: str = "") -> str:
    body = {"usage": {"completion_tokens": 1}, "text": text}
    parts = {"custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}
    return json.dumps({"id": "batch_req_0", **parts})


@pytest.mark.parametrize(
    "text",
    [
        f"{answer('a')}\nmy notes\n",
        "my notes",
        '{"my": "settings"}',
        "{my: settings}",
        f"{line('a', CHAT)}\n",
        f"{answer([1])}\n",
        f"{answer('a')}\n{answer(None)}\n",
        '{"custom_id": "a", "response": null, "error": null}\n',
        '{"custom_id": "a", "response": {"status_code": "200"}}\n',
        "[" * 100_000 + "\n",
        f"{answer('a')[:60]}\n{answer('b')}\n",
    ],
)
def test_resume_leaves_a_file_that_has_other_lines_than_answers(
    run: Run, files: tuple[Path, Path], text: str
) -> None:
    asked, out = files
    asked.write_text(line("a", COMPLETIONS, prompt="Hi", max_tokens=1))
    out.write_text(text)
    result = run("run-batch", "/missing/model", "-i", asked, "-o", out, "--resume")
    assert result.status == 2 and "is no file of answers: line" in result.err, result.err
    assert out.read_text() == text


@pytest.mark.parametrize("linked", [False, True])
def test_requests_and_answers_are_two_files(run: Run, files: tuple[Path, Path], linked: bool) -> None:
    asked, out = files
    asked.write_text(text := line("a", COMPLETIONS, prompt="Hi", max_tokens=1))
    if linked:
        out.symlink_to(asked)
    for resume in ((), ("--resume",)):
        result = run("run-batch", "/missing/model", "-i", asked, "-o", out if linked else asked, *resume)
        assert result.status == 2 and "are one file" in result.err, result.err
        assert asked.read_text() == text


def test_a_line_that_cannot_be_sent_is_answered_and_ends_nothing(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    body = {"prompt": "Hi", "max_tokens": 2}
    lines = [
        line("nan", COMPLETIONS, temperature=float("nan"), **body),
        line("huge", COMPLETIONS, temperature=0.25, **body).replace("0.25", "1e999"),
        line("half", COMPLETIONS, prompt="x\ud800", max_tokens=2),
        line("q\ud800", COMPLETIONS, **body),
        line("[/b]", COMPLETIONS, **body),
        line("deep", COMPLETIONS, prompt="DEEP").replace('"DEEP"', "[" * 900 + "]" * 900),
        line("whole", COMPLETIONS, **body),
    ]
    asked.write_text("\n".join(["\ufeff" + lines[0], *lines[1:]]))
    result = run("run-batch", "builtin", "-i", asked, "-o", out)
    assert result.status == 0, result.err
    found = [json.loads(each) for each in out.read_text().split("\n")[:-1]]
    faults = sorted(each["error"]["message"] for each in found if each["custom_id"] is None)
    assert [fault.partition(":")[0] for fault in faults] == ["line 1", "line 2"]
    assert "NaN is no finite number" in faults[0] and "1e999 is no finite number" in faults[1]
    named = answers(out)
    assert {"half", "q\ud800", "[/b]", "deep", "whole"} == {*named} - {None}
    for name in ("q\ud800", "[/b]", "whole"):
        assert named[name]["response"]["status_code"] == 200
    assert named["deep"]["error"] or named["deep"]["response"]["status_code"] == 400
    result = run("run-batch", "/missing/model", "-i", asked, "-o", out, "--resume")
    assert "no checkpoint folder" in result.err, "those without an answer are asked for again"


def test_a_byte_order_mark_is_no_part_of_the_first_line(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    asked.write_text("\ufeff" + line("a", COMPLETIONS, prompt="Hi", max_tokens=1))
    out.write_text(f"\ufeff{answer('a')}\n")
    result = run("run-batch", "/missing/model", "-i", asked, "-o", out, "--resume")
    assert "all 1 requests have an answer" in result.out, result.err


def test_resume_writes_through_a_link_and_keeps_permissions(run: Run, files: tuple[Path, Path]) -> None:
    asked, out = files
    asked.write_text(line("a", COMPLETIONS, prompt="Hi", max_tokens=1))
    real = out.with_name("real")
    real.write_text(f"{answer('a')}\n{answer('b')[:50]}")
    real.chmod(0o640)
    out.symlink_to(real)
    result = run("run-batch", "/missing/model", "-i", asked, "-o", out, "--resume")
    assert result.status == 0, result.err
    assert out.is_symlink() and real.read_text() == f"{answer('a')}\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert {each.name for each in out.parent.iterdir()} == {asked.name, out.name, "real"}


def test_interrupt_ends_with_status_130_and_a_hint(
    run: Run, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = files
    asked.write_text("\n".join(line(str(n), COMPLETIONS, prompt="Once", max_tokens=4) for n in range(100)))
    step, calls = Engine.step, []

    def interrupted(engine: Engine) -> object:
        calls.append(1)
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("run-batch", "builtin", "-i", asked, "-o", out, "--max-num-seqs", 2)
    count = len(out.read_text().split("\n")[:-1])
    assert result.status == 130 and 0 < count < 100
    assert f"{count} of 100 requests are answered: --resume goes on" in result.err, result.err
