"""All heads at once: the processes, their archives, and what a run that is cut off leaves."""

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from outrider.train.methods import method
from recipes.builtin import gpu_workers, heads, tokens
from recipes.builtin.gpu import archive

SCRIPT = Path(__file__).resolve().parents[2] / "recipes/builtin/gpu.py"


def test_options_name_shipped_heads():
    assert {*heads.TRAINED_ON_GPU} <= {"all", "draft_model", *heads.SIZES}


def test_evaluated_prompts_are_left_out():
    found = tokens.evaluated([])
    assert "What do you do in your free time?" in found and len(found) > 40


def test_shipped_heads_fit_a_deep_target(tmp_path):
    given = argparse.Namespace(target="builtin-100m", device="cpu", work=tmp_path, batch=8, seconds=100)
    given.began, given.reserve, given.checkpoint_every = time.time(), 10, 2
    llm = gpu_workers.engine(given, 2, 1)
    assert gpu_workers.taps(llm) == (6, 12, 15) and gpu_workers.kept(llm) == (-1, 6, 12, 15)
    for name in (*heads.SIZES, "draft_model"):
        settings = gpu_workers.settings_of(given, name, llm)
        made = method(name)(settings, llm.engine.target, torch.ones(8192, dtype=torch.int64))
        needed = gpu_workers.needed_states(made.wanted, made.logits)
        assert {*needed} <= {*gpu_workers.kept(llm)}


def test_an_archive_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text("{}")
    archive(tmp_path / "heads.tar", tmp_path, [tmp_path / "head/config.json"])
    with tarfile.open(tmp_path / "heads.tar") as tar:
        assert tar.getnames() == ["head/config.json"]
    assert not (tmp_path / "heads.tmp").exists()


def started(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    prompts = [[1, 3, 40 + i % 50, 60 + i // 50, 4] for i in range(120)]
    with gzip.open(folder / "prompts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
    command = [sys.executable, str(SCRIPT), "--prompts", str(folder / "prompts.jsonl.gz"), "--device", "cpu"]
    command += ["--out", str(folder / "out"), "--work", str(folder / "work"), "--answering", "1"]
    command += ["--sequences", "16", "--batch", "8", "--checkpoint-every", "2", "--heads", "medusa", *words]
    return subprocess.Popen(command, start_new_session=True)


@pytest.mark.full
def test_heads_are_trained_in_the_time(tmp_path):
    budget = ("--seconds", "110", "--answers", "5", "--reserve", "50")
    assert started(tmp_path, *budget).wait(180) == 0
    with tarfile.open(tmp_path / "out/heads.tar") as tar:
        assert {"medusa/config.json", "medusa/model.safetensors", "medusa/training.json"} <= {*tar.getnames()}
    summary = json.loads((tmp_path / "out/summary.json").read_text())["medusa"]
    assert summary["steps"] > 2 and summary["seen"] > 0 and summary["after"]["tokens_per_step"] > 1


@pytest.mark.full
def test_a_run_that_is_cut_off_leaves_the_newest_heads(tmp_path):
    process, archived = started(tmp_path, "--seconds", "600", "--answers", "5"), tmp_path / "out/heads.tar"
    try:
        for _ in range(240):
            time.sleep(0.5)
            if archived.exists():
                with tarfile.open(archived) as tar:
                    if "medusa/model.safetensors" in tar.getnames():
                        break
        else:
            pytest.fail("no head was archived")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
