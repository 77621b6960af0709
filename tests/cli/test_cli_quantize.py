"""`outrider quantize`."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Run
from full_disk import full_disk
from helpers import answer

from outrider import LLM, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.testing import random_prompts, tiny_checkpoint

PROMPT = random_prompts(1, seed=3)[0]


def test_a_quantized_copy_answers_and_drafts(run: Run, tmp_path: Path) -> None:
    """It has the tokenizer, and what ends a text."""
    source = tiny_checkpoint(tmp_path / "source", eos=(1, 7))
    done = run("quantize", "-m", source, "-o", tmp_path / "few")
    assert done.status == 0 and "in 8 bits" in done.out
    checkpoint = Checkpoint.open(str(tmp_path / "few"))
    assert checkpoint.tokenizer is not None and checkpoint.ending == {1, 7}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    plain = answer(LLM(str(tmp_path / "few")), PROMPT, params)
    llm = LLM(
        str(tmp_path / "few"),
        speculative_config={"model": str(tmp_path / "few"), "num_speculative_tokens": 3},
    )
    drafted = answer(llm, PROMPT, params)
    assert (
        drafted.outputs[0].token_ids == plain.outputs[0].token_ids and drafted.speculation.acceptance == 1.0
    )


def test_what_cannot_be_written_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run("quantize", "-m", "builtin", "--out", tmp_path / "new", "--bits", 5)
    assert done.status == 2 and "bits must be one of 8, 4, 16, 32, got 5" in done.err
    (tmp_path / "file").write_text("")
    done = run("quantize", "-m", tiny_checkpoint(tmp_path / "source"), "--out", tmp_path / "file" / "new")
    assert done.status == 2 and done.err.startswith("error: ") and "Not a directory" in done.err


def test_a_checkpoint_with_code_of_its_own_needs_trust(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_checkpoint(source)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n"
        "    model_type = 'own_llama'\n"
    )
    done = run("quantize", "-m", source, "-o", tmp_path / "few")
    assert done.status == 2 and "brings its own code: pass trust_remote_code=True" in done.err
    done = run("quantize", "-m", source, "-o", tmp_path / "few", "--trust-remote-code")
    assert done.status == 0 and "in 8 bits" in done.out
    assert (tmp_path / "few" / "configuration_own.py").is_file()


def test_a_full_disk_is_one_line(run: Run, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source")
    with full_disk(1 << 16):
        done = run("quantize", "-m", source, "-o", tmp_path / "few")
    assert done.status == 2 and "few/model.safetensors' cannot be written: " in done.err


def test_a_grown_model_is_refused(run: Run, tmp_path: Path) -> None:
    """Its file is that of `builtin`, which would be written instead."""
    done = run("quantize", "-m", "builtin-100m", "-o", tmp_path / "few", "--bits", 16)
    assert done.status == 2 and done.err.endswith("has no weights of its own: give 'builtin'.\n")
