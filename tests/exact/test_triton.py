"""The Triton kernels through the whole engine: the same tokens with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers import answer
from interpreted import DEVICE, Rerun, needs_triton
from syncs import Syncs

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
    tiny_checkpoint,
    use_example,
    visible_parts,
)

pytestmark = [
    needs_triton,
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of masked lanes
]
PROMPTS = random_prompts(2, seed=3, longest=9)
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, top_k=40, seed=7)
    for temperature in (0.0, 1.0)
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers with two heads over one.  The interpreter takes a millisecond for ten operations."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_checkpoint(tmp_path_factory.mktemp("small") / "llama", **sizes)


@pytest.fixture(scope="module")
def llm(small: str) -> Iterator[LLM]:
    from outrider.backends.triton import attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", "triton")
        if DEVICE.type == "cpu":
            patch.setattr(attention, "BLOCK", 16)
            patch.setattr(attention, "SPLIT", 16)
            patch.setattr("outrider.engine.engine.bit_exact", lambda decoder: True)  # takes half a minute
        made = LLM(small, device=DEVICE.type, enable_prefix_caching=False)
        assert made.engine.exact and made.engine.decoder.backend.name.startswith("Triton")
        yield made


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    """Outputs of each prompt alone, without speculation."""
    return [answer(llm, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]


def graphs_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """New graphs of small sizes for the target, of every shape."""
    from outrider.backends.triton import graphs, jobs

    monkeypatch.setattr(jobs, "ROWS", (20,))
    monkeypatch.setattr(jobs, "LEAST_KEYS", 32)
    made = graphs.graphs_for(DEVICE) or graphs.Graphs(Rerun())
    monkeypatch.setattr(llm.engine.decoder.backend, "graphs", made)
    return made


def test_triton_kernels_give_the_tokens_of_the_reference(
    plain: list[Any], small: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    reference = LLM(small, device="cpu")
    expected = [answer(reference, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]
    assert [visible_parts(o) for o in plain] == [visible_parts(o) for o in expected]


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "graphs"])
def test_trees_leave_the_tokens_unchanged_with_one_read_a_step(
    graphs: bool, llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled requests in one batch, prefill beside decoding, right tokens inside random trees.

    The only read of a step returns the counts and tokens of all rows.
    """
    own = graphs_of(llm, monkeypatch) if graphs else None
    truth, seen = KnownTexts(), Syncs()
    for prompt, p, outputs in zip(PROMPTS, PARAMS, plain):
        truth.learn(prompt, p.seed or 0, outputs)
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 7, "num_speculative_tokens": 3})
    steps = llm.engine.steps
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.accepted for o in outputs) > 0
    assert llm.engine.steps > steps
    assert seen.seen == ["tolist"] * (llm.engine.steps - steps)
    assert own is None or own.replayed
    check_idle(llm)


def test_a_draft_model_reads_once_a_chain_and_leaves_the_tokens_unchanged(
    llm: LLM, small: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = graphs_of(llm, monkeypatch)
    monkeypatch.setattr("outrider.backends.triton.graphs.graphs_for", lambda device: own)
    llm.use({"model": small, "num_speculative_tokens": 3})
    steps, seen = llm.engine.steps, Syncs()
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.accepted for o in outputs) > 0
    assert set(seen.seen) == {"tolist"} and len(seen.seen) <= 2 * (llm.engine.steps - steps)
    assert own.replayed and len({key[0] for key in own.graphs}) == 2  # of the target and of the draft
    check_idle(llm)


def test_trees_of_a_head_read_once_a_draft_and_leave_the_tokens_unchanged(
    llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = graphs_of(llm, monkeypatch)
    use_example(llm, "eagle", num_speculative_tokens=2)
    steps, seen = llm.engine.steps, Syncs()
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.drafted for o in outputs) > 0
    assert set(seen.seen) == {"tolist"} and len(seen.seen) <= 2 * (llm.engine.steps - steps)
    assert own.replayed
    check_idle(llm)


def test_compiled_kernels_are_refused_on_a_cpu(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.backends.triton import dot

    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    monkeypatch.setattr(dot, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        LLM(small, device="cpu")
