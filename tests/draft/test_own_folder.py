"""Methods from a folder outside the package, which OUTRIDER_DRAFTERS names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ECHO = """
from dataclasses import dataclass
from outrider.core.step import Batch
from outrider.core.tree import Draft, DraftTree
from outrider.drafting.base import Drafter

class Mine(Drafter):
    @dataclass(frozen=True)
    class Options:
        "Nothing."

    def propose(self, batch: Batch) -> Draft:
        return Draft([DraftTree.chain(step.row.tokens[-1:], [0.3]) for step in batch])
"""


def models(drafters: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, since the folder is read when the package is imported."""
    command = [sys.executable, "-m", "outrider", "generate", "a b a b", "-n", "4", "--temp", "0", *words]
    env = {**os.environ, "OUTRIDER_DRAFTERS": drafters}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_a_method_is_found_in_a_folder_outside(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ECHO)
    plain, fast = (models(str(tmp_path), "--method", method) for method in ("off", "mine"))
    assert fast.returncode == 0 and fast.stdout == plain.stdout, fast.stderr
    assert "n_drafted = 0" not in fast.stderr
    several = models(os.pathsep.join(["", str(tmp_path / "."), ""]), "--method", "nope")
    assert several.returncode == 2 and " medusa, mine, " in " ".join(several.stderr.split())


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    missing = models(str(tmp_path / "nowhere"), "--method", "ngram")
    assert missing.returncode == 2 and missing.stderr.startswith("error: OUTRIDER_DRAFTERS: ")
    assert missing.stderr.endswith("nowhere' is no folder.\n")
    (tmp_path / "ngram.py").write_text(ECHO)
    twice = models(str(tmp_path), "--method", "ngram")
    assert twice.returncode == 2
    assert "OUTRIDER_DRAFTERS: there is a method 'ngram' already: rename the file." in twice.stderr


def test_a_file_that_cannot_be_imported_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    found = models(str(tmp_path), "--method", "ngram")
    assert found.returncode == 2 and "nothing_of_this_name" in found.stderr
    assert found.stderr.startswith("error: OUTRIDER_DRAFTERS: a file of these folders cannot be imported")
