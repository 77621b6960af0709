"""Flags of all commands: llama.cpp's names, one spelling, quick help, one line per mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import Run

from outrider import LLM
from outrider.backends.cpu.threads import processors
from outrider.cli import app, flags
from outrider.cli.speculation import AUTO, config_of, parsed
from outrider.errors import ConfigError

LLAMA_CPP = r"""
-m builtin
-p "// Quick-sort implementation in C (4 spaces indentation + comments) and sample usage:\n\n#include"
-e -ngl 1 -t 4 -n 256 -c 4096 -s 8 --top_k 1

-m builtin -md builtin-draft
-p "// Quick-sort implementation in C (4 spaces indentation + comments) and sample usage:\n\n#include"
-e -ngl 1 -t 4 -n 256 -c 4096 -s 8 --top_k 1 --draft 16

-m builtin -md builtin-draft
-p "// Dijkstra algorithm in C++ (4 spaces indentation + detailed comments) + sample usage:\n\n"
-e -ngl 1 -t 4 -n 4096 -c 4096 -s 20 --top_k 1 --draft 16

-m builtin -md builtin-draft
-p "# Dijkstra's shortest path algorithm in Python (4 spaces indentation) + complexity analysis:\n\n"
-e -ngl 1 -t 4 -n 512 -c 4096 -s 20 --top_k 1 --draft 16
""".strip().split("\n\n")


def commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of all that can be called."""

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name.strip(), command
        for word, part in (inner or {}).items():
            yield from below(f"{name} {word}", part)

    yield from below("", typer.main.get_command(app))


COMMANDS = dict(commands())


def test_a_file_of_an_option_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"path": "naïve"}', encoding="utf-8")
    code = f"from outrider.cli.speculation import parsed; print(ascii(parsed({f'@{file}'!r})))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **locale}, capture_output=True)
    assert done.stdout.decode().strip() == r"{'path': 'na\xefve'}", done.stderr.decode()


@pytest.mark.parametrize("line", LLAMA_CPP, ids=["plain", "quicksort", "dijkstra-cpp", "dijkstra-python"])
def test_the_commands_that_introduced_speculation_to_llama_cpp(run: Run, mute: str, line: str) -> None:
    import torch

    words = [mute if word in ("builtin", "builtin-draft") else word for word in shlex.split(line)]
    threads = torch.get_num_threads()
    try:
        result = run("generate", *words)
    finally:
        torch.set_num_threads(threads)
    assert result.status == 0, result.err
    prompt = re.search(r'-p "(.*)"\n', line)
    assert prompt and result.out.startswith(prompt[1].replace(r"\n", "\n"))
    notes = [
        line for line in result.err.splitlines() if line.startswith("note: ") and "-t 4 is more" not in line
    ]
    assert len(notes) == 2 and "-ngl 1" in notes[1] and "-c 4096" in notes[0]
    assert ("n_draft   = 16" in result.err) == ("-md" in line)


def test_what_the_model_does_not_have_is_clipped(run: Run) -> None:
    context = LLM("builtin").engine.max_len
    result = run(
        "generate", "-p", "x", "-n", 2, "-c", 99999, "-ngl", "all", "-md", "builtin-draft", "-ngld", 7
    )
    assert result.status == 0
    assert (
        f"-c 99999 is more than the {context} tokens" in result.err and "-ngld 7 does nothing" in result.err
    )
    assert run("generate", "-p", "x", "-n", 2, "-ngl", "some").status == 2
    (line,) = run("models", "builtin", "-c", 99999, "--json").out.splitlines()
    assert json.loads(line)["request_tokens"] == context


def test_threads_beyond_the_processors_are_clipped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    result = run("generate", "-p", "x", "-n", 2, "-t", 9999)
    assert result.status == 0 and "note: -t 9999 is more than the processors" in result.err
    assert given[-1] == processors() < 9999


def test_flags_of_llama_cpp_without_effect(run: Run) -> None:
    plain = run("generate", "-p", "The sea", "-n", 4, "-s", 1)
    words = shlex.split(
        "-td 2 -cd 512 --draft-min 1 -ctkd q8_0 -tb 2 -b 512 --mlock -fa --no-warmup --log-disable --jinja "
        "-t -1 --color on -v --numa distribute -np 1 --simple-io --no-context-shift -kvu"
    )
    result = run("generate", "-p", "The sea", "-n", 4, "-s", 1, *words)
    assert (result.status, result.out) == (0, plain.out), result.err
    notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 18 and any("--threads-draft does nothing here" in line for line in notes)
    assert "--threads-draft" not in run("generate", "--help").out
    assert run("generate", "-p", "The sea", "-n", 4, "-s", 1, "-fa", "off").out == plain.out


def test_flags_of_a_conversation_are_for_chat(run: Run) -> None:
    plain = run("chat", "-n", 4, "-s", 1, stdin="Hello\n")
    result = run("chat", "-n", 4, "-s", 1, "-i", "-cnv", "-mli", "--color", stdin="Hello\n")
    assert (result.status, result.out) == (0, plain.out), result.err


def test_the_draft_stops_where_it_is_not_sure(run: Run) -> None:
    drafted = []
    for more in ((), ("--draft-p-min", 0.9)):
        pair = ("-m", "builtin", "-md", "builtin-draft", "--draft-n", 6, *more)
        message = run("generate", "-p", "The future of AI is", "-n", 24, "-s", 1, "--temp", 0, *pair)
        assert message.status == 0, message.err
        drafted.append(int(message.err.split("n_drafted = ")[1].split()[0]))
    assert drafted[1] < drafted[0]


@pytest.mark.parametrize("name", ["--device-draft", "-devd", "--draft-device"])
def test_draft_device_flags_reach_the_draft(run: Run, name: str) -> None:
    given = ("generate", "-p", "x", "-n", 2, "-md", "builtin-draft", name)
    assert run(*given, "cpu").status == 0
    refused = run(*given, "gpu")
    assert refused.status == 2 and "draft_device 'gpu'" in refused.err


# ---- one spelling


SPELLINGS = {
    name: value
    for name, value in vars(flags).items()
    if name
    in ("MODEL", "MODEL_DRAFT", "LEVELS", "MAX_TOKENS", "TEMPERATURE", "SEED", "OUT", "PROMPTS", "RAW")
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_has_the_same_names_in_every_command(command: str) -> None:
    for parameter in COMMANDS[command].params:
        names = set(parameter.opts)
        for spelling in SPELLINGS.values():
            assert not names & set(spelling) or names >= set(spelling), f"{command}: {names}"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_context_has_the_names_of_llama_cpp_and_vllm(command: str) -> None:
    names = [{*parameter.opts} for parameter in COMMANDS[command].params]
    both = {"--ctx-size", "-c", "--max-model-len"}
    assert all(both <= found or not both & found for found in names)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_checkpoint_runs_if_it_is_trusted(run: Run, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(tiny, folder)
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    line = ("generate", "-m", folder, "--tokenizer", "builtin", "-p", "1", "-n", 2)
    refused = run(*line)
    assert refused.status == 2 and "trust_remote_code" in refused.err
    assert run(*line, "--trust-remote-code").status == 0


def test_every_command_takes_its_files_and_models_by_flag() -> None:
    def takes(command: str) -> set[str]:
        return {name for parameter in COMMANDS[command].params for name in parameter.opts}

    others = {"version", "export", "online show", "online delete"}  # of heads and folders
    others |= {"serve", "run-batch"}  # see test_cli_serve.py
    for command in COMMANDS.keys() - others:
        assert "-m" in takes(command), command
    for command in ("generate", "chat", "bench", "verify", "tune disco", "tune search", "estimate", "demo"):
        assert "-md" in takes(command), command
    for command in ("bench", "verify", "tune disco", "tune layerskip", "tune search", "estimate"):
        assert takes(command) >= {"--prompts", "--raw", "--out"}, command


def test_a_value_given_twice_is_refused(run: Run) -> None:
    for words in (
        ("tune", "layerskip", "builtin", "-m", "builtin-draft"),
        ("tune", "disco", "builtin", "builtin-draft", "-md", "builtin"),
        ("bench", "a.txt", "--prompts", "b.txt"),
    ):
        result = run(*words)
        assert result.status == 2 and "given twice" in result.err and result.err.count("\n") == 1


# ---- help and mistakes


HELP = """
import json, sys
from outrider.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code, (words, end.code)
    loaded = {"torch", "transformers", "numpy"} & sys.modules.keys()
    assert not loaded, (words, loaded)
    print("no module of", words)
"""


def test_help_does_not_wait_for_torch() -> None:
    """But for those of `serve` and `run-batch`, whose options are the fields of EngineOptions."""
    helps = [f"{command} --help" for command in COMMANDS if command not in ("serve", "run-batch")]
    lines = ["--help", "--version", "version", *helps]
    done = subprocess.run([sys.executable, "-c", HELP, json.dumps(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *texts, rest = re.split("(?m)^no module of .*\n", done.stdout)
    assert len(texts) == len(lines) and all(texts) and not rest


def test_version_flag_and_command_agree(run: Run) -> None:
    assert run("--version").out == run("version").out != ""


def test_public_names_load_lazily() -> None:
    code = "import sys, outrider\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    import outrider

    found: dict[str, Any] = {}
    exec("from outrider import *", found)
    assert found["LLM"] and found["SamplingParams"]
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="nosuch"):
        outrider.nosuch  # noqa: B018


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("generate -p x --nosuch", "--nosuch"),
        ("generate -p x -n many", "'many'"),
        ("generait", "generait"),
        ("bench -b 0", "--batch-size"),
        ("datastore build", "--help"),
        ("tune disco builtin", "-md"),
        ("tune disco builtin builtin-eagle", "'builtin-eagle' is a head for 'eagle': only draft models"),
        ("bench --speculative-config @/no/such/file", "/no/such/file"),
        ("bench --speculative-config tree=@/no/such/file", "/no/such/file"),
        ("bench --prompts /", "'/'"),
        ("generate -p x -m builtin-eagle", "'builtin-eagle' is a draft head, not a model"),
        ("generate -p x -m no.gguf", "no file 'no.gguf'"),
        ("generate -p x -hf", "-m' requires an argument"),
        ("generate -p x -hff a.gguf", "-hff a.gguf is not known: download the file and give it with -m"),
        ("chat -hft secret", "error: -hft is not known: set the environment variable HF_TOKEN."),
        ("generate -p x -mu http://x/y.gguf", "-mu http://x/y.gguf is not known: download the file"),
        ("generate -p x -cml", "error: No such option: -cml. See `outrider generate --help`."),
        ("generate x -mg 0", "error: No such option: -mg."),
        ("generate x -fit on", "error: No such option: -fit."),
        ("generate -p x -cnv", "error: -cnv is for conversations, and generate continues a text: take chat."),
        ("generate -i -p x", "error: -i is for conversations"),
        ("generate -p x -t 0", "error: threads must be at least 1, got 0."),
        ("generate x -ngl", "-ngl' requires an argument"),
        ("generate x -tp -n many", "error: Invalid value for '--tensor-parallel-size' / '-tp'"),
        ("generate -p x --draft-p-min 0.4", "--draft-p-min is for a draft model: give one with -md"),
        ("chat --dtype-draft bfloat16", "--dtype-draft is for a draft model: give one with -md"),
        ("serve builtin --draft-p-min 0.4", "--draft-p-min is for a draft model: give one with -md"),
        ("generate -p x --method ngram --draft-p-min 0.4", "--draft-p-min is not for the method 'ngram'"),
        ("generate -p x --method off -md builtin-draft", "--model-draft is not for the method 'off'"),
        ("generate -p x -md builtin-eagle --draft-p-min 0.4", "--draft-p-min is not for the method 'eagle'"),
        ("tune disco builtin builtin-draft --prompts /no/file", "/no/file"),
    ],
)
def test_a_usage_error_is_one_line(run: Run, words: str, message: str) -> None:
    result = run(*words.split())
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and message in result.err


@pytest.mark.parametrize("words", ["generate -p x", "chat", "bench", "tune builtin", "verify --method ngram"])
def test_ctrl_c_prints_no_traceback(run: Run, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.llm.LLM.__init__", pressed)
    result = run(*words.split())
    assert (result.status, result.out, result.err) == (130, "", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_adds_the_brackets_of_optional_arguments(command: str) -> None:
    for parameter in COMMANDS[command].params:
        name = getattr(parameter, "metavar", None) or ""
        assert not re.fullmatch(r"\[\w+\]", name), name


def test_without_arguments_there_is_help(run: Run) -> None:
    for words in ((), ("tune",), ("datastore",)):
        result = run(*words)
        assert "Usage:" in result.out + result.err and "error:" not in result.err


def test_a_speculative_config_from_a_file_or_by_name(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n "method": "ngram",\n "num_speculative_tokens": 2\n}\n')
    assert parsed(f"@{file}") == {"method": "ngram", "num_speculative_tokens": 2}
    message = run("generate", "-p", "x", "-n", 3, "--speculative-config", f"@{file}")
    assert message.status == 0 and "n_draft   = 2" in message.err
    assert config_of({"config": "off"}) == {"method": "off"} and config_of({}) is None
    file.write_text("{\n")
    with pytest.raises(ConfigError, match=r"config\.json' is no JSON"):
        parsed(f"@{file}")


@pytest.mark.parametrize("words", ["generate -p x -n 200 --ignore-eos", "bench --help"])
def test_a_closed_pipe_prints_no_traceback(words: str) -> None:
    command = [sys.executable, "-m", "outrider", *words.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
    assert "Traceback" not in err and "BrokenPipe" not in err and process.returncode in (0, 1)


def test_what_pays_is_drafted_unless_flags_say_otherwise() -> None:
    auto = {"method": "auto"}
    assert config_of({}, AUTO) == config_of({"config": "{}"}, AUTO) == auto
    assert config_of({"method": "off"}, AUTO) == {"method": "off"}
    model, depth = {"model": "builtin-draft"}, {"num_speculative_tokens": 4}
    assert config_of(model, AUTO) == {**auto, **model}
    assert config_of({**model, **depth}, AUTO) == {**model, **depth}
    assert config_of(model) == model
    device = {**model, "draft_device": "cpu"}
    assert config_of(device, AUTO) == {"adaptive": True, **device}
    assert config_of(depth, AUTO) == {**auto, **depth}
    assert config_of({"config": json.dumps(depth)}, AUTO) == depth
    assert config_of({}) is None
