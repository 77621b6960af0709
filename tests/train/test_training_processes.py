"""Several processes of one launcher share every batch, and train the weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM
from outrider.errors import ConfigError
from outrider.train.processes import Processes

SHORT = {
    "prompt_tokens": 4,
    "held_out": 4,
    "evaluate_tokens": 8,
    "evaluate_every": 4,
    "heads": 2,
    "own": False,
}


def test_every_place_of_a_batch_is_computed_once() -> None:
    parts = [Processes(rank, 3).part(range(8)) for rank in range(3)]
    assert sorted(place for part in parts for place in part) == list(range(8))
    assert [len(part) for part in parts] == [3, 3, 2]


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Processes.joined()
    assert alone == Processes(0, 1) and alone.first and alone.total(0.5) == 0.5 and alone.same("any")
    weight = torch.ones(2, requires_grad=True)
    alone.sum_gradients([weight])
    assert weight.grad is None


def test_a_launcher_without_addresses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but the processes cannot join .*torchrun"):
        Processes.joined()


@pytest.mark.full
def test_two_processes_train_the_weights_of_one(target: LLM, corpus: Path, tmp_path: Path) -> None:
    """From answers to the saved head, twice: the second run goes on after the first."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launched in (("one", []), ("two", launcher)):
        for steps in ("--minutes", "0.000001"), ("--steps", "6"):
            flags = ["--dtype", "float32", "--steps", "6", "--batch", "4", "--length", "24"]
            flags += ["--rate", "0.01", "--answer-tokens", "20"]
            files = ["--data", str(corpus), "--out", str(tmp_path / name)]
            command = [sys.executable, *launched, "-m", "outrider", "train", "medusa"]
            command += ["-m", str(target.engine.checkpoint.folder), *files, *flags, *steps]
            command += ["--options", json.dumps(SHORT)]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            assert done.returncode == 0, done.stderr[-2000:]
            assert done.stdout.count("40 of 40 lines") == 1, "only the first process reports"
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name].float(), weight.float(), rtol=0.02, atol=0.002)
    logs = [(tmp_path / name / "work" / "log.jsonl").read_text().splitlines() for name in ("one", "two")]
    assert len(logs[0]) == len(logs[1]) == 3, "only the first process evaluates"
