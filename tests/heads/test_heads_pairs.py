"""Every (state, next token) pair enters a recurrent head once, at its position and in the slot of its token.

The head under test computes nothing.  Its K/V of a pair is the pair itself (position, token, state), so that
the keys a draft token attends to can be read back from the pool and compared with the target's states of the
text.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from head_pairs import LONG, Net, check, distribution, run, use_drafter
from helpers import answer
from torch import Tensor

from outrider import LLM
from outrider.cache.pool import Pool
from outrider.core.row import Row
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.heads.recurrent import Forwards
from outrider.testing import random_prompts, tiny_checkpoint


@pytest.mark.parametrize("tree", ["chain", "dynamic", "mc_sim_7b_63"])
def test_chunked_prompts_of_different_lengths(llama: str, plain: LLM, tree: str) -> None:
    prompts = random_prompts(6, seed=4, longest=60)
    params = [distribution(i) for i in range(6)]
    llm, drafter = use_drafter(
        llama, plain, prompts, params, max_num_batched_tokens=24, max_num_seqs=3, tree=tree
    )
    outputs = run(llm, prompts, params)
    assert sum(output.speculation.accepted for output in outputs) > 10
    check(llm, drafter)


def test_rows_after_prefix_hits_draft_from_the_same_pairs(llama: str, plain: LLM) -> None:
    """The pair at the border is computed once more, from a state that the target computes again."""
    common = random_prompts(1, seed=9, longest=40)[0] * 3
    prompts = [[*common, *tail] for tail in random_prompts(4, seed=5)] + [common[:33], common[:32]]
    params = [distribution(i) for i in range(6)]
    llm, drafter = use_drafter(llama, plain, prompts, params, max_num_seqs=2)
    run(llm, prompts, params)
    assert drafter.shared > 0
    first = {row: records[0][1] for row, records in drafter.log.pairs.items()}
    assert any(start > 0 and (start + 1) % 16 == 0 for start in first.values()), "no page was shared"
    check(llm, drafter)


def test_two_samples_of_one_prompt(llama: str, plain: LLM) -> None:
    prompts, params = random_prompts(3, seed=6, longest=50), [distribution(2 * i + 1, n=2) for i in range(3)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    run(llm, prompts, params)
    assert len(drafter.log.pairs) == 6
    check(llm, drafter)


def test_preempted_rows_draft_from_the_same_pairs(llama: str, plain: LLM) -> None:
    prompts, params = (
        random_prompts(5, seed=7, longest=40),
        [distribution(i, max_tokens=60) for i in range(5)],
    )
    memory = 10 * 16 * (plain.engine.decoder.footprint.total() + Net.slot_bytes)
    llm, drafter = use_drafter(llama, plain, prompts, params, kv_cache_memory_bytes=memory, max_model_len=128)
    run(llm, prompts, params)
    assert llm.engine.scheduler.preemptions > 0
    assert any(len({life for life, *_ in records}) > 1 for records in drafter.log.pairs.values())
    check(llm, drafter)


def test_rows_without_drafts_are_read_before_many_states_are_pending(llama: str, plain: LLM) -> None:
    """The number of pending states is bounded, and the pages can be shared."""
    prompts, params = (
        random_prompts(2, seed=8),
        [distribution(0, max_tokens=LONG, speculate=False), distribution(1, max_tokens=LONG)],
    )
    llm, drafter = use_drafter(llama, plain, prompts, params)
    most, observe = 0, drafter.observe

    def counting(commit: Any) -> None:
        nonlocal most
        observe(commit)
        most = max(most, *(cursor.count for cursor in drafter.catch_up.cursors.values()))

    drafter.observe = counting  # type: ignore[method-assign]
    run(llm, prompts, params)
    silent = next(records for row, records in drafter.log.pairs.items() if not row.params.speculate)
    assert len(silent) >= 64 and most <= 64 + 4
    check(llm, drafter)


def test_a_pair_without_a_slot_is_not_read(llama: str, plain: LLM) -> None:
    """A prompt fills its page, and without drafts the next page is missing: slot 0 belongs to another row."""
    prompts = [
        random_prompts(1, seed=9, longest=40)[0][:3] * 12,
        (random_prompts(1, seed=10, longest=40)[0] * 16)[:16],
    ]
    params = [distribution(0), distribution(1, speculate=False)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    catch_up = drafter._catch_up

    def watched(forwards: Forwards) -> Tensor:
        for reading in forwards.readings:
            assert reading.row.table is not None and reading.row.table.room > reading.cursor.end, (
                "a pair beside a token that has no slot"
            )
        return catch_up(forwards)

    drafter._catch_up = watched  # type: ignore[method-assign]
    run(llm, prompts, params)
    check(llm, drafter)


def test_an_interrupted_forward_is_repeated(llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs read before the interrupt are read again, with the same states; none is left out."""
    prompts, params = random_prompts(2, seed=3), [distribution(0), distribution(1)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    stream, forward, left = (
        llm.stream({"prompt_token_ids": prompts[0]}, params[0]),
        llm.engine.runner.begin,
        [4],
    )
    next(stream)

    def broken(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return forward(*given)

    monkeypatch.setattr(llm.engine.runner, "begin", broken)
    with pytest.raises(KeyboardInterrupt):
        run(llm, prompts[1:], params[1:])
    for last in stream:  # noqa: B007 - the last one is looked at
        pass
    assert last.outputs[0].token_ids == answer(plain, prompts[0], params[0]).outputs[0].token_ids
    check(llm, drafter, once=False)


def test_lost_states_leave_a_gap_that_is_not_shared(
    llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt before `observe` loses those pairs; later ones are right, and the gap stays unfilled."""
    prompts, params = random_prompts(2, seed=3), [distribution(0, max_tokens=40), distribution(1)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    drafter.complete = False
    stream, observe, left = llm.stream({"prompt_token_ids": prompts[0]}, params[0]), drafter.observe, [3]
    next(stream)

    def interrupted(commit: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        observe(commit)

    monkeypatch.setattr(drafter, "observe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(llm, prompts[1:], params[1:])
    before = drafter.drafted
    for last in stream:  # noqa: B007 - the last one is looked at
        pass
    assert last.outputs[0].token_ids == answer(plain, prompts[0], params[0]).outputs[0].token_ids
    assert drafter.drafted > before + 2
    check(llm, drafter, once=False)


def test_a_shifted_pair_is_detected(llama: str, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for a drafter that pairs each state with the token before."""
    prompts, params = random_prompts(2, seed=3), [distribution(0), distribution(1)]
    llm, drafter = use_drafter(llama, plain, prompts, params)
    forward = drafter.net.forward

    def shifted(step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        return forward(step_input, pool, g.roll(1, 0))

    monkeypatch.setattr(drafter.net, "forward", shifted)
    run(llm, prompts, params)
    with pytest.raises(AssertionError):
        check(llm, drafter)


@pytest.mark.parametrize("family", ["Llama", "GPTNeoX"])
def test_committed_states_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Commit.states against transformers' own hidden states, along accepted paths and chunks."""
    import transformers

    folder = tiny_checkpoint(tmp_path / family, family)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = LLM(folder, dtype="float32", enable_prefix_caching=False)
    prompts, params = random_prompts(3, seed=2, longest=50), [distribution(i) for i in range(3)]
    llm, drafter = use_drafter(folder, plain, prompts, params, max_num_batched_tokens=24, max_num_seqs=3)
    kept: dict[Row, dict[int, Tensor]] = defaultdict(dict)
    wanted = (0, 1, 2, FINAL)
    drafter.needs = drafter.needs._replace(states=wanted)
    observe = drafter.observe

    def listening(commit: Any) -> None:
        for r, step in enumerate(commit.batch):
            for i, state in enumerate(commit.states.of(r, wanted)):
                kept[step.row][step.start + i] = state
        observe(commit)

    drafter.observe = listening  # type: ignore[method-assign]
    outputs = run(llm, prompts, params)
    assert sum(output.speculation.accepted for output in outputs) > 5
    assert len(kept) == 3
    for row, states in kept.items():
        assert sorted(states) == list(range(len(row.tokens) - 1))
        with torch.no_grad():
            out = reference(torch.tensor([row.tokens]), output_hidden_states=True)
        # transformers' last hidden state is the one after the last norm: the input of that norm is checked so
        seen = torch.stack([states[t] for t in sorted(states)]).chunk(len(wanted), dim=-1)
        for mine, theirs in zip(
            (seen[0], seen[1], seen[3]), (out.hidden_states[0], out.hidden_states[1], out.hidden_states[2])
        ):
            assert torch.allclose(mine, theirs[0, : len(mine)], atol=1e-3)
        last = reference.model.norm if family == "Llama" else reference.gpt_neox.final_layer_norm
        assert torch.allclose(last(seen[2]), seen[3], atol=1e-4)
