"""The Python examples of docs/testing.md and the README run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.testing import tiny_checkpoint
from outrider.verify.rejection import Rejection

REPOSITORY = Path(__file__).parents[2]


def examples(file: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / file).read_text(encoding="utf-8"), re.DOTALL)


SAME_TEXT, *OTHERS = examples("docs/testing.md")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_example_of_the_same_text_accepts_drafts(method: str) -> None:
    found: dict[str, Any] = {}
    exec(SAME_TEXT.replace("my_drafter", method), found)
    found[f"test_{method}"]()


def test_the_other_examples_of_testing(tmp_path: Path) -> None:
    llm, params = LLM(tiny_checkpoint(tmp_path)), SamplingParams(temperature=0, seed=0, max_tokens=8)
    plain = llm.generate("A prompt", params)[0]
    names = {"llm": llm, "plain_output": plain, "seed": 0}
    echo: dict[str, Any] = {"__name__": __name__}
    exec(examples("docs/add-a-drafter.md")[0], echo)
    for example in OTHERS:
        exec(example, {"MyDrafter": echo["Echo"], "MyRule": Rejection, **names})
    assert llm.generate("A prompt", params)[0].outputs[0].token_ids == plain.outputs[0].token_ids


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = examples("README.md")
    exec(example, {})
    assert len(re.findall(r"\[\d\.\d\d tokens per step\]\n", capsys.readouterr().out)) == 2
