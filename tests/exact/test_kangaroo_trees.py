"""Kangaroo's trees of every shape leave the text, and verification resumes from what they computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributions import PROMPTS as SHORT
from distributions import SAMPLES, SEATS, TOKENS, VOCABULARY, Counted, Exact, p_values
from helpers import answer
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeOptions
from outrider.core.step import Batch, Commit
from outrider.core.tree import Draft
from outrider.draft.kangaroo import Kangaroo, Network
from outrider.drafting.base import Target
from outrider.engine.runner import Runner
from outrider.heads.base import random_head
from outrider.testing import check_idle, random_prompts, run_staggered, tiny_checkpoint, visible_parts

PROMPTS = random_prompts(5, seed=11)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "processed": {"temperature": 0.7, "repetition_penalty": 1.3, "bad_words": ["a"]},
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"exit_threshold": None},
    "chain that stops": {"exit_threshold": 0.2},
    "dynamic": {"tree": "dynamic", "top_k": 3, "nodes": 9, "exit_threshold": None},
    "dynamic that stops": {"tree": "dynamic", "top_k": 2, "nodes": 7, "exit_threshold": 0.2},
    "static": {"tree": "mc_sim_7b_63", "nodes": 12, "exit_threshold": None},
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("deep"), num_hidden_layers=4, initializer_range=0.12)


@pytest.fixture(scope="module")
def alone(deep: str) -> LLM:
    return LLM(deep, max_num_seqs=4, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def llm(deep: str) -> LLM:
    return LLM(deep, max_num_seqs=4)


def quiet(target: Target) -> Network:
    """An adapter that adds little: it drafts nearly what the target's own exit would."""
    network = Network.like(target)
    torch.nn.init.normal_(network.layers[0].self_attn.o_proj.weight, std=0.02)
    return network


def use(llm: LLM, verification: str = "match", **options: Any) -> Kangaroo:
    speculation = SpeculativeOptions.of({"method": "off", "verification": verification})
    target = llm.engine.target_for(speculation)
    drafter = Kangaroo(Kangaroo.Options(**options), target, random_head(quiet, target))
    llm.engine.use(drafter, speculation)
    llm.engine.forget_prefixes()
    return drafter


def params_of(sampling: str) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, max_tokens=26 + 3 * i, ignore_eos=True, **SAMPLING[sampling])
        for i in range(len(PROMPTS))
    ]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("tree", TREES)
def test_every_tree_leaves_the_text(tree: str, sampling: str, alone: LLM, llm: LLM) -> None:
    """In ragged company, by match; greedy ones also where samples are judged."""
    params = params_of(sampling)
    expected = [visible_parts(answer(alone, prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    for rule in ("match", "rejection") if sampling == "greedy" else ("match",):
        use(llm, rule, **TREES[tree])
        got = run_staggered(llm, PROMPTS, params)
        assert [visible_parts(output.outputs) for output in got] == expected
        assert sum(output.speculation.accepted for output in got) > 5
        check_idle(llm)


States = dict[tuple[int, ...], Tensor]


def resumed(llm: LLM, monkeypatch: pytest.MonkeyPatch, drop: bool) -> tuple[list[int], States]:
    """For every step the rows that verification need not compute below the exit, and the states that the
    drafter got, by the text that they end.  drop: verification resumes from nothing.
    """
    saved, states = list[int](), States()
    begin, observe = Runner._begin, Kangaroo.observe

    def beginning(self: Runner, batch: Batch, *rest: Any) -> Callable[[], Tensor]:
        if drop:
            batch.resume = None
        saved.append(0 if batch.resume is None else sum(map(len, batch.resume.nodes)))
        return begin(self, batch, *rest)

    def listening(self: Kangaroo, commit: Commit) -> None:
        for r, step in enumerate(commit.batch):
            for i, state in enumerate(commit.states.of(r, self.net.taps)):
                states[tuple(step.row.tokens[: step.start + i + 1])] = state.clone()
        observe(self, commit)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_begin", beginning)
        patch.setattr(Kangaroo, "observe", listening)
        run_staggered(llm, PROMPTS, params_of("sampled"))
    return saved, states


@pytest.mark.parametrize(("tree", "rows"), [("chain", 6), ("static", 3), ("dynamic", 0)])
def test_verification_resumes_and_keeps_the_states_of_the_exit(
    tree: str, rows: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit.  Of a chain all but the last node were computed; a dynamic tree has other slots."""
    use(llm, **TREES[tree])
    saved, states = resumed(llm, monkeypatch, drop=False)
    assert (max(saved) >= rows) if rows else not any(saved)
    llm.engine.forget_prefixes()
    nothing, plain = resumed(llm, monkeypatch, drop=True)
    assert not any(nothing) and plain.keys() == states.keys() and len(states) > 200
    assert all(torch.equal(state, plain[text]) for text, state in states.items())


def test_states_of_other_nodes_change_the_text(alone: LLM, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, params = use(llm, **TREES["chain"]), params_of("greedy")
    propose = drafter.propose

    def shuffled(batch: Batch) -> Draft:
        draft = propose(batch)
        if draft.resume is None:
            return draft
        return draft._replace(resume=draft.resume._replace(states=draft.resume.states.roll(1, 0)))

    monkeypatch.setattr(drafter, "propose", shuffled)
    got = run_staggered(llm, PROMPTS, params)
    expected = [answer(alone, prompt, p).outputs for prompt, p in zip(PROMPTS, params)]
    assert [visible_parts(o.outputs) for o in got] != [visible_parts(outputs) for outputs in expected]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_stop_keep_the_targets_distribution(rule: str, checkpoint: Any) -> None:
    """Under rules that judge samples, a chain ends where no probability reaches the threshold."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    llm, ask = LLM(str(checkpoint(**sizes)), max_num_seqs=SEATS), {"temperature": 1.0}
    drafter, lengths = use(llm, rule, exit_threshold=0.3), set[int]()
    propose, exact = drafter.propose, Exact(llm)

    def listening(batch: Batch) -> Draft:
        draft = propose(batch)
        lengths.update(len(tree.tokens) for tree in draft.trees)
        return draft

    drafter.propose = listening  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": list(SHORT[i % len(SHORT)])} for i in range(24 * len(SHORT))]
    params = [
        SamplingParams(seed=i, n=SAMPLES, max_tokens=TOKENS + 4, detokenize=False, **ask)
        for i in range(len(prompts))
    ]
    joint = exact.joint(ask)
    counts = np.zeros_like(joint)
    for i, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        for sample in output.outputs:
            counts[(i % len(SHORT), *sample.token_ids[:TOKENS])] += 1
    assert len(lengths) > 2, "some stop and some do not"
    assert min(p_values([Counted(joint, joint, joint, counts)])) > 1e-4
