"""The folder of learned weights: one process, its own files only, complete after any error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.cli import main
from outrider.errors import ConfigError
from outrider.online import store
from outrider.online.store import Store

WEIGHTS = {"x": torch.ones(3)}
HOLDER = """
import sys
from outrider.online.store import Store
store = Store(sys.argv[1], "t", "b")
print("held", flush=True)
sys.stdin.read()
"""


def number(path: Path) -> int | None:
    found = Store(path, "t", "b").load()
    return None if found is None else int(found[1]["number"])


def test_a_folder_is_refused_while_another_process_learns_in_it(tmp_path: Path) -> None:
    Store(tmp_path, "t", "b").save({}, WEIGHTS, {"number": 1})
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        for use in (lambda: Store(tmp_path, "t", "b"), lambda: store.delete(tmp_path)):
            with pytest.raises(ConfigError, match=f"another process learns in .*{tmp_path.name}"):
                use()
        other.stdin.close()
    assert number(tmp_path) == 1


def test_two_stores_of_a_process_share_a_folder(tmp_path: Path) -> None:
    first, second = Store(tmp_path, "t", "b"), Store(tmp_path, "t", "b")
    first.save({}, WEIGHTS, {"number": 1})
    second.save({}, WEIGHTS, {"number": 2})
    assert number(tmp_path) == 2


def test_a_folder_is_refused_while_another_engine_learns_in_it(tmp_path: Path) -> None:
    class Engine:
        """An owner."""

    first, second = Engine(), Engine()
    kept = Store(tmp_path, "t", "b", first)
    again = Store(tmp_path, "t", "b", first)  # its drafter was replaced
    with pytest.raises(ConfigError, match=f"another model of this process learns in .*{tmp_path.name}"):
        Store(tmp_path, "t", "b", second)
    cycle = [kept, again]
    cycle.append(cycle)  # type: ignore[arg-type]
    del kept, again, cycle  # as an engine does
    assert Store(tmp_path, "t", "b", second).owner is not None, "a store in no use is no obstacle"
    del first


def broken(*args: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("part", ["save_file", "hashed", "synced", "write_text"])
def test_an_error_while_writing_leaves_the_last_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    Store(tmp_path, "t", "b").save({}, WEIGHTS, {"number": 1})
    again = Store(tmp_path, "t", "b")  # as after a restart
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match="No space left" if part == "hashed" else "the disk is full"),
    ):
        patch.setattr(Path if part == "write_text" else store, part, broken)
        again.save({}, WEIGHTS, {"number": 2})
    assert number(tmp_path) == 1 and len(list(tmp_path.iterdir())) == 3, "nothing is left of the new ones"


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    kept = Store(tmp_path / "a", "t", "b")
    kept.path = tmp_path / "b"
    (tmp_path / "b").write_text("a file")
    with pytest.raises(OSError):
        kept.save({}, WEIGHTS, {})


def test_the_files_and_their_names_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(store, "synced", flushed.append)
    Store(tmp_path, "t", "b").save({}, WEIGHTS, {})
    assert flushed == [*(tmp_path / name for name in store.TEMPORARY), tmp_path]


def test_a_folder_whose_first_weights_are_missing_is_used_and_deleted(tmp_path: Path) -> None:
    """A kill between the two names, or a user who removes a damaged file, leaves such a folder."""
    Store(tmp_path, "t", "b").save({}, WEIGHTS, {"number": 1})
    (tmp_path / store.WEIGHTS).unlink()
    assert number(tmp_path) is None
    assert store.delete(tmp_path) > 0 and not tmp_path.exists()


def test_a_folder_with_only_a_lock_is_deleted(tmp_path: Path) -> None:
    """A process that ended before it saved weights leaves it."""
    path = tmp_path / "given"
    Store(path, "t", "b")
    assert [file.name for file in path.iterdir()] == [store.LOCK]
    with pytest.raises(SystemExit, match="0"):
        main(["online", "delete", str(path)])
    assert not path.exists()


def test_metadata_nested_without_end_is_refused(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / store.WEIGHTS, {store.KEY: "[" * 200_000})
    with pytest.raises(ConfigError, match="cannot be read"):
        Store(tmp_path, "t", "b")


def with_other_files(path: Path) -> None:
    path.mkdir()
    (path / "weights-2024-final").write_text("precious")


def with_unreadable_weights(path: Path) -> None:
    path.mkdir()
    (path / "model.safetensors").write_text("no tensors")


def with_a_head_of_others(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file(WEIGHTS, path / "model.safetensors", {"format": "pt"})


def with_a_config_of_others(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_other_files, "holds other files, as 'weights-2024-final': give a folder of its own"),
        (with_unreadable_weights, "cannot be read .*: give another path, or remove the file"),
        (with_a_head_of_others, "was not written by learning: give a folder of its own"),
        (with_a_config_of_others, "holds other files, as 'config.json': give a folder of its own"),
        (Path.touch, "is no folder that can be written .*: give another path"),
    ],
)
def test_a_path_of_other_files_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "given"
    make(path)
    before = sorted((file, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())
    with pytest.raises(ConfigError, match=message):
        Store(path, "t", "b")
    with pytest.raises(SystemExit, match="2"):
        main(["online", "delete", str(path)])
    assert before == sorted((file, file.read_bytes()) for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="can be written"):
        Store(tmp_path, "t", "b")


def test_files_of_others_that_came_later_stay(tmp_path: Path) -> None:
    kept = Store(tmp_path, "t", "b")
    kept.save({}, WEIGHTS, {"number": 1})
    others = [tmp_path / name for name in ("tokenizer.json", "model.safetensors.bak", "weights-final")]
    for file in others:
        file.write_text("precious")
    kept.save({}, WEIGHTS, {"number": 2})
    state = store.read(tmp_path)
    assert state is not None and state["statistics"] == {"number": 2}
    store.delete(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
