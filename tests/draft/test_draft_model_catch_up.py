"""A draft model that lacks many tokens of a text computes them in chunks before it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider import LLM, SamplingParams
from outrider.core.tree import NO_BUDGET

CHUNK = 16
PROMPTS: list[Any] = [{"prompt_token_ids": [5 + i] * 20 + [9, 8, i]} for i in range(2)]


def test_a_draft_that_is_far_behind_catches_up_in_chunks(tiny: Path) -> None:
    """No row is drafted for in the first steps, so that the draft lacks them."""
    config = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 3}
    llm = LLM(str(tiny), max_num_seqs=2, max_num_batched_tokens=CHUNK, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    plain = [output.outputs[0].token_ids for output in llm.variant(None).generate(PROMPTS, params)]
    drafter, controller = llm.engine.drafter, llm.engine.controller
    budget, catch_up = controller.budget, drafter._catch_up  # type: ignore[attr-defined]
    lengths, lacking = list[int](), list[int]()

    def late(batch: Any) -> Any:
        granted = budget(batch)
        lacking.append(max(drafter.behind(step.row) for step in batch))
        return granted if all(len(step.row.output) > 40 for step in batch) else [NO_BUDGET] * len(batch)

    def counted(batch: Any) -> Any:
        first = catch_up(batch)
        lengths.append(first.step_input.length)
        return first

    controller.budget = late  # type: ignore[method-assign]
    drafter._catch_up = counted  # type: ignore[attr-defined]
    outputs = llm.generate(PROMPTS, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert max(lacking) >= 40 and max(lengths) <= CHUNK and lengths.count(CHUNK) >= 4
    assert all(output.outputs[0].speculation.accepted for output in outputs)
    llm.engine.check()
