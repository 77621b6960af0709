"""The options of `outrider serve`: vLLM's, in both spellings, and what is refused with its cure."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch
from commands import Run, Started


@pytest.mark.parametrize("dash", ["-", "_"])
def test_the_options_of_vllms_page_are_read(dash: str, run: Run, started: list[Started]) -> None:
    line = (
        "--host 0.0.0.0 --port 8001 --model builtin --seed 42 -tp 1 --gpu_memory_utilization 0.8 --api-key a "
        "--api-key b --no-enable-prefix-caching --max-model-len 64"
    ).replace("_", dash)
    config = '{"model": "builtin-draft", "num_speculative_tokens": 5}'
    result = run("serve", *line.split(), f"--speculative{dash}config", config)
    assert result.status == 0, result.err
    ((options, engine, speculation),) = started
    assert (options.host, options.port, options.api_key) == ("0.0.0.0", 8001, ("a", "b"))
    assert (engine["model"], engine["seed"], engine["gpu_memory_utilization"]) == ("builtin", 42, 0.8)
    assert (engine["enable_prefix_caching"], engine["max_model_len"]) == (False, 64)
    assert speculation == {"model": "builtin-draft", "num_speculative_tokens": 5}


def test_an_option_behind_the_model_takes_several_values(run: Run, started: list[Started]) -> None:
    line = "builtin --served-model-name a b --api_key k l --port 1 --allowed-origins http://x http://y"
    assert run("serve", *line.split()).status == 0
    assert run("serve", "--model", "builtin", "--served_model_name", "a", "b").status == 0
    assert run("serve", "--served-model-name", "a", "builtin-draft").status == 0
    options, _, last = (options for options, _, _ in started)
    assert (options.served_model_name, options.api_key) == (("a", "b"), ("k", "l"))
    assert (options.port, options.allowed_origins) == (1, ("http://x", "http://y"))
    assert [engine["model"] for _, engine, _ in started] == ["builtin", "builtin", "builtin-draft"]
    assert last.served_model_name == ("a",)


def test_origins_may_be_a_list_in_json(run: Run, started: list[Started]) -> None:
    assert run("serve", "builtin", "--allowed-origins", '["http://x", "http://y"]').status == 0
    assert started[0][0].allowed_origins == ("http://x", "http://y")
    result = run("serve", "builtin", "--allowed-origins", "[1]")
    assert result.status == 2 and "allowed_origins must be" in result.err


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("-c 64 -np 4 -dev cpu -ngl 99 -s 7", "--max-model-len 64 --max-num-seqs 4 --device cpu --seed 7"),
        ("-c 0", ""),
        ("-q int8 -dp 2", "--quantization int8 --replicas 2"),
        ("--enable-log-requests --alias a", "--log-requests --served-model-name a"),
        ("--chat-template-file a", "--chat-template a"),
        ("--method off", "--speculative-config off"),
        ("--no-cache-prompt", "--no-enable-prefix-caching"),
        ("--api-prefix /llm", "--root-path /llm"),
        (
            "-md builtin-draft --draft-max 5",
            '--speculative-config {"model":"builtin-draft","num_speculative_tokens":5}',
        ),
    ],
)
def test_other_names_of_options_mean_the_same(line: str, same: str, run: Run, started: list[Started]) -> None:
    for words in (line, same):
        result = run("serve", "builtin", *words.split())
        assert result.status == 0, result.err
    one, other = started
    assert one == other


@pytest.mark.parametrize(
    "line",
    [
        "--enforce-eager",
        "--swap-space 4",
        "--block-size 16",
        "--enable-chunked-prefill",
        "--disable-log-requests",
        "--disable-log-stats",
        "--enable-auto-tool-choice",
        "--load_format auto",
        "-fa",
        "--jinja",
        "--metrics",
        "--no-webui",
        "--kv-unified",
        "--numa distribute",
        "--mmap",
        "--cache-reuse 256",
        "--verbosity 3",
        "--convert none",
        "--enable-expert-parallel",
        "--long-prefill-token-threshold 64",
        "--use-v2-block-manager",
        "-ctk q8_0",
        "-ngl 99 --device cpu",
    ],
)
def test_options_without_effect_are_noted(line: str, run: Run, started: list[Started]) -> None:
    result = run("serve", "builtin", *line.split())
    name = line.split()[0].replace("_", "-")
    assert result.status == 0 and started, result.err
    assert result.err.startswith("note: ") and result.err.count("\n") == 1, result.err
    assert name in result.err or name in ("-fa", "-ctk")


def test_gpu_layers_are_checked_without_a_context_on_the_gpu(
    run: Run, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the router of several replicas, whose process needs no memory of a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialized"))
    result = run("serve", "builtin", "-ngl", "5", "-md", "builtin-draft", "-ngld", "all", "--replicas", "2")
    assert result.status == 0 and not result.err, result.err
    ((_, engine, speculation),) = started
    assert engine["gpu_layers"] == 5 and speculation is not None and speculation["model"] == "builtin-draft"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--speculative_model x", "use --speculative-config"),
        ("--speculative-model x --num-speculative-tokens 5", "use --speculative-config"),
        ("--reasoning-parser gpt", "deepseek_r1, deepseek_v3"),
        ("--reasoning-format deepseek", "--reasoning-parser auto"),
        ("--override-generation-config [1]", "must be a dict"),
        ("--default-chat-template-kwargs {", "is no JSON"),
        ("--temp 0.5", "--override-generation-config"),
        ("--repeat-penalty 1.1", "give it in the requests"),
        ("-j {}", "--json-schema is not supported: "),
        ("--mirostat 2", "leave it out"),
        ("-ncmoe 4", "--gpu-layers"),
        ("-nocb", "--max-num-seqs 1"),
        ("--offline", "HF_HUB_OFFLINE"),
        ("--nnodes 2", "torchrun"),
        ("--tokenizer-revision x", "--revision is"),
        ("--uds /no/such/folder/x", "/no/such/folder/x cannot be listened on: No such file"),
        ("--spec-type ngram-simple", "use --speculative-config"),
        ("--download-dir /x", "HF_HOME"),
        ("--hf-token x", "HF_TOKEN"),
        ("--cpu-offload-gb 4", "--gpu-layers"),
        ("--ssl-ca-certs x", "proxy"),
        ("-sm none", "--split-mode is not supported: use -tp"),
        ("-tp 0", "tensor_parallel_size must be"),
        ("--port 99999", "port must be"),
        ("--replicas 0", "replicas must be"),
        ("--api-key-file /no/such/file", "api_key_file"),
        ("--ssl-keyfile a", "ssl_certfile"),
        ("--ssl-keyfile a --ssl-certfile b", "'b' and ssl_keyfile 'a' cannot be used: No such file"),
        ("--host 192.0.2.1", "192.0.2.1:8000 cannot be listened on: "),
        ("--host ..", "..:8000 cannot be listened on: "),
        ("--lora-modules a", "NAME=PATH"),
        ("--tool-call-parser x", "hermes"),
        ("--speculative-config {", "no JSON"),
        ('--speculative-config {"method":"nope"}', "unknown speculative method"),
        ("--model a", "given twice"),
        ("--max-modle-len 5", "--max-modle-len"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(line: str, text: str, run: Run) -> None:
    result = run("serve", "builtin", *line.split())
    assert result.status == 2 and text in " ".join(result.err.split()), result.err


def test_a_port_in_use_is_reported_before_loading(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for more in ((), ("--replicas", 2)):
            result = run("serve", "builtin", "--port", port, *more)
            assert result.status == 2 and result.err.endswith(
                f"error: 127.0.0.1:{port} cannot be listened on: Address already in use.\n"
            )


def test_without_its_packages_there_is_help_and_one_line_at_the_start() -> None:
    missing = ("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); from outrider.cli import main; main()"

    def called(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, "serve", *words], capture_output=True, text=True)

    shown = called("--help")
    assert shown.returncode == 0 and "--max-requests" in shown.stdout, shown.stderr
    refused = called("builtin")
    text = "error: the server needs more packages: pip install 'outrider[serve]'.\n"
    assert (refused.returncode, refused.stderr) == (2, text)


def test_help_explains_every_option(run: Run) -> None:
    text = " ".join(run("serve", "--help").out.split())
    for name in ("--max-requests", "--ssl-certfile", "--max-num-seqs", "--speculative-config", "-tp"):
        assert name in text
    assert "--speculative-model" not in text


@pytest.mark.parametrize("rank", ["0", "1"])
def test_processes_of_a_launcher_that_are_not_ranks_are_refused(
    rank: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -tp or -pp, rank 0 would serve alone, and the others would wait for it until they fail."""
    for name in ("outrider.parallel.start.join", "outrider.serve.run.run"):
        monkeypatch.setattr(name, lambda *given: None)
    given = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    result = run("serve", "builtin")
    assert result.status == 2 and "started 2 processes (WORLD_SIZE)" in result.err
    assert run("serve", "builtin", "-pp", "2", "--pipeline-layers", "0,8").status == 0
