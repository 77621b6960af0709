"""`outrider chat` with lines piped in: a conversation with `llm.chat`, and its commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import Run
from covering import parametrized

from outrider import LLM, SamplingParams
from outrider.cli.chat import messages
from outrider.engine.engine import Engine

SETTINGS = ("-s", 3, "-n", 20, "--temp", 0.8)
PARAMS = SamplingParams(seed=3, max_tokens=20, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)


def conversation(questions: list[str], system: str | None = None) -> list[str]:
    """The answers of `llm.chat`, each with the whole conversation before it."""
    llm = LLM("builtin")
    history = [{"role": "system", "content": system}] if system else []
    answers = []
    for question in questions:
        history.append({"role": "user", "content": question})
        answers.append(llm.chat(history, PARAMS)[0].outputs[0].text)
        history.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_conversation_has_a_memory(run: Run) -> None:
    questions = ["What do plants need in order to grow?", "And trees?"]
    expected = conversation(questions)
    for more in ((), ("-md", "builtin-draft", "--draft", 2)):
        result = run("chat", *SETTINGS, *more, stdin="\n".join(questions))
        assert (result.status, result.out.splitlines()) == (0, "\n".join(expected).splitlines())
    assert expected[1] != conversation(questions[1:])[0], "the first turn matters"


def test_system_and_reset_start_again(run: Run) -> None:
    output = run(
        "chat",
        *SETTINGS,
        "-sys",
        "Be brief.",
        stdin="Hello\n/reset\nHello\n/system Be kind.\nHello\n/system\nHello\n/exit\nHello\n",
    )
    brief, kind, none = (conversation(["Hello"], system)[0] for system in ("Be brief.", "Be kind.", None))
    assert output.out.splitlines() == f"{brief}\n{brief}\n{kind}\n{none}".splitlines()
    assert len({brief, kind, none}) > 1


def test_statistics_count_matches_and_accepted_tokens(run: Run) -> None:
    result = run(
        "chat",
        *SETTINGS,
        "-md",
        "builtin-draft",
        "--draft",
        2,
        stdin="What do plants need to grow?\nAnd trees?\n/stats\n",
    )
    assert (
        "2 turns" in result.out and "tokens per step" in result.out and "draft tokens accepted" in result.out
    )
    found, asked = (
        int(word) for word in result.out.split("prefix cache: ")[1].split(" prompt")[0].split(" of ")
    )
    assert 0 < found < asked and found % 16 == 0


@pytest.mark.parametrize("lossless", [True, False])
def test_statistics_mark_lossy_rules(run: Run, lossless: bool) -> None:
    config = {"method": "ngram", "verification": "match" if lossless else "typical", "lossless": lossless}
    result = run("chat", *SETTINGS, "--speculative-config", json.dumps(config), stdin="Hello\n/stats\n")
    assert "1 turn," in result.out and ("not lossless: the verification rule" in result.out) != lossless


def test_help_and_unknown_commands(run: Run) -> None:
    result = run("chat", stdin="/help\n/nosuch\n/exit\n")
    assert result.status == 0
    assert "no command /nosuch" in result.out and result.out.count("/stats") == 2


def test_a_template_from_a_file(run: Run, tmp_path: Path, mute: str) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    assert run("chat", "-m", mute, "-n", 4, "--chat-template-file", template, stdin="hello\n").status == 0


def test_invalid_arguments_are_refused_before_the_chat(run: Run, mute: str) -> None:
    for arguments, output in (
        (("-m", mute), "no chat template: give one with --chat-template-file"),
        (("--chat-template-file", "/no/such/file"), "/no/such/file"),
        (("-m", "/no/model"), "/no/model"),
        (("-c", 16), "context"),
    ):
        result = run(
            "chat",
            *arguments,
            stdin="What do plants need in order to grow, and what do trees need in order to grow?\n",
        )
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert output in result.err


def test_ctrl_c_ends_a_piped_conversation(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, iter(range(100))

    def interrupted(engine: Engine) -> object:
        if next(steps) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("chat", "--method", "off", "-n", 50, "--ignore-eos", stdin="Hello\nHello\n")
    assert result.status == 130
    assert "1 turn, 5 tokens" in result.err


def typed(keys: list[str | type[BaseException]], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The messages of a terminal on which these lines and keys are typed."""
    pressed = iter(keys)

    def answer(_: str) -> str:
        if isinstance(key := next(pressed), str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", answer)
    return messages(True)


def test_ctrl_d_ends_the_line_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(typed([EOFError], monkeypatch)) == []
    assert capsys.readouterr().out == "\n"


def test_ctrl_c_while_typing_discards_the_line_and_twice_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [KeyboardInterrupt, "one", "two \\", KeyboardInterrupt, "three", KeyboardInterrupt]
    typing = typed([*keys, KeyboardInterrupt], monkeypatch)
    assert [next(typing), next(typing)] == ["one", "three"]
    assert "a second Ctrl-C" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        next(typing)


def test_a_line_that_ends_in_a_backslash_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(typed(["a\\", "", EOFError], monkeypatch)) == ["a\n"]
    assert list(typed(["a\\", "b \\", "c", EOFError], monkeypatch)) == ["a\nb \nc"]
    expected = conversation(["What do plants\nneed in order to grow?"])
    result = run("chat", *SETTINGS, stdin="What do plants\\\nneed in order to grow?\n")
    assert (result.status, result.out) == (0, f"{expected[0]}\n")


def test_a_conversation_goes_on_beyond_the_context(run: Run) -> None:
    """The oldest turns are left out, and the system message stays."""
    asked = [f"What do {plants} need in order to grow?" for plants in ("trees", "ferns", "herbs", "roses")]
    settings = ("-s", 3, "--temp", 0.8, "-n", 24, "--ignore-eos", "-c", 96, "-sys", "Be brief.")
    result = run("chat", *settings, stdin="\n".join([*asked, "/stats"]))
    assert result.status == 0 and "4 turns, 96 tokens" in result.out
    assert "oldest" in result.err
    llm, limited = LLM("builtin"), replace(PARAMS, max_tokens=24, ignore_eos=True)
    system = {"role": "system", "content": "Be brief."}
    alone = llm.chat([system, {"role": "user", "content": asked[2]}], limited)[0].outputs[0].text
    assert alone in result.out


@parametrized(
    {"errors": ["strict", "surrogateescape"], "words": ["chat", "generate -f -"]},
    [("strict", "generate -f -"), ("surrogateescape", "chat")],
)
def test_a_message_that_is_no_text_is_named(errors: str, words: str) -> None:
    """In a process of its own, as bytes are decoded there, in any way that the locale asks for."""
    env = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    command = [sys.executable, "-m", "outrider", *words.split(), "-n", "4"]
    result = subprocess.run(command, env=env, input=b"fine\nh\xe9llo\n", capture_output=True)
    assert result.returncode == 2, result.stderr
    last = result.stderr.decode().splitlines()[-1]
    assert last.startswith("error: standard input is not UTF-8 text: byte 0xe9"), last
