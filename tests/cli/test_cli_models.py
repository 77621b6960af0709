"""`outrider models`: what headers tell of a checkpoint equals the loaded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from helpers import weight_bytes

from outrider import LLM
from outrider.checkpoints.hub import locate, read_tokenizer
from outrider.cli import main
from outrider.config import EngineOptions
from outrider.draft.datastore.store import Store, fingerprint, path_of
from outrider.inspect.card import card_of
from outrider.testing import tiny_checkpoint


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "max_model_len": 100, "max_num_seqs": 3},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int4"},
    ],
    ids=str,
)
def test_memory_equals_the_engines(options: dict[str, Any]) -> None:
    card, llm = card_of(EngineOptions("builtin", **options)), LLM("builtin", **options)
    assert card.cache_bytes == sum(pool.data.nbytes for pool in llm.engine.cache.pools)
    assert card.token_bytes == llm.engine.decoder.footprint.total()
    assert card.dtype == str(llm.engine.decoder.dtype).removeprefix("torch.")
    assert card.weight_bytes == weight_bytes(llm)
    assert card.request_tokens == llm.engine.max_len and card.refused is None and card.chat_template


def test_weights_of_a_grown_model_are_those_in_memory() -> None:
    options = {"max_model_len": 64, "max_num_seqs": 1}
    card, llm = card_of(EngineOptions("builtin-100m", **options)), LLM("builtin-100m", **options)
    assert card.weight_bytes == weight_bytes(llm)
    assert 100e6 < card.parameters < 102e6 and card.stored_as["added while loading"] > 80e6


def test_every_weight_is_counted_once(checkpoint: Any, tmp_path: Path) -> None:
    import transformers

    whole = checkpoint("Qwen3", tie_word_embeddings=True, dtype=torch.bfloat16)
    parameters = transformers.AutoModelForCausalLM.from_pretrained(whole).num_parameters()
    shards = checkpoint("Qwen3", tie_word_embeddings=True, dtype=torch.bfloat16, max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    pickled = tmp_path / "bin"
    shutil.copytree(whole, pickled)
    torch.save(
        transformers.AutoModelForCausalLM.from_pretrained(whole).state_dict(), pickled / "pytorch_model.bin"
    )
    (pickled / "model.safetensors").unlink()
    for folder in (whole, shards, pickled):
        card = card_of(EngineOptions(str(folder)))
        assert card.parameters == parameters and set(card.stored_as) == {"bfloat16"}, folder


@pytest.mark.parametrize("family", ["Phi", "VaultGemma"])
def test_weights_of_fallback_models_are_counted(family: str, checkpoint: Any) -> None:
    import transformers

    folder = str(checkpoint(family, dtype=torch.bfloat16))
    card, llm = card_of(EngineOptions(folder)), LLM(folder)
    assert card.runs_on == "transformers' own code" and card.context == llm.engine.max_len
    assert card.token_bytes == llm.engine.decoder.footprint.total()
    assert card.parameters == transformers.AutoModelForCausalLM.from_pretrained(folder).num_parameters()
    assert card.weight_bytes == card.parameters * llm.engine.decoder.dtype.itemsize


def test_unsupported_fallback_options_are_refused(run: Run, checkpoint: Any) -> None:
    result = run("models", checkpoint("Phi", dtype=torch.bfloat16), "--quantization", "int8")
    assert result.status == 2 and "leave it out" in result.err


def test_output_as_a_table_and_as_json(run: Run, tiny: Path) -> None:
    sheet = run("models", "builtin", tiny)
    assert sheet.status == 0
    for words in (
        "LlamaForCausalLM",
        "lean decoder",
        "bfloat16",
        "8,192",
        "K/V of 16 × 1,024 tokens",
        "float32",
    ):
        assert words in sheet.out
    (line,) = run("models", tiny, "--json", "-c", 64, "--max-num-seqs", 2).out.splitlines()
    card = json.loads(line)
    assert (card["vocabulary"], card["request_tokens"], card["requests"], card["chat_template"]) == (
        300,
        64,
        2,
        False,
    )


def test_a_draft_model_for_one_forward_is_described(run: Run, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, pard_token=299)
    sheet = " ".join(run("models", folder).out.split())
    assert "drafts in one forward (PARD), with the mask token 299" in sheet
    assert json.loads(run("models", folder, "--json").out)["mask_token"] == 299


def test_unsupported_model_gives_the_reason(run: Run, tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    result = run("models", tmp_path)
    text = " ".join(result.out.replace("│", " ").split())
    assert result.status == 0 and "nothing: " in text
    assert "MambaForCausalLM keeps a recurrent state" in text


def test_without_a_name_local_models_are_listed(
    run: Run, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    for repo, files in (("models--me--tiny", True), ("models--me--empty", False)):
        snapshot = tmp_path / repo / "snapshots" / commit
        if files:
            shutil.copytree(tiny, snapshot)
        else:
            snapshot.mkdir(parents=True)
        (tmp_path / repo / "refs").mkdir()
        (tmp_path / repo / "refs" / "main").write_text(commit)
    for module in (
        "huggingface_hub.constants.HF_HUB_CACHE",
        "huggingface_hub.utils._cache_manager.HF_HUB_CACHE",
    ):
        monkeypatch.setattr(module, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("models")
    assert result.status == 0
    assert "builtin-draft" in result.out and "builtin-datastore" in result.out
    assert "me/tiny" in result.out and "me/empty" not in result.out


def test_card_of_a_datastore(run: Run) -> None:
    (line,) = run("models", "builtin-datastore", "--json").out.splitlines()
    card, tokenizer = json.loads(line), fingerprint(read_tokenizer(str(locate("builtin"))))
    file = path_of("builtin-datastore")
    assert card == {
        "name": "builtin-datastore",
        "tokens": Store(str(file)).header.shards[0],
        "vocabulary": 8192,
        "tokenizer": tokenizer,
        "bytes": file.stat().st_size,
    }
    sheet = run("models", file).out
    assert f"{card['tokens']:,} tokens" in sheet and f"a vocabulary of 8,192, tokenizer {tokenizer}" in sheet


def test_missing_model_is_refused(run: Run) -> None:
    for arguments in (
        ("/no/model",),
        ("builtin", "--device", "gpu"),
        ("builtin", "--max-num-seqs", 0),
        ("builtin", "--dtype", "float3"),
    ):
        result = run("models", *arguments)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)


def test_brackets_in_a_name_and_a_config_are_shown_as_they_are(run: Run, tmp_path: Path) -> None:
    """They are marks of the library that draws tables."""
    folder = tmp_path / "[" / "x]"
    shutil.copytree(locate("builtin"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["[/bold]Odd"]}))
    result = run("models", folder)
    assert result.status == 0 and "[/bold]Odd" in result.out, result.err
    result = run("generate", "-m", folder, "-p", "Hi", "-n", 1)
    assert result.status == 2 and "[/bold]Odd is not supported" in result.err


def test_the_overview_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words were cut: "architectur", "LlamaForCau"."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(
        "outrider.inspect.card.known", lambda: ["builtin", "builtin-mlp_speculator", "builtin-datastore"]
    )
    with pytest.raises(SystemExit):
        main(["models"])
    rows = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    assert ["builtin", "LlamaForCausalLM", "15.7 M", "80.0 MiB", "lean decoder"] in rows
    assert any(row[:2] == ["builtin-mlp_speculator", "mlp_speculator"] for row in rows)
