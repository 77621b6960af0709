"""Processors and log-probabilities on the Triton backend: same texts and numbers, one read a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from helpers import answer
from interpreted import needs_triton
from launches import Launches
from scene import outcome
from syncs import Syncs
from triton_engine import graphs_of, small_checkpoint, triton_llm

from outrider import LLM, RequestOutput, SamplingParams
from outrider.testing import (
    EngineDriver,
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
    visible_parts,
)

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of masked lanes
]
PROMPTS = random_prompts(4, seed=3, longest=9)


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True, "temperature": 1.0, "seed": 7, **more})


EACH = [
    params(
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        logit_bias={5: 9.0, 40: 9.5},
        logprobs=2,
        stop_token_ids=[*range(40)],
        min_tokens=4,
        ignore_eos=False,
    ),
    params(allowed_token_ids=[*range(50, 90)], frequency_penalty=1.5, bad_words=["a", "be"], logprobs=0),
    params(structured_outputs={"regex": "[a-e ]{3,9}"}, top_k=20, logprobs=1),
    params(),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def llm(small: str) -> Iterator[LLM]:
    with triton_llm(small, logprobs_mode="processed_logprobs") as made:
        yield made


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[RequestOutput]:
    """Outputs of each prompt alone, without speculation."""
    return [answer(llm, prompt, p) for prompt, p in zip(PROMPTS, EACH)]


def test_texts_are_those_of_the_reference(
    plain: list[RequestOutput], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities, too, up to the rounding of the model's logits.  Every request has an effect."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    reference = LLM(small, device="cpu", logprobs_mode="processed_logprobs")
    for prompt, p, output in zip(PROMPTS, EACH, plain):
        expected, found = answer(reference, prompt, p).outputs[0], output.outputs[0]
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.finish_reason == expected.finish_reason
        for one, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
            assert [*one] == [*other] and [each.rank for each in one.values()] == [
                each.rank for each in other.values()
            ]
            assert [each.logprob for each in one.values()] == pytest.approx(
                [each.logprob for each in other.values()], abs=1e-4
            )
        free = params(temperature=p.temperature)
        assert p == EACH[3] or answer(reference, prompt, free).outputs[0].token_ids != found.token_ids


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
def test_trees_leave_texts_and_log_probabilities_with_one_read_a_step(
    graphs: bool, llm: LLM, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right tokens inside random trees, requests that come one after another; with graphs, a step ahead."""
    own = graphs_of(llm, monkeypatch) if graphs else None
    truth, seen = KnownTexts(), Syncs()
    for prompt, p, output in zip(PROMPTS, EACH, plain):
        truth.learn(prompt, p.seed or 0, output.outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 7, "num_speculative_tokens": 3})
    llm.engine.ahead, steps = graphs, llm.engine.steps
    with seen:
        outputs = run_staggered(llm, PROMPTS, EACH)
    assert [*map(outcome, outputs)] == [*map(outcome, plain)]
    assert all(output.speculation.accepted > 0 for output in outputs)
    assert seen.seen == ["tolist"] * (llm.engine.steps - steps)
    assert own is None or own.counts.replayed
    check_idle(llm)


def test_rejection_has_the_texts_of_the_rule_on_the_host(
    llm: LLM, plain: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.backends.triton.verifier import TreeVerifier

    truth = KnownTexts()
    for prompt, p, output in zip(PROMPTS, EACH, plain):
        truth.learn(prompt, p.seed or 0, output.outputs)
    use = {"method": "scripted", "script": Scripts(truth).hidden, "nodes": 5, "num_speculative_tokens": 3}
    found, reads, each = list[Any](), list[int](), [replace(p, logprobs=None) for p in EACH[:3]]
    for rules in (TreeVerifier.rules, ("match",)):
        monkeypatch.setattr(TreeVerifier, "rules", rules)
        llm.use({**use, "verification": "rejection"})
        with Syncs() as seen:
            outputs = run_staggered(llm, PROMPTS[:3], each)
        found.append([(*map(visible_parts, [o.outputs]), o.speculation) for o in outputs])
        reads.append(len(seen.seen))
    assert found[0] == found[1] and reads[0] < reads[1] / 2


def launches_of_a_step(llm: LLM, p: SamplingParams) -> set[str]:
    driver = EngineDriver(llm)
    request = driver.add_request(PROMPTS[0], p)
    driver.step()
    with Launches() as seen:
        driver.step()
    while not request.finished:
        driver.step()
    driver.finish(request)
    return {name for name in seen.seen if name.startswith("kernel")}


def test_rows_without_processors_launch_no_kernel_for_them(llm: LLM) -> None:
    llm.use({"method": "off"})
    more = {"kernel _mask", "kernel _edit"}
    usual = launches_of_a_step(llm, params(max_tokens=3))
    assert not usual & {*more, "kernel _filter"}
    assert launches_of_a_step(llm, params(max_tokens=3, presence_penalty=1.0)) == usual | more
    assert launches_of_a_step(llm, params(max_tokens=3, logprobs=1)) == usual | {"kernel _filter"}


def test_a_function_of_the_user_is_called_on_the_host(llm: LLM) -> None:
    """Beside rows that stay on the device."""
    calls = list[int]()

    def never_7(ids: list[int], logits: Any) -> Any:
        calls.append(len(ids))
        logits[7] = float("-inf")
        return logits

    llm.use({"method": "off"})
    found = run_staggered(llm, PROMPTS[:2], [params(logits_processors=[never_7], logprobs=1), EACH[1]])
    assert calls and all(len(output.outputs[0].logprobs or []) == 6 for output in found)
