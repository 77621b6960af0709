"""The Triton kernels through the whole engine: the same tokens with and without speculation."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import answer
from interpreted import DEVICE, needs_triton
from launches import Launches
from safetensors.torch import load_file, save_file
from syncs import Syncs
from triton_engine import graphs_of, small_checkpoint, triton_llm

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeOptions
from outrider.errors import ConfigError
from outrider.heads.base import random_head
from outrider.testing import (
    KnownTexts,
    Scripts,
    check_idle,
    random_prompts,
    run_staggered,
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
    return small_checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def llm(small: str) -> Iterator[LLM]:
    with triton_llm(small) as made:
        yield made


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[Any]:
    """Outputs of each prompt alone, without speculation."""
    return [answer(llm, prompt, p).outputs for prompt, p in zip(PROMPTS, PARAMS)]


def noisy_copy(checkpoint: str, folder: Path) -> str:
    """A checkpoint with other weights, near enough for its drafts to be accepted now and then."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        weights[name] = weight + 0.02 * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


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
    assert own is None or own.counts.replayed
    check_idle(llm)


def test_a_draft_model_reads_once_a_chain_and_leaves_the_tokens_unchanged(
    llm: LLM, small: str, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step records more than one graph, of the target or of the draft."""
    own, recorded = graphs_of(llm, monkeypatch), [0]
    monkeypatch.setattr("outrider.backends.triton.graphs.graphs_for", lambda device: own)
    llm.use({"model": small, "num_speculative_tokens": 3})
    steps, seen = llm.engine.steps, Syncs()
    for _ in range(2):
        with seen:
            outputs = run_staggered(
                llm, PROMPTS, PARAMS, on_step=lambda: recorded.append(own.counts.recorded)
            )
        assert [visible_parts(o.outputs) for o in outputs] == [visible_parts(o) for o in plain]
    assert sum(o.speculation.accepted for o in outputs) > 0
    assert set(seen.seen) == {"tolist"} and len(seen.seen) <= 2 * (llm.engine.steps - steps)
    assert own.counts.replayed and max(after - before for before, after in pairwise(recorded)) == 1
    assert len({key.kind[0] for key in own.graphs}) == 2  # of the target and of the draft
    check_idle(llm)


@pytest.mark.parametrize(
    "rule", ["traversal", *(pytest.param(rule, marks=pytest.mark.full) for rule in ("rejection", "block"))]
)
def test_rules_that_compare_p_with_q_stay_on_the_device(
    rule: str, llm: LLM, plain: list[Any], small: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A read for chains and one for answers in a step; the texts are those of the rule on the host."""
    from outrider.backends.triton.verifier import TreeVerifier

    draft = noisy_copy(small, tmp_path / "draft")
    use = {"model": draft, "num_speculative_tokens": 3, "verification": rule}
    own = graphs_of(llm, monkeypatch)
    monkeypatch.setattr("outrider.backends.triton.graphs.graphs_for", lambda device: own)
    llm.use(use)
    llm.engine.ahead = True  # a step in flight, as on a device
    steps, seen = llm.engine.steps, Syncs()
    with seen:
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    assert set(seen.seen) == {"tolist"} and len(seen.seen) <= 2 * (llm.engine.steps - steps)
    assert own.counts.replayed
    assert visible_parts(outputs[0].outputs) == visible_parts(plain[0])
    drafted, accepted = (sum(getattr(o.speculation, key) for o in outputs) for key in ("drafted", "accepted"))
    assert drafted > accepted > 0
    check_idle(llm)
    monkeypatch.setattr(TreeVerifier, "rules", ("match",))
    llm.use(use)
    with Syncs() as seen:
        on_host = run_staggered(llm, PROMPTS, PARAMS)
    assert len(seen.seen) > 2 * (llm.engine.steps - steps)
    assert [visible_parts(o.outputs) for o in on_host] == [visible_parts(o.outputs) for o in outputs]
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
    assert own.counts.replayed
    check_idle(llm)


def use_head(llm: LLM, tree: str) -> None:
    """An EAGLE head with random weights, and steps in flight, as on a device."""
    from outrider.draft.eagle import Eagle, Network

    speculation = SpeculativeOptions.of({"method": "eagle", "num_speculative_tokens": 3})
    target = llm.engine.target_for(speculation)
    options = Eagle.Options(tree=tree, **{"dynamic": {"nodes": 7, "top_k": 3}}.get(tree, {}))
    llm.engine.use(Eagle(options, target, random_head(Network.like, target)), speculation)
    llm.engine.ahead = True


def drafted(llm: LLM, own: Any) -> tuple[list[Any], list[Any], list[Counter[str]]]:
    """Texts, all draft trees, and what each draft launched that was replayed."""
    trees, launches, propose = list[Any](), list[Counter[str]](), llm.engine.drafter.propose

    def noting(batch: Any) -> Any:
        before = own.counts.recorded, own.counts.launched
        with Launches() as seen:
            draft = propose(batch)
        trees.append([tree[:2] for tree in draft.trees])
        if (own.counts.recorded, own.counts.launched) == before and any(tree.tokens for tree in draft.trees):
            launches.append(seen.seen)
        return draft

    with mock.patch.object(llm.engine.drafter, "propose", noting):
        outputs = run_staggered(llm, PROMPTS, PARAMS)
    check_idle(llm)
    return [visible_parts(o.outputs) for o in outputs], trees, launches


@pytest.mark.parametrize("tree", ["chain", "dynamic", "mc_sim_7b_63"])
def test_a_draft_of_a_head_is_one_replay_and_that_of_launches(
    tree: str, llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that begin and end at different steps: trees of several depths, rows that pad a graph."""
    own = graphs_of(llm, monkeypatch)
    use_head(llm, tree)
    texts, trees, _ = drafted(llm, own)
    assert texts == [visible_parts(o) for o in plain]
    # Again, for there is one recording in a step: what another one prevents is launched at first.
    *found, launches = drafted(llm, own)
    assert found == [texts, trees]
    # states are taken in, joined and copied, numbers copied, a graph replayed; a device's read is one more
    assert launches and max(seen.total() for seen in launches) <= 8, launches
    own = graphs_of(llm, monkeypatch, worth=3.0, rows=(1, 2, 4, 8, 20))
    use_head(llm, tree)
    assert drafted(llm, own)[:2] == (texts, trees)
    assert own.counts.launched and own.counts.replayed
    assert own.counts.padded or DEVICE.type == "cuda", "whose texts, and so the sizes, are others"
    monkeypatch.setattr(llm.engine.decoder.backend, "graphs", None)
    use_head(llm, tree)
    assert drafted(llm, own)[:2] == (texts, trees)


def test_a_draft_of_a_head_that_cannot_be_recorded_is_launched(
    llm: LLM, plain: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning, and the trees that a graph gives."""
    own = graphs_of(llm, monkeypatch)

    def fail(run: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    use_head(llm, "dynamic")
    expected = drafted(llm, own)[:2]
    own = graphs_of(llm, monkeypatch)
    monkeypatch.setattr(own.recorder, "record", fail)
    use_head(llm, "dynamic")
    assert drafted(llm, own)[:2] == expected and not own.counts.replayed and own.counts.failed
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1 and "not permitted when stream is capturing" in warnings[0]


def test_compiled_kernels_are_refused_on_a_cpu(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.backends.triton import dot

    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    monkeypatch.setattr(dot, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        LLM(small, device="cpu")
