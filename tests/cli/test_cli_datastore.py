"""`outrider datastore build`, and drafting from its file."""

from __future__ import annotations

import json
from pathlib import Path

from commands import Run
from full_disk import full_disk


def test_built_datastore_drafts(run: Run, tmp_path: Path) -> None:
    text, store = tmp_path / "corpus.txt", tmp_path / "store"
    plain = ("generate", "-p", "The future of AI is", "-n", 24, "--temp", 0, "--ignore-eos")
    expected = run(*plain).out
    text.write_text(expected * 3)
    built = run("datastore", "build", text, "-o", store)
    assert built.status == 0 and store.stat().st_size > 0 and str(store) in built.out.replace("\n", "")
    config = json.dumps({"method": "datastore", "datastore": str(store)})
    drafted = run(*plain, "--speculative-config", config)
    assert drafted.out == expected
    (accepted,) = (line for line in drafted.err.splitlines() if line.startswith("n_accept"))
    assert int(accepted.split()[-1]) > 0


def test_a_full_disk_is_one_line(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("The future of AI is not known. " * 99)
    with full_disk(64):
        done = run("datastore", "build", text, "-o", tmp_path / "store")
    assert done.status == 2 and "store' cannot be written: " in done.err


def test_unusable_inputs_are_refused(run: Run, tmp_path: Path) -> None:
    missing = run("datastore", "build", tmp_path / "nowhere.txt", "-o", tmp_path / "store")
    assert missing.status == 2 and "nowhere.txt" in missing.err
