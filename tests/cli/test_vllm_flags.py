"""Spellings and flags of `vllm serve` beyond the options that `outrider serve` has under the same names."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Run, Started

from outrider.cli.vllm import nested, sized


@pytest.mark.parametrize(
    ("text", "size"),
    [("16k", 16_000), ("16K", 16_384), ("25.6k", 25_600), ("1m", 10**6), ("2M", 2 << 20), ("77", 77)],
)
def test_sizes_have_vllms_units(text: str, size: int, run: Run, started: list[Started]) -> None:
    for line in (f"--max-model-len {text}", f"--max_model_len={text}", f"-c {text}"):
        assert run("serve", "builtin", *line.split()).status == 0
    more = ("--max-num-batched-tokens", text, "--kv-cache-memory-bytes", "1.5g")
    assert run("serve", "builtin", *more).status == 0
    *contexts, last = started
    assert [engine["max_model_len"] for _, engine, _ in contexts] == [size] * 3
    assert (last[1]["max_num_batched_tokens"], last[1]["kv_cache_memory_bytes"]) == (size, 1_500_000_000)


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_a_context_that_vllm_sizes_is_the_models(text: str, run: Run, started: list[Started]) -> None:
    assert run("serve", "builtin", "--max-model-len", text).status == 0
    assert started[0][1]["max_model_len"] is None


@pytest.mark.parametrize("text", ["1.5K", "16x", "k", "-2k"])
def test_other_sizes_are_refused(text: str, run: Run, started: list[Started]) -> None:
    result = run("serve", "builtin", "--max-model-len", text)
    assert result.status == 2 and "--max-model-len" in result.err and not started


def test_values_of_other_options_are_no_sizes() -> None:
    words = ["--served-model-name", "16k", "--max-model-len", "-c", "--port", "auto", "-1"]
    assert sized(words) == words


def test_keys_of_an_object_are_options(run: Run, started: list[Started]) -> None:
    line = "--speculative-config.method ngram --speculative_config.num_speculative_tokens=5"
    result = run("serve", "builtin", *line.split(), "--speculative-config.adaptive", "true")
    assert result.status == 0, result.err
    assert started[0][2] == {"method": "ngram", "num_speculative_tokens": 5, "adaptive": True}


def test_objects_in_objects_and_other_words_with_dots() -> None:
    words = ["a.b", "--o.a.b", "1", "--p.q", "2", "--o.a.c=x.y", "--o.d"]
    assert nested(["--o", "@f", "--o"], {"--o"}) == ["--o", "@f", "--o"]
    assert nested(words, {"--o"}) == ["a.b", "--p.q", "2", "--o", '{"a": {"b": 1, "c": "x.y"}, "d": ""}']


def test_keys_are_added_to_an_object_that_is_given(run: Run, started: list[Started]) -> None:
    for given in (
        ["--speculative-config", '{"method": "ngram"}'],
        ['--speculative_config={"method": "ngram"}'],
    ):
        result = run("serve", "builtin", *given, "--speculative-config.num_speculative_tokens", "5")
        assert result.status == 0, result.err
        assert started.pop()[2] == {"method": "ngram", "num_speculative_tokens": 5}


def test_a_key_that_has_a_value_has_no_keys(run: Run) -> None:
    line = "--speculative-config.online x --speculative-config.online.path y"
    result = run("serve", "builtin", *line.split())
    assert result.status == 2 and "'online' already has a value" in result.err


CONFIG = """
model: builtin-draft
served-model-name: [a, b]
max_model_len: 1k
enable-prefix-caching: false
enforce-eager: true
trust-remote-code: false
seed:
speculative-config: {method: ngram, num_speculative_tokens: 5}
"""


def test_a_file_gives_options_that_the_command_line_overrides(
    run: Run, started: list[Started], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    assert run("serve", "--config", file, "--seed", "3").status == 0
    assert run("serve", "builtin", f"--config={file}", "--max-model-len", "64").status == 0
    (options, engine, speculation), (_, other, _) = started
    assert (engine["model"], other["model"]) == ("builtin-draft", "builtin")
    assert (engine["max_model_len"], other["max_model_len"]) == (1000, 64)
    assert (engine["seed"], engine["enable_prefix_caching"]) == (3, False)
    assert options.served_model_name == ("a", "b")
    assert speculation == {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--served-model-name", "c"], ("c",)),
        (["--served_model_name=c", "--served-model-name", "d"], ("c", "d")),
        (["-a", "c"], ("c",)),
        (["--seed", "3"], ("a", "b")),
    ],
)
def test_a_list_on_the_command_line_replaces_that_of_the_file(
    words: list[str], names: tuple[str, ...], run: Run, started: list[Started], tmp_path: Path
) -> None:
    """It was appended, so that the first name, which responses have, and all keys of the file counted."""
    file = tmp_path / "config.yaml"
    file.write_text("served-model-name: [a, b]\napi_key: [first, second]\n")
    assert run("serve", "builtin", "--config", file, *words).status == 0
    assert run("serve", "builtin", *words, "--api-key", "third", "--config", file).status == 0
    (options, _, _), (other, _, _) = started
    assert (options.served_model_name, options.api_key) == (names, ("first", "second"))
    assert (other.served_model_name, other.api_key) == (names, ("third",))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("- a\n", "must have an option a line, such as port: 8000"),
        ("a: [", "is no YAML: "),
        ("nope: 1", "--nope"),
        ("nope: false", "--nope"),
        ("nope:", "--nope"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_wrong_is_refused(content: str | None, text: str, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_text(content)
    result = run("serve", "builtin", "--config", file)
    assert result.status == 2 and text in " ".join(result.err.split()), result.err


def test_a_file_has_to_be_named(run: Run) -> None:
    result = run("serve", "builtin", "--config")
    assert result.status == 2 and "--config needs a file" in " ".join(result.err.split()), result.err


def test_adapters_may_be_objects(run: Run, started: list[Started]) -> None:
    module = '{"name": "sql", "path": "/models/x", "base_model_name": "b"}'
    assert run("serve", "builtin", "--lora-modules", module, "b=/models/y").status == 0
    assert started[0][0].lora_modules == ("sql=/models/x", "b=/models/y")
    for wrong in ('{"name": "sql"}', '{"name": 1, "path": "x"}', "{"):
        result = run("serve", "builtin", "--lora-modules", wrong)
        assert result.status == 2 and "--lora-modules must be NAME=PATH" in result.err, result.err


@pytest.mark.parametrize(
    "line",
    [
        "--compilation-config.mode 3",
        "-cc.mode 3",
        "-O.mode 3",
        "-O3",
        "-ac.backend FLASH_ATTN",
        "--attention-config {}",
        "--cudagraph-capture-sizes 1 2 4",
        "--max-cudagraph-capture-size 8",
        "--language-model-only",
        "--enable-eplb",
        "--all2all-backend pplx",
        "-dcp 2",
        "-dpb ray",
        "--enable-dbo",
        "--mamba-cache-dtype auto",
        "--pt-load-map-location cpu",
        "--collect-detailed-traces all",
        "--no-enable-log-deltas",
        "--h11-max-header-count 9",
        "--fingerprint-mode none",
    ],
)
def test_what_has_no_effect_is_noted(line: str, run: Run, started: list[Started]) -> None:
    result = run("serve", "builtin", *line.split())
    assert result.status == 0 and started, result.err
    assert result.err.startswith("note: --") and result.err.count("\n") == 1, result.err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--headless", "--replicas N on each machine"),
        ("-dpr 1", "--replicas N on each machine"),
        ("--worker-cls x", "leave it out"),
        ("--kv-offloading-size 4", "leave it out"),
        ("--kv-events-config {}", "leave it out"),
        ("--hf-config-path x", "config.json"),
        ("--disable-sliding-window", "--max-model-len"),
        ("--guided-decoding-disable-additional-properties", '"additionalProperties": false'),
        ("--tool-server demo", "client"),
        ("--reasoning-parser-plugin x", "formats of --reasoning-parser"),
        ("--typical-acceptance-sampler-posterior-alpha 1", "--speculative-config"),
        ("--stream-interval 10", "seconds (not of tokens)"),
        ("--quantization awq", "leave it out"),
        ("-q gptq_marlin", "leave it out"),
        ("-q fp8", "Did you mean 'int8'?"),
    ],
)
def test_what_would_be_missed_is_refused(
    line: str, text: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.serve.run.run", lambda service: None)
    result = run("serve", "builtin", *line.split())
    assert result.status == 2 and text in " ".join(result.err.split()), result.err
