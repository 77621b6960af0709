"""Several ranks: the tokens of plain decoding at the same layout, with every kind of drafter."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from covering import covering_array, parametrized
from helpers import token_prompts, write_adapter
from parallel_cases import LAYOUTS, PROMPTS, check_tokens, params_of

from outrider import LLM, ConfigError, LoRARequest, SamplingParams
from outrider.control.ledger import Grace
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.parallel import model as parallel
from outrider.parallel.layout import Layout
from outrider.testing import (
    EngineDriver,
    check_idle,
    use_example,
    visible_parts,
)

Ranks = Callable[[Layout], LLM]
Plain = Callable[[str, float], list[tuple[object, ...]]]
STARTED = ("pp2", "tp2pp2", "apart")  # by default; each starts processes
METHODS = ["draft_model", "ngram", "eagle3", "medusa", "layerskip", "union"]
NEVER_ACCEPTED = ("ngram", "medusa", "eagle3")  # by chance, in random text or of a random head


FACTORS = {"layout": list(LAYOUTS), "method": METHODS, "temperature": [0.0, 0.8]}
chosen = parametrized(FACTORS, {*covering_array([STARTED, METHODS, FACTORS["temperature"]])})


@chosen
def test_speculation_keeps_every_token(
    ranks: Ranks, plain: Plain, crowded: None, layout: str, method: str, temperature: float
) -> None:
    """Also with chunked prompts, preemption and cached prefixes, and stages that work on several pieces."""
    llm = ranks(LAYOUTS[layout])
    assert llm.engine.exact
    expected = plain(layout, temperature)
    use_example(llm, method)
    outputs = check_tokens(llm, expected, temperature)
    assert method in NEVER_ACCEPTED or sum(o.speculation.accepted for o in outputs) > 0


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=() if name in STARTED else pytest.mark.full, id=name)
        for name, layout in LAYOUTS.items()
        if layout.size > 1
    ],
)
def test_hidden_states_and_logits_are_those_of_one_process(ranks: Ranks, model: str, layout: Layout) -> None:
    """To the bit if layers are not divided, else up to the order of sums."""
    one, several = LLM(model).engine.decoder, ranks(layout).engine.decoder
    found = []
    for decoder in (one, several):
        step, pool = StepInput(), decoder.pool(32)
        step.chain(array("i", range(32)), 0, PROMPTS[0][:12])
        step.logits_rows = [3, 11]
        states = dict.fromkeys((0, 1, 2, 3, 4, FINAL), torch.empty(0))
        found.append((decoder.forward_step(step.build(), pool, states).clone(), states))
    (logits, states), (own_logits, own_states) = found
    for which, state in states.items():
        torch.testing.assert_close(own_states[which], state, rtol=1e-4, atol=1e-4)
        assert layout.tensor > 1 or torch.equal(own_states[which], state)
    torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-4)
    ids = [5, 299, 0, 150]
    assert torch.equal(several.embed(ids), one.embed(ids))
    torch.testing.assert_close(several.head_logits(states[FINAL][:3]), one.head_logits(states[FINAL][:3]))


def test_adapters_keep_every_token_and_are_those_of_one_process(
    ranks: Ranks, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PIECE_ROWS", 3)
    write_adapter(tmp_path, model)
    loras = [None, LoRARequest("it", 1, str(tmp_path)), None, None]

    def tokens(llm: LLM, loras: list[LoRARequest | None]) -> list[object]:
        outputs = llm.generate(token_prompts(PROMPTS), params_of(0.8), lora_request=loras)
        return [visible_parts(output.outputs) for output in outputs]

    llm, one = ranks(LAYOUTS["tp2pp2"]), LLM(model, enable_lora=True)
    llm.use(None)
    expected = tokens(llm, loras)
    assert expected == tokens(one, loras) != tokens(one, [None] * 4)
    use_example(llm, "layerskip")
    assert tokens(llm, loras) == expected
    check_idle(llm)


@pytest.mark.parametrize("layout", ["tp2pp2", pytest.param("tp2", marks=pytest.mark.full)])
def test_a_draft_divided_like_the_target_keeps_every_token(
    ranks: Ranks, plain: Plain, model: str, layout: str
) -> None:
    llm, expected = ranks(LAYOUTS[layout]), plain(layout, 0.8)
    for more in ({}, {"siblings": 2}, {"siblings": 2, "mask_token_id": 7}):
        llm.use({"model": model, "draft_tensor_parallel_size": 2, **more})
        drafter = llm.engine.drafter
        assert isinstance(drafter, ModelDrafter) and drafter.decoder.group is llm.engine.decoder.group
        outputs = llm.generate(token_prompts(PROMPTS), params_of(0.8))
        assert [visible_parts(output.outputs) for output in outputs] == expected
        assert sum(output.speculation.accepted for output in outputs) > 0
        check_idle(llm)
    del drafter
    llm.use(None)
    gc.collect()
    assert [name for _, name, *_ in llm.engine.decoder.group.dropped].count("unload") == 1
    outputs = llm.generate(token_prompts(PROMPTS), params_of(0.8))
    assert [visible_parts(output.outputs) for output in outputs] == expected


def test_ranks_without_layers_store_no_keys(ranks: Ranks) -> None:
    """The memory of the one that has them all is planned, on the same machine or on another one."""
    decoder = ranks(LAYOUTS["apart"]).engine.decoder
    whole = ranks(LAYOUTS["one"]).engine.decoder.footprint
    assert [report.slot_bytes for report in decoder.reports] == [0, whole.total()]
    assert not decoder.stage.blocks and decoder.footprint == whole
    first, second = decoder.reports
    away = replace(second, host="another", device=torch.device("cuda", 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "reports", [first, away])
        assert decoder.footprint == whole


def test_a_draft_divided_in_another_way_is_refused(ranks: Ranks, model: str) -> None:
    with pytest.raises(ConfigError, match="or the target's tensor_parallel_size, 2: got 4"):
        ranks(LAYOUTS["tp2pp2"]).use({"model": model, "draft_tensor_parallel_size": 4})
    config = {"model": model, "draft_tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="tensor_parallel_size, 1: got 2"):
        LLM(model, speculative_config=config)
    with pytest.raises(ConfigError, match="leave draft_device"):
        LLM(model, speculative_config={**config, "draft_device": "cpu"})


def test_pieces_of_a_step_are_its_rows() -> None:
    step, tables = StepInput(), [array("i", range(at, at + 20)) for at in (0, 100)]
    step.chain(tables[0], 2, [5, 6, 7])
    step.nodes(tables[0], 5, [[10], [10, 11], [10, 12]], [8, 9, 10])
    step.chain(tables[1], 0, [1, 2])
    step.adapt(6, "adapter")
    step.logits_rows = [2, 3, 4, 5, 7]
    whole = step.build()
    for borders in ([0, 8], [0, 3, 8], [0, 1, 4, 7, 8]):
        pieces = [whole.only(range(first, end)) for first, end in pairwise(borders)]
        slots = [piece.key_slots(i) for piece in pieces for i in range(piece.length)]
        assert slots == [whole.key_slots(i) for i in range(8)]
        rows = [first + row for piece, first in zip(pieces, borders) for row in piece.logits_rows]
        assert rows == whole.logits_rows
        adapted = [
            first + at + i for p, first in zip(pieces, borders) for at, n, _ in p.adapters for i in range(n)
        ]
        assert adapted == [6, 7]
        assert [t for piece in pieces for t in piece.input_ids] == [*whole.input_ids]


def use_adaptive(llm: LLM) -> None:
    """Look-up that is asked for at every step, under a controller for each step in flight."""
    llm.use({"method": "ngram", "adaptive": True})
    for controller in llm.engine.adaptive:
        controller.planner.accounts.grace = Grace(least=1e3)  # nothing is too dear


@pytest.mark.parametrize("method", ["off", "draft_model", "adaptive"])
def test_steps_of_a_pipeline_overlap(ranks: Ranks, plain: Plain, method: str) -> None:
    """Each stage has a step of half of the rows."""
    llm, expected = ranks(LAYOUTS["pp2"]), plain("pp2", 0.8)
    use_adaptive(llm) if method == "adaptive" else use_example(llm, method)
    driver, sizes = EngineDriver(llm), list[tuple[int, int]]()
    requests = [driver.add_request(prompt, p) for prompt, p in zip(PROMPTS, params_of(0.8))]
    while driver.has_unfinished_requests():
        driver.step()
        llm.engine.check()
        sizes.append((len(llm.engine.flights), len(llm.engine.scheduler.in_flight)))
    assert (1, 2) in sizes and max(sizes) == (1, 2), "one step of two rows is left when the other is complete"
    assert [visible_parts(driver.finish(request).outputs) for request in requests] == expected
    check_idle(llm)
    for controller in llm.engine.adaptive:
        summary = controller.evidence.total
        assert sum(summary.steps.values()) == sum(request.rows[0].steps for request in requests)
        assert not controller.evidence.states and not controller.log


def test_adaptive_controllers_of_a_pipeline_exchange_rows(ranks: Ranks) -> None:
    """A row that another controller gets has all its steps in the books before."""
    llm = ranks(LAYOUTS["pp2"])
    use_adaptive(llm)
    first, second = llm.engine.adaptive
    assert first.evidence is second.evidence
    driver = EngineDriver(llm)
    lengths = (4, 40, 9, 40)
    requests = [
        driver.add_request(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        for prompt, length in zip(PROMPTS, lengths)
    ]
    while driver.has_unfinished_requests():
        driver.step()
        flying = [flight.controller for flight in llm.engine.flights]
        assert len({*map(id, flying)}) == len(flying), "a controller has one step in flight"
    report = llm.engine.report()
    assert len(report["resting"]) == 2 and len(report["drafters"]["ngram"]["outlook"]) == 2
    for request in requests:
        (sample,) = driver.finish(request).outputs
        assert sample.drafting is not None or not sample.speculation.drafted
        assert sum(sample.drafting.steps.values() if sample.drafting else ()) == request.rows[0].steps


def test_abort_of_a_row_in_flight_keeps_the_others(ranks: Ranks, plain: Plain) -> None:
    llm, expected = ranks(LAYOUTS["pp2"]), plain("pp2", 0.0)
    use_example(llm, "draft_model")
    driver = EngineDriver(llm)
    requests = [driver.add_request(prompt, p) for prompt, p in zip(PROMPTS, params_of(0.0))]
    while (
        not llm.engine.scheduler.in_flight.intersection(requests[3].rows)
        or len(requests[3].rows[0].output) < 4
    ):
        driver.step()
    emitted = len(requests[3].rows[0].output)
    driver.abort_request(requests[3])
    assert requests[3].rows[0] in llm.engine.scheduler.in_flight
    while driver.has_unfinished_requests():
        driver.step()
        llm.engine.check()
    found = [driver.finish(request).outputs for request in requests]
    assert [visible_parts(outputs) for outputs in found[:3]] == expected[:3]
    assert found[3][0].token_ids == expected[3][0][0][:emitted] and found[3][0].finish_reason == "abort"
    check_idle(llm)
