"""`outrider generate`: the engine's text, consistent figures, and one line with status 2 for an error."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Run

from outrider import LLM, SamplingParams, draft
from outrider.bench.figures import figures
from outrider.cli.flags import ENGINE, SAMPLING, SPECULATION
from outrider.cli.generate import read_prompt, unescaped
from outrider.config import EngineOptions
from outrider.control import fixed
from outrider.engine.engine import Engine

TEXT = "The future of AI is"
SETTINGS = ("-s", 5, "-n", 24, "--temp", 0.7, "--top-k", 30, "--top-p", 0.9, "--min-p", 0.02)
PARAMS = SamplingParams(seed=5, max_tokens=24, temperature=0.7, top_k=30, top_p=0.9, min_p=0.02)


@pytest.fixture(scope="module")
def answer() -> str:
    """The engine's continuation of TEXT."""
    return LLM("builtin").generate(TEXT, PARAMS)[0].outputs[0].text


def test_it_streams_the_engines_text_after_the_prompt(run: Run, answer: str) -> None:
    for more in (
        (),
        ("-md", "builtin-draft", "--draft", 3),
        ("--method", "ngram"),
        ("--speculative-config", '{"method": "ngram"}'),
    ):
        result = run("generate", "-p", TEXT, *SETTINGS, *more)
        assert (result.status, result.out) == (0, f"{TEXT}{answer}\n")
    assert run("generate", "-p", TEXT, *SETTINGS, "--no-display-prompt").out == f"{answer}\n"
    assert run("generate", TEXT, *SETTINGS).out == f"{TEXT}{answer}\n"


def test_every_flag_is_a_field_of_what_it_sets() -> None:
    """Every flag is declared under the name that is documented."""

    def named(kind: Any) -> set[str]:
        return {f.name for f in dataclasses.fields(kind)}

    keys = named(draft.method("draft_model").Options) | named(fixed.Options) | {"method"}
    for group, known in (
        (ENGINE, named(EngineOptions) | {"threads"}),
        (SAMPLING, named(SamplingParams)),
        (SPECULATION, keys | {"config"}),
    ):
        assert {flag.field for flag in group} <= known


def test_penalties_are_passed_on(run: Run) -> None:
    given = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = (
        LLM("builtin")
        .generate(TEXT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **given))[0]
        .outputs[0]
        .text
    )
    plain = ("generate", "-p", TEXT, "-n", 40, "--temp", 0, "--ignore-eos")
    flags = ("--repeat-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.25)
    assert run(*plain, *flags).out == f"{TEXT}{expected}\n"
    assert run(*plain).out != f"{TEXT}{expected}\n", "left alone, the text repeats itself"


def test_the_prompt_from_a_file_and_from_standard_input(run: Run, answer: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(TEXT + "\n")
    assert run("generate", "-f", tmp_path / "prompt.txt", *SETTINGS).out == f"{TEXT}{answer}\n"
    assert run("generate", "-f", "-", *SETTINGS, stdin=TEXT).out == f"{TEXT}{answer}\n"


def test_a_prompt_file_is_utf_8_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Über".encode())
    monkeypatch.setattr("io.text_encoding", lambda given, *_: given or "latin-1")
    assert read_prompt(None, str(file), False) == "Über"


def test_underscores_are_dashes(run: Run) -> None:
    one, other = (
        run("generate", "-p", TEXT, "-n", 4, "-s", 1, name, 1).out for name in ("--top_k", "--top-k")
    )
    assert one == other


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"a\nb", "a\nb"),
        (r"\t\r\'\"\\", "\t\r'\"\\"),
        (r"\x41\x7a", "Az"),
        (r"\q \x4", r"\q \x4"),
        (r"\\n", r"\n"),
        ("a\\", "a\\"),
    ],
)
def test_backslash_escapes_in_a_prompt_are_replaced(typed: str, meant: str) -> None:
    assert unescaped(typed) == meant


def test_escapes_are_read_on_demand(run: Run) -> None:
    assert run("generate", "-p", r"a\nb", "-e", "-n", 1).out.startswith("a\nb")
    assert run("generate", "-p", r"a\nb", "-n", 1).out.startswith(r"a\nb")


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in {text}"
    return float(found.group(1))


def test_a_tree_has_its_depth_and_its_nodes(run: Run) -> None:
    config = '{"model": "builtin-draft", "num_speculative_tokens": 2, "siblings": 2}'
    message = run("generate", "-p", TEXT, "-n", 4, "--speculative-config", config).err
    nodes = LLM("builtin", speculative_config=json.loads(config)).engine.drafter.size(2)
    assert nodes > 2 and f"n_draft   = 2 (depth of a tree of up to {nodes} nodes)\n" in message


def test_the_figures_are_those_of_the_request(run: Run) -> None:
    config = {"model": "builtin-draft", "num_speculative_tokens": 3}
    llm = LLM("builtin", speculative_config=config)
    (output,) = llm.generate(TEXT, PARAMS)
    message = run("generate", "-p", TEXT, *SETTINGS, "-md", "builtin-draft", "--draft", 3).err
    total = output.speculation
    assert number(r"encoded +(\d+) tokens", message) == len(output.prompt_token_ids)
    assert number(r"n_draft   = (\d+)", message) == 3
    assert number(r"n_predict = (\d+)", message) == total.emitted
    assert number(r"n_drafted = (\d+)", message) == total.drafted
    assert number(r"n_accept  = (\d+)", message) == total.accepted
    assert number(r"accept    = ([\d.]+)%", message) == pytest.approx(100 * total.acceptance, abs=1e-3)
    draft, target = message.split("draft:")[1].split("target:")
    begun, later = (
        [number(rf"{name} = .* / +(\d+) tokens", block) for block in (draft, target)]
        for name in ("prompt eval time", r"\n +eval time")
    )
    prompt, steps = len(output.prompt_token_ids), total.steps
    assert begun == [prompt + 3, prompt + 3], "three draft tokens while the prompt is computed"
    assert later == [total.drafted - 3, total.drafted - 3 + steps - 1]
    assert number(r"in (\d+) runs", target) == steps - 1
    llm.engine.reset()
    llm.generate(TEXT, PARAMS)
    ours = figures(llm.engine, output, 1.5, 2.5)
    times = llm.engine.times
    for block, seconds in zip(
        ours.split("draft:")[1].split("target:"), (times.propose, times.forward + times.rest)
    ):
        spent = sum(float(ms) for ms in re.findall(r"time = +([\d.]+) ms .*\(", block))
        assert spent == pytest.approx(1e3 * seconds, abs=0.02), "no second is counted twice or not at all"
    for block in (draft, target):
        for line in re.findall(
            r"time = +([\d.]+) ms / +(\d+) tokens.*\( *([\d.]+) ms per token, +([\d.]+) tokens per second\)",
            block,
        ):
            ms, tokens, each, rate = map(float, line)
            assert (
                ms > 0
                and each == pytest.approx(ms / tokens, abs=0.006)
                and rate == pytest.approx(1e3 * tokens / ms, rel=0.02)
            )


def test_load_and_total_time(run: Run) -> None:
    message = run("generate", "-p", TEXT, "-n", 4, "--method", "off").err
    load, sample, total = (
        number(rf"{name} time = +([\d.]+) ms", message) for name in ("load", "sample", "total")
    )
    evals = [float(ms) for ms in re.findall(r"eval time = +([\d.]+) ms", message)]
    assert len(evals) == 2 and sample > 0 < load
    assert total > load + sample + sum(evals)
    assert (
        number(r"total time = .* / +(\d+) tokens", message) == number(r"encoded +(\d+) tokens", message) + 4
    )
    assert number(r"sample time = .* / +(\d+) tokens", message) == 4


def test_plain_decoding_has_no_draft(run: Run) -> None:
    message = run("generate", "-p", TEXT, "-n", 3, "--method", "off").err
    assert "target:" in message and "n_predict = 3" in message
    assert "draft" not in message and "accept" not in message
    assert run("generate", "-p", TEXT, "-n", 3, "--no-perf").err == ""


def test_a_negative_count_goes_to_the_end_of_the_context(run: Run) -> None:
    message = run("generate", "-p", TEXT, "-n", -1, "-c", 40, "--ignore-eos").err
    assert number(r"n_predict = (\d+)", message) == 40 - number(r"encoded +(\d+) tokens", message)


BAD: list[tuple[tuple[Any, ...], str]] = [
    ((), "-p TEXT or with -f FILE"),
    (("-p", "x", "-f", "y"), "-p TEXT or with -f FILE"),
    (("-f", "/no/such/file"), "/no/such/file"),
    (("-p", ""), "empty"),
    (("-p", "x", "--nosuch"), "--nosuch"),
    (("-p", "x", "-n", "many"), "--n-predict"),
    (("-p", "x", "-n", 0), "max_tokens"),
    (("-p", "x", "--temp", -1), "temperature"),
    (("-p", "x", "--top-p", 2), "top_p"),
    (("-p", "x", "-m", "/no/model"), "/no/model"),
    (("-p", "x", "-md", "/no/model"), "/no/model"),
    (("-p", "x " * 300, "-c", 64), "context"),
    (("-p", "x", "-t", 0), "threads"),
    (("-p", "x", "--dtype", "float3"), "float3"),
    (("-p", "x", "--device", "gpu"), "gpu"),
    (("-p", "x", "--draft-p-min", 0.5), "--draft-p-min is for a draft model: give one with -md"),
    (
        ("-p", "x", "-md", "builtin-draft", "--draft-p-min", 2),
        "--draft-p-min must be a number in [0, 1]",
    ),
    (("-p", "x", "--method", "ngarm"), "Did you mean 'ngram'"),
    (("-p", "x", "--method", "ngram", "--draft", -1), "num_speculative_tokens"),
    (("-p", "x", "--speculative-config", "{"), "no JSON"),
    (("-p", "x", "--speculative-config", "[]"), "object"),
    (("-p", "x", "--speculative-config", '{"method": "ngram", "prompt_lookup_mox": 3}'), "prompt_lookup_max"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=[" ".join(map(str, arguments))[:40] for arguments, _ in BAD]
)
def test_errors_are_one_line_without_output(run: Run, arguments: tuple[Any, ...], message: str) -> None:
    result = run("generate", *arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert result.err.startswith("error:") and result.err.count("\n") == 1


def test_no_command_and_a_wrong_one(run: Run) -> None:
    assert "generate" in run("--help").out and run("--help").status == 0
    assert run("generait").status == 2
    assert run("version").out.strip().count(".") == 2


def test_ctrl_c_ends_with_the_figures_so_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, iter(range(100))

    def interrupted(engine: Engine) -> Any:
        if next(steps) == 6:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    result = run("generate", "--method", "off", "-p", TEXT, "-n", 50, "--ignore-eos")
    assert result.status == 130
    assert result.out.startswith(TEXT) and result.out.endswith("\n") and len(result.out) > len(TEXT) + 1
    assert number(r"n_predict = (\d+)", result.err) == 7, "the step that was under way is finished"
    assert "Traceback" not in result.err


def test_ctrl_c_in_a_process_of_its_own() -> None:
    command = [
        sys.executable,
        "-m",
        "outrider",
        "generate",
        "-p",
        TEXT,
        "-n",
        "-1",
        "--ignore-eos",
        "--temp",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(len(TEXT) + 4)  # it is talking
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "n_predict" in err.decode() and "Traceback" not in err.decode()


# ---- constrained output


def test_the_answer_has_the_form_that_was_asked_for(run: Run, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"enum": ["red", "blue"]}')
    grammar.write_text('root ::= "red" | "blue"')
    given = ("generate", "-p", "A colour: ", "-n", 8, "-s", 1, "--no-display-prompt", "--no-perf")
    for form in (("-j", schema), ("--json-schema", '{"enum": ["red", "blue"]}')):
        assert run(*given, *form).out.strip() in ('"red"', '"blue"')
    for form in (
        ("--grammar", 'start: "red" | "blue"'),
        ("--grammar-file", grammar),
        ("--regex", "red|blue"),
    ):
        assert run(*given, *form).out.strip() in ("red", "blue")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (("-j", "{"), "json is no JSON"),
        (("-j", "missing.json"), "missing.json' cannot be read"),
        (("-j", '{"not": {}}'), "at #: not is not supported"),
        (("--grammar", "a", "--grammar-file", "b"), "either --grammar or --grammar-file"),
        (("--regex", "a", "--grammar", 'start: "a"'), "exactly one of"),
    ],
)
def test_a_wrong_structured_output_is_one_error_line(run: Run, form: tuple[str, ...], message: str) -> None:
    result = run("generate", "-p", "a", "-n", 1, *form)
    assert result.status == 2 and message in result.err and len(result.err.strip().splitlines()) == 1
