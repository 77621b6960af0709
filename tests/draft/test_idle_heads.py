"""A head that is not asked for drafts costs a step next to nothing, however many requests run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeOptions
from outrider.core.device import beside
from outrider.core.step import Batch, States
from outrider.core.tree import NO_BUDGET, Budget
from outrider.draft.eagle3 import Eagle3
from outrider.testing import random_prompts, tiny_checkpoint

STEPS, FIRST, LAST = 40, 10, 30  # of an answer; those that are counted


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "torch")
        folder = tiny_checkpoint(tmp_path_factory.mktemp("llama"))
        yield LLM(folder, dtype="float32", enable_prefix_caching=False)


def operations(llm: LLM, requests: int) -> float:
    """Torch operations of a step in which so many requests decode."""
    step, counts = llm.engine.step, list[int]()

    def counted() -> Any:
        with Operations() as found:
            rows = step()
        counts.append(found.count)
        return rows

    params = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids[:4]} for ids in random_prompts(requests, seed=1, longest=40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "step", counted)
        llm.generate(prompts, params, use_tqdm=False)
    return sum(counts[FIRST:LAST]) / (LAST - FIRST)


@pytest.mark.parametrize("requests", [1, 6])
def test_an_idle_head_adds_few_operations_to_a_step(llm: LLM, requests: int) -> None:
    """Copies of three states: the operations of a plain forward are those of the engine without a head."""
    plain = operations(llm, requests)
    idle = llm.variant({"method": "off"})
    drafter = Eagle3.example(idle.engine.target)
    idle.engine.use(drafter, SpeculativeOptions.of({"method": "off"}))

    def nothing(batch: Batch) -> list[Budget]:
        return [NO_BUDGET] * len(batch)

    idle.engine.controller.budget = nothing  # type: ignore[method-assign]
    assert operations(idle, requests) - plain <= 3


def test_neighbouring_columns_are_one_view() -> None:
    wide = torch.arange(24.0).view(3, 8)
    parts = wide.split([2, 3, 3], dim=1)
    whole = beside(parts)
    assert whole is not None and torch.equal(whole, wide) and whole.data_ptr() == wide.data_ptr()
    assert torch.equal(beside(parts[1:]), wide[:, 2:])  # type: ignore[arg-type]
    assert beside((parts[0], parts[2])) is None
    assert beside((parts[1], parts[0])) is None
    assert beside((parts[0], parts[1].clone())) is None


@pytest.mark.parametrize("joint", [True, False])
def test_states_of_rows_are_gathered_in_the_wanted_order(joint: bool) -> None:
    wide = torch.arange(30.0).view(5, 6)
    kept = dict(zip((1, 4, 7), wide.chunk(3, dim=1)))
    if not joint:
        kept = {layer: state.clone() for layer, state in kept.items()}
    every, some = States(kept, [[0], [1, 2], [3, 4]], 5), States(kept, [[0], [2], [4]], 5)
    for wanted, columns in (((1, 4, 7), [0, 1, 2, 3, 4, 5]), ((7, 1), [4, 5, 0, 1]), ((4,), [2, 3])):
        assert torch.equal(every.of(1, wanted), wide[1:3][:, columns])
        assert torch.equal(some.of(2, wanted), wide[4:5][:, columns])
        assert torch.equal(every.last_of(2, wanted), wide[4:5][:, columns])
        assert torch.equal(every.all(wanted), wide[:, columns]) and every.all(wanted).is_contiguous()


def test_states_of_long_prompts_are_those_of_their_positions() -> None:
    wide = torch.arange(400.0).view(200, 2)
    kept = dict(zip((1, 4), wide.chunk(2, dim=1)))
    states = States(kept, [[0], [*range(1, 120)], [*range(120, 190), 191, 199]], len(wide))
    for r, places in enumerate(states.places):
        assert torch.equal(states.of(r, (1, 4)), wide[places])
        assert torch.equal(states.of(r, (4,)), wide[places][:, 1:])


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("rows", [[0], [1, 2], [0, 2]])
def test_states_of_some_rows_keep_no_others_alive(joint: bool, rows: list[int]) -> None:
    wide = torch.arange(30.0).view(5, 6)
    kept = dict(zip((1, 4, 7), wide.chunk(3, dim=1)))
    if not joint:
        kept = {layer: state.clone() for layer, state in kept.items()}
    states = States(kept, [[0], [1, 2], [3, 4]], 5)
    some = states.only(rows, (1, 7))
    assert some.num_rows == sum(len(states.places[r]) for r in rows)
    for i, r in enumerate(rows):
        assert torch.equal(some.of(i, (1, 7)), states.of(r, (1, 7)))
    assert some.kept[1].untyped_storage().nbytes() == 4 * 4 * some.num_rows
