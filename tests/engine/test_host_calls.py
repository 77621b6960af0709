"""Calls of a decode step: unlike its time, they do not depend on the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_cases import needs_c

from outrider import LLM, SamplingParams
from outrider.testing import tiny_checkpoint


def functions_a_step(llm: LLM, rows: int) -> float:
    """Python functions that a decode step of so many rows calls, on average."""
    engine, step, called, steps = llm.engine, llm.engine.step, 0, 0

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal called
        called += event == "call"

    def counted() -> Any:
        nonlocal steps
        if engine.prefill.steps < 1 or engine.decode.steps < 4:
            return step()
        steps += 1
        sys.setprofile(count)
        try:
            return step()
        finally:
            sys.setprofile(None)

    engine.step = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * rows, params)
    del engine.step  # type: ignore[method-assign]
    assert all(len(output.outputs[0].token_ids) == 60 for output in outputs) and steps > 4
    return called / steps


@needs_c
@pytest.mark.parametrize(("drafts", "one_row", "each_row"), [(False, 84, 11), (True, 140, 38)])
def test_a_step_calls_few_functions(drafts: bool, one_row: int, each_row: int, tmp_path: Path) -> None:
    """Right behind a forward a call takes several times as long as in a loop."""
    folder = tiny_checkpoint(tmp_path / "llama")
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 4} if drafts else None
    llm = LLM(folder, max_num_seqs=8, speculative_config=config)
    assert functions_a_step(llm, 1) <= one_row
    llm.use(config)
    assert functions_a_step(llm, 8) <= one_row + 7 * each_row
