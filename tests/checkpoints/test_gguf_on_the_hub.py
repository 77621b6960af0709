"""GGUF files of a repository on the hub, chosen by quantization as llama.cpp does."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path

import pytest
from gguf_files import logits, write

from outrider import LLM, ModelError, draft
from outrider.checkpoints.hub import is_tagged, locate
from outrider.cli.llama_cpp import translated
from outrider.testing import tiny_checkpoint

FILES = (
    "README.md", "mmproj-F16.gguf", "tiny-BF16.gguf", "tiny-instruct-F16.gguf", "tiny-Q4_K_M.gguf",
    "tiny-Q4_K_S.gguf", "tiny.q8_0.gguf", "Q6_K/tiny-Q6_K-00001-of-00002.gguf",
    "Q6_K/tiny-Q6_K-00002-of-00002.gguf",
)  # fmt: skip
Downloaded = list[str]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return write(folder / "tiny.gguf", tiny_checkpoint(folder / "source"))


@pytest.fixture
def downloaded(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Downloaded:
    """A hub with one repository, and what is downloaded from it.

    Another program left the projector of images in the folder.
    """
    found: Downloaded = []
    (tmp_path / "mmproj-F16.gguf").touch()

    def download(
        repo: str, allow_patterns: list[str], ignore_patterns: list[str], revision: str | None
    ) -> str:
        assert (repo, revision) == ("me/tiny", None)
        for name in FILES:
            wanted, left = (
                any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
                for patterns in (allow_patterns, ignore_patterns)
            )
            if wanted and not left:
                found.append(name)
                (tmp_path / name).parent.mkdir(exist_ok=True)
                shutil.copy(file, tmp_path / name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return found


@pytest.mark.parametrize(
    ("tag", "names"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny.q8_0.gguf"]),
        ("F16", ["tiny-instruct-F16.gguf"]),  # its name is longer than the projector's
        ("Q6_K", ["Q6_K/tiny-Q6_K-00001-of-00002.gguf", "Q6_K/tiny-Q6_K-00002-of-00002.gguf"]),
    ],
)
def test_the_file_of_a_quantization_is_downloaded(
    tag: str, names: list[str], downloaded: Downloaded, tmp_path: Path
) -> None:
    assert locate(f"me/tiny:{tag}") == tmp_path / names[0]
    assert downloaded == names


def test_it_is_a_target_and_a_draft(downloaded: Downloaded, file: Path) -> None:
    assert (logits("me/tiny:Q4_K_M") == logits(file)).all()
    assert draft.detect("me/tiny:Q8_0") == "draft_model"
    assert LLM("me/tiny:Q4_K_M", speculative_config={"model": "me/tiny:Q8_0"}).engine.drafter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/tiny:Q5_K_M", "'me/tiny' has no GGUF file of the quantization 'Q5_K_M'"),
        ("me/tiny:", "'me/tiny:' names no quantization: give one, such as me/tiny:Q4_K_M"),
        ("me/tiny", "Of a repository of GGUF files give one, such as me/tiny:Q4_K_M"),
    ],
)
def test_what_is_not_there_is_named(name: str, message: str, downloaded: Downloaded) -> None:
    with pytest.raises(ModelError, match=message):
        locate(name)


def test_the_letter_of_a_drive_is_no_repository() -> None:
    assert is_tagged("me/tiny:Q8_0") and not is_tagged("C:/tiny.gguf")


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_hf_flags_name_a_quantization(command: str) -> None:
    given = [command, "-hf", "me/tiny", "-hfd", "me/small:Q8_0", "-n", "4"]
    assert translated(given) == [command, "-m", "me/tiny:Q4_K_M", "-md", "me/small:Q8_0", "-n", "4"]
    assert translated([command, "--hf-repo"]) == [command, "-m"]
