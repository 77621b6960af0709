"""Hydra in the engine equals a naive float64 forward under every condition, and can be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hydras import CONFIG, engine, judged, naive, overhear, prompts, tensors, toy_like
from toys import LAYERS, acceptance, read, samples, save_head, teach

from outrider import LLM, SamplingParams
from outrider.cache.catch_up import MAX_PENDING
from outrider.core.step import FINAL
from outrider.core.tree import Budget, DraftTree
from outrider.draft.hydra import Hydra, Network
from outrider.heads.ranks import MEDUSA, paths, ranks_of
from outrider.heads.sample import TargetWeights


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy_like(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy(target: str) -> LLM:
    return LLM(target, dtype="float32")


@pytest.mark.parametrize("arch", ["prefix-mlp", "mlp"])
def test_alignment_holds_under_every_condition(toy: LLM, target: str, tmp_path: Path, arch: str) -> None:
    """Prefill chunks, batches, prefix hits, forks and preempted rows: always the same drafts."""
    w = tensors(arch)
    folder = save_head(tmp_path, {**CONFIG, "hydra_head_arch": arch}, w, "hydra_lm_head.pt")
    slot = toy.engine.decoder.footprint.total() + engine(target, folder).engine.drafter.slot_bytes
    llm = engine(
        target,
        folder,
        nodes=30,
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=112,
        kv_cache_memory_bytes=128 * slot,
    )
    heard, params = (
        overhear(llm),
        SamplingParams(temperature=0.5, seed=3, max_tokens=40, n=2, ignore_eos=True),
    )
    first = llm.generate(prompts(), params)
    assert llm.engine.scheduler.preemptions > 0
    again = llm.generate(
        prompts()[-1:], params
    )  # the answers to questions that were asked before are compared in `overhear`
    assert [o.token_ids for o in again[0].outputs] == [o.token_ids for o in first[-1].outputs]
    assert again[0].num_cached_tokens
    judged(toy, w, heard, 48)
    drafter: Any = llm.engine.drafter
    assert not drafter.last_states and not drafter.catch_up.cursors, "finished rows should be forgotten"


def test_samples_share_the_prompt(target: str, tmp_path: Path) -> None:
    """The K/V of a prompt is there by the time at which the other samples fork."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"))
    known: list[int] = []
    observe = llm.engine.drafter.observe
    llm.engine.drafter.observe = lambda commit: (
        known.append(sum(step.known for step in commit.batch)),
        observe(commit),
    )  # type: ignore[method-assign]
    llm.generate(prompts(1, 60), SamplingParams(temperature=0.5, seed=1, n=3, max_tokens=4, ignore_eos=True))
    assert known[0] == 60 and max(known[1:]) <= 3


def test_sampled_drafts_carry_their_distributions(toy: LLM, target: str, tmp_path: Path) -> None:
    w = tensors()
    llm = engine(
        target, save_head(tmp_path, CONFIG, w, "hydra_lm_head.pt"), verification="traversal", nodes=16
    )
    heard, checked, propose = overhear(llm), 0, llm.engine.drafter.propose

    def proposing(batch: Any) -> Any:
        nonlocal checked
        draft = propose(batch)
        for row, tree in zip(batch.rows, draft.trees):
            output: list[list[int]] = []
            for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
                before = output[parent] if parent >= 0 else []
                output.append([*before, token])
                distribution = tree.distribution(i)
                assert distribution is not None
                assert torch.allclose(
                    distribution,
                    (heard[tuple(row.tokens), tuple(before)] / 0.7).double().softmax(-1),
                    atol=1e-9,
                )
                checked += 1
        return draft

    llm.engine.drafter.propose = proposing  # type: ignore[method-assign]
    llm.generate(prompts(2), SamplingParams(temperature=0.7, seed=2, max_tokens=8, ignore_eos=True))
    assert checked > 100
    judged(toy, w, heard)


def test_states_of_an_earlier_layer(toy: LLM, target: str, tmp_path: Path) -> None:
    w = tensors()
    llm = engine(target, save_head(tmp_path, {**CONFIG, "hidden_state_offset": 2}, w, "hydra_lm_head.pt"))
    heard = overhear(llm)
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    judged(toy, w, heard, state=LAYERS - 2)


def test_quantized_heads_have_nearly_the_same_logits(toy: LLM, target: str, tmp_path: Path) -> None:
    """int8: logits of the first head within a tenth of their spread."""
    w = tensors()
    llm = engine(target, save_head(tmp_path, CONFIG, w, "hydra_lm_head.pt"), quantization="int8")
    heard, outer = overhear(llm), TargetWeights.of(toy.engine.decoder)
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    tokens = next(tokens for tokens, path in heard if not path)
    f = read(toy.engine.decoder, tokens, (FINAL,)).states[FINAL][:-1]
    expected, output = naive(w, f, outer.embedding[[tokens[-1]]]), heard[tokens, ()].double()
    assert 0 < (output - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


def test_a_published_tree_is_drafted_completely(target: str, tmp_path: Path) -> None:
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"), nodes=63)
    trees: list[DraftTree] = []
    observe = llm.engine.drafter.observe
    llm.engine.drafter.observe = lambda commit: (
        trees.extend(step.tree for step in commit.batch),
        observe(commit),
    )  # type: ignore[method-assign]
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tree = trees[1]
    found, below = ranks_of(tree), list[tuple[int, ...]]()
    for i, parent in enumerate(tree.parents):
        below.append((*(below[parent] if parent >= 0 else ()), found[i]))
    assert sorted(below) == sorted(paths(MEDUSA["mc_sim_7b_63"])) and len(below) == 63


def test_pending_states_are_read_in_time(target: str, tmp_path: Path) -> None:
    """A row without draft budget catches up now and then, so that its pages can be shared."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"))
    drafter: Any = llm.engine.drafter
    most, observe = 0, drafter.observe

    def observing(commit: Any) -> None:
        nonlocal most
        observe(commit)
        most = max([most, *(cursor.count for cursor in drafter.catch_up.cursors.values())])

    drafter.observe = observing
    (out,) = llm.generate(
        prompts(1), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, speculate=False)
    )
    assert out.speculation.drafted == 0 and most == MAX_PENDING - 1
    whole = {"prompt_token_ids": out.prompt_token_ids + list(out.outputs[0].token_ids)[:-1]}
    (again,) = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1))
    assert (again.num_cached_tokens or 0) >= 30 + 200 - MAX_PENDING - 32


def test_own_tree_follows_the_measured_accuracy(target: str, tmp_path: Path) -> None:
    """A random head is hardly ever right, and what it learns is put back with `memory`."""
    llm = engine(target, save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt"), tree="own", nodes=6)
    before = llm.engine.drafter.memory.accuracy[0][0]
    llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert llm.engine.drafter.memory.accuracy[0][0] < 0.6 * before
    assert engine(target, str(tmp_path), nodes=6).engine.drafter.memory is None


def test_listed_paths_bound_the_tree(target: str, tmp_path: Path) -> None:
    folder = save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt")
    drafter: Any = engine(target, folder, tree=[[0], [1], [0, 0]]).engine.drafter
    assert (drafter.depth, drafter.size(1), drafter.size(2)) == (2, 2, 3)
    assert sorted(drafter.shape(Budget(2, 8))) == [(0,), (0, 0), (1,)]


# ---- what it learns


@pytest.fixture(scope="module", params=["prefix-mlp", "mlp"])
def taught(request: pytest.FixtureRequest, toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    network, outer = (
        Network.like(toy.engine.target, request.param, heads=2, layers=1, dropout=0.0),
        TargetWeights.of(toy.engine.decoder),
    )
    network.start(outer)
    teach(network.train(), network.loss, samples(toy, (FINAL,)), outer, steps=40, rate=1e-2)
    return save_head(
        tmp_path_factory.mktemp("taught"), network.config(), network.state_dict(), "hydra_lm_head.pt"
    )


def test_a_trained_head_is_mostly_right(target: str, taught: str) -> None:
    """Chance is 1/512.  A chain of two, and trees of eight nodes, of which two can be right."""
    assert acceptance(target, {"model": taught, "tree": "chain"}) > 0.4
    for tree in ("mc_sim_7b_63", "own"):
        assert acceptance(target, {"model": taught, "tree": tree, "nodes": 8}) > 0.14


def test_a_shift_is_caught(target: str, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token before the one sampled from the state."""
    propose = Hydra.propose

    def shifted(self: Hydra, batch: Any) -> Any:
        for row in batch.rows:
            row.tokens[-2:] = reversed(row.tokens[-2:])
        try:
            return propose(self, batch)
        finally:
            for row in batch.rows:
                row.tokens[-2:] = reversed(row.tokens[-2:])

    monkeypatch.setattr(Hydra, "propose", shifted)
    assert acceptance(target, {"model": taught, "tree": "chain"}) < 0.2


def test_the_loss_is_the_teachers(toy: LLM) -> None:
    """Cross entropy per head and position, against the target's distribution of that token."""
    torch.manual_seed(1)
    network = Network.like(toy.engine.target, heads=2, layers=2).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    sample, outer = (
        read(toy.engine.decoder, [5, 9, 400, 3, 77, 12], (FINAL,)),
        TargetWeights.of(toy.engine.decoder),
    )
    p = network.prefixed(sample.states[FINAL])
    total = 0.0
    for i in range(2):
        each = []
        for t in range(len(sample.tokens) - 1 - i):
            z = torch.cat([p[t], *outer.embedding[sample.tokens[t + 1 : t + 2 + i]]])
            output = network.hydra_lm_head[i](network.hydra_mlp[i](z))
            each.append(-(sample.logits[t + 1 + i].softmax(-1) * F.log_softmax(output, -1)).sum())
        total += torch.stack(each).mean().item()
    assert network.loss(sample, outer).item() == pytest.approx(total, rel=1e-5)
