"""`outrider run-batch`: every request of a file has an answer, also after an interruption."""

from __future__ import annotations

import json
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
    out.write_text("\n".join([*kept, refused, '{"custom_id": "4", "resp']))
    result = run("run-batch", "builtin", "-i", asked, "-o", out)
    assert result.status == 2 and "--resume keeps them" in result.err
    result = run("run-batch", "builtin", "-i", asked, "-o", out, "--resume")
    assert result.status == 0 and "3 answered, 3 kept from before" in result.out, result.err
    assert out.read_text().split("\n")[:-1][:3] == kept
    texts = {name: each["response"]["body"]["choices"][0]["text"] for name, each in answers(out).items()}
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
