"""A draft model that lacks many tokens of a text computes them in chunks before it drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from vocabularies import byte_level, tiny_words, twin

from outrider import LLM, SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import NO_BUDGET, Draft
from outrider.testing import EngineDriver, check_idle, tiny_checkpoint

CHUNK, LATE = 16, 4  # tokens of a step; of a late row before it is drafted for
PARAMS = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": [5 + i] * 40 + [9, 8, i]} for i in range(3)]


def drafted(tiny: Path, late: set[int]) -> list[dict[int, tuple[int, int]]]:
    """Answer the prompts.  The draft leaves out those that are late, until all rows decode.

    Returns, step by step, for each row that was to be drafted for: its draft tokens, and those that the draft
    lacks afterwards.
    """
    config = {"method": "draft_model", "model": str(tiny), "num_speculative_tokens": 3}
    llm = LLM(str(tiny), max_num_seqs=3, max_num_batched_tokens=CHUNK, speculative_config=config)
    plain = [output.outputs[0].token_ids for output in llm.variant(None).generate(PROMPTS, PARAMS)]
    drafter: Any = llm.engine.drafter
    budget, propose, catch_up = llm.engine.controller.budget, drafter.propose, drafter._catch_up
    steps, lengths, joined = list[dict[int, tuple[int, int]]](), list[int](), set[int]()

    def budgets(batch: Any) -> Any:
        granted = budget(batch)
        if len(batch) == len(PROMPTS) and all(len(step.row.output) >= LATE for step in batch):
            joined.update(late)
        for r, step in enumerate(batch):
            if number(step.row) in late - joined:
                step.row.left_out, granted[r] = frozenset({"draft_model"}), NO_BUDGET
        return granted

    def proposed(batch: Any) -> Any:
        draft = propose(batch)
        rows = [(step.row, tree) for step, tree in zip(batch, draft.trees) if step.budget.nodes]
        steps.append({number(row): (len(tree.tokens), drafter.behind(row)) for row, tree in rows})
        return draft

    def counted(parts: Any) -> Any:
        first = catch_up(parts)
        lengths.append(first.step_input.length)
        return first

    llm.engine.controller.budget = budgets  # type: ignore[method-assign]
    drafter.propose, drafter._catch_up = proposed, counted
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert max(lengths) <= CHUNK and all(output.outputs[0].speculation.accepted for output in outputs)
    llm.engine.check()
    return steps


def number(row: Row) -> int:
    return row.tokens[0] - 5


def test_a_draft_that_is_far_behind_catches_up_in_chunks(tiny: Path) -> None:
    steps = drafted(tiny, {0, 1, 2})
    lacks = [lacks for step in steps for nodes, lacks in step.values() if not nodes]
    assert max(lacks) >= 40 and min(lacks) > 0


def test_rows_beside_one_that_is_far_behind_are_drafted_for(tiny: Path) -> None:
    steps = drafted(tiny, {0})
    joining = [step for step in steps if 0 in step and step[0][1]]
    assert len(joining) >= 3 and not any(step[0][0] for step in joining)
    assert all(step.keys() == {0, 1, 2} and step[1][0] and step[2][0] for step in joining)


def retokenizing(folder: Path, **options: Any) -> LLM:
    target = tiny_checkpoint(folder / "target")
    other = twin(target, folder / "draft", *tiny_words(), byte_level)
    config = {"model": other, "vocab_mismatch": "retokenize", "num_speculative_tokens": 3}
    return LLM(target, speculative_config=config, **options)


def test_one_with_another_tokenizer_tells_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a controller counts no draft that could not be made."""
    monkeypatch.setattr("outrider.draft.draft_model.retokenize.CHUNK", 7)
    llm, seen = retokenizing(tmp_path, max_num_seqs=1), list[tuple[int, int]]()
    drafter: Any = llm.engine.drafter
    propose = drafter.propose

    def proposed(batch: Batch) -> Draft:
        made: Draft = propose(batch)
        seen.append((len(made.trees[0].tokens), drafter.behind(batch[0].row)))
        return made

    monkeypatch.setattr(drafter, "propose", proposed)
    llm.generate(PROMPTS[0], PARAMS)
    assert not seen[0][0] and seen[0][1] > 14, "a prompt of many chunks"
    assert all(bool(lacks) != bool(tokens) for tokens, lacks in seen if tokens or lacks)
    assert sum(tokens > 0 for tokens, _ in seen) > 4


def test_a_row_that_is_aborted_while_it_waits_is_forgotten(tmp_path: Path) -> None:
    """All rows together compute so few tokens in a step that one of them has to wait."""
    llm = retokenizing(tmp_path, max_num_seqs=4, max_num_batched_tokens=CHUNK)
    driver, drafter = EngineDriver(llm), cast(Any, llm.engine.drafter)
    requests = [driver.add_request(prompt, PARAMS) for prompt in PROMPTS]
    while not drafter.waiting:
        driver.step()
    for request in requests:
        driver.finish(request)
    check_idle(llm)
