"""The code of docs/add-a-drafter.md runs, and its methods need no line outside their own modules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import save_head

from outrider import LLM, SamplingParams, draft
from outrider.errors import ModelError
from outrider.heads.base import HeadDrafter
from outrider.inspect.heads import format_of, head_card
from outrider.testing import tiny_checkpoint
from outrider.train import methods as trained
from outrider.train import run
from outrider.train.report import Report

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "add-a-drafter.md").read_text()
SNIPPETS = re.findall(r"```python\n# src/outrider/draft/(\S+)\n(.*?)```", PAGE, re.DOTALL)
TRAINING = re.findall(r"```python\n# src/outrider/draft/(\S+), further down\n(.*?)```", PAGE, re.DOTALL)
ROWS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9] * 30}]
PARAMS = [SamplingParams(temperature=t, seed=1, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
HEADS = [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]


@pytest.fixture(autouse=True)
def snippets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the documented modules into the registry's folder, and takes them out again."""
    folder = tmp_path / "draft"
    for name, code in SNIPPETS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code)
    for name, code in TRAINING:
        with (folder / name).open("a") as file:
            file.write(code)
    loaded = set(sys.modules)
    monkeypatch.setattr(draft, "__path__", [*draft.__path__, str(folder)])
    draft.methods.cache_clear()
    trained.methods.cache_clear()
    yield
    monkeypatch.undo()
    draft.methods.cache_clear()
    trained.methods.cache_clear()
    for name in [name for name in set(sys.modules) - loaded if name.startswith("outrider.draft.")]:
        del sys.modules[name]


def test_snippets_are_found() -> None:
    assert [name for name, _ in SNIPPETS] == ["echo.py", "shift.py"]
    assert {"echo", "shift"} <= set(draft.names())


def test_documented_look_up_is_lossless(tiny: Path) -> None:
    plain = LLM(str(tiny)).generate(ROWS, PARAMS)
    fast = LLM(str(tiny), speculative_config={"method": "echo", "confidence": 0.5}).generate(ROWS, PARAMS)
    assert [out.outputs[0].token_ids for out in fast] == [out.outputs[0].token_ids for out in plain]
    assert sum(out.outputs[0].speculation.drafted for out in fast) > 0


def test_documented_head_is_found_lossless_and_shown(tiny: Path, tmp_path: Path) -> None:
    plain = LLM(str(tiny))
    hidden = plain.engine.decoder.spec.hidden
    folder = save_head(tmp_path / "head", {}, {"shift_head.linear.weight": torch.eye(hidden)})
    fast = LLM(str(tiny), speculative_config={"model": folder})
    assert draft.detect(folder) == "shift"
    expected, found = (llm.generate(ROWS, PARAMS) for llm in (plain, fast))
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in expected]
    assert sum(out.outputs[0].speculation.drafted for out in found) > 0
    card = head_card(folder)
    assert card is not None
    assert (card.method, card.layout, card.hidden, card.refused) == ("shift", "reference", hidden, None)
    wide = save_head(tmp_path / "wide", {}, {"shift_head.linear.weight": torch.eye(hidden + 1)})
    with pytest.raises(ModelError, match="does not fit the target"):
        LLM(str(tiny), speculative_config={"model": wide})


def test_documented_training_lowers_the_loss(tmp_path: Path) -> None:
    assert [name for name, _ in TRAINING] == ["shift.py"]
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"one two three {i} " * 8 for i in range(12)))
    places = {"data": [str(texts)], "out": str(tmp_path / "out")}
    sizes = {"prompt_tokens": 4, "held_out": 2, "evaluate_prompts": 1, "evaluate_tokens": 8}
    options = trained.method("shift").Options(**places, **sizes, regenerate=False, steps=30, rate=3e-3)
    result = run.train(LLM(tiny_checkpoint(tmp_path / "target")), "shift", options, Report())
    first, last = result.records[0], result.records[-1]
    assert result.finished and last["held_loss"] < 0.9 * first["held_loss"]
    assert draft.detect(str(tmp_path / "out")) == "shift"
    assert "shift" in trained.methods() and "echo" not in trained.methods()


@pytest.mark.parametrize("name", HEADS)
def test_head_needs_only_its_file_and_a_row_of_the_table(name: str) -> None:
    """Code outside the file never names it (test_architecture); its names and row are where tools look."""
    assert (Path(draft.__file__).parent / f"{name}.py").is_file()
    assert format_of(name).layouts and format_of(name).hidden
    assert f"`{name}`" in (REPOSITORY / "docs" / "methods.md").read_text()
