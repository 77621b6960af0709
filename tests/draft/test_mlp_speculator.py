"""MLP speculators: published layouts against a naive float64 network, trees, distributions, refusals."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlp_speculator_files import CASES, INNER, KEPT, STEPS, TOP_K, Case, ibm, lstm, once, rnn
from safetensors.torch import save_file
from torch import Tensor
from toys import HIDDEN, V

from outrider import LLM, ConfigError, ModelError, SamplingParams, draft
from outrider.backends.torch.sampling import pick
from outrider.checkpoints.heads import Head
from outrider.core.noise import key_of
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.step import Batch, RowStep
from outrider.core.tree import ROOT, Budget, DraftTree
from outrider.draft.mlp_speculator import MlpSpeculator
from outrider.heads.base import LastState
from outrider.heads.speculators import SpeculatorDrafter
from outrider.testing import check_tree, make_row


def method_of(case: Case) -> str:
    gates = any("forget_" in name or "projs" in name for name in case.stored)
    return "lstm_speculator" if gates else "mlp_speculator"


def opened(llm: LLM, case: Case, folder: Path, **options: Any) -> SpeculatorDrafter:
    kind = draft.method(method_of(case))
    assert issubclass(kind, SpeculatorDrafter)
    return kind(kind.Options(model=case.write(folder), **options), llm.engine.target)


# ---- layouts


@pytest.mark.parametrize("name", CASES)
def test_a_layout_loads_as_it_is(name: str, llm: LLM, tmp_path: Path) -> None:
    """Found out by its tensors; its logits are those of the naive network, on three paths at once."""
    case = CASES[name]
    drafter = opened(llm, case, tmp_path)
    assert draft.detect(str(tmp_path)) == method_of(case)
    assert drafter.depth == STEPS and drafter.size(STEPS) == STEPS
    states, paths = torch.randn(3, HIDDEN), torch.randint(V, (3, STEPS)).tolist()
    state = drafter.begin(states)
    for i in range(STEPS):
        state, got = drafter.advance(i, state, [path[i] for path in paths])
        expected = torch.stack([case.logits(f, path[: i + 1]) for f, path in zip(states, paths)])
        assert expected.std() > 0.5
        assert torch.allclose(got.double(), expected, atol=1e-4), (
            f"step {i}: off by {(got - expected).abs().max():.1e}"
        )


def test_sharded_files_load_equal(llm: LLM, tmp_path: Path) -> None:
    case = ibm()
    case.write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names, where = sorted(case.stored), {}
    for shard, part in (
        ("model-00001-of-00002.safetensors", names[::2]),
        ("model-00002-of-00002.safetensors", names[1::2]),
    ):
        save_file({name: case.stored[name] for name in part}, tmp_path / shard)
        where |= dict.fromkeys(part, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    drafter = MlpSpeculator(MlpSpeculator.Options(model=str(tmp_path)), llm.engine.target)
    f = torch.randn(1, HIDDEN)
    _, got = drafter.advance(0, drafter.begin(f), [7])
    assert torch.allclose(got[0].double(), case.logits(f[0], [7]), atol=1e-4)


@pytest.mark.parametrize("name", ["ibm, tied", "lstm"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_networks_stay_near_the_full_one(
    quantization: str, name: str, llm: LLM, tmp_path: Path
) -> None:
    case = CASES[name]
    drafter = opened(llm, case, tmp_path, quantization=quantization)
    f = torch.randn(1, HIDDEN)
    _, got = drafter.advance(0, drafter.begin(f), [7])
    expected = case.logits(f[0], [7])
    error = float((got[0] - expected).std() / expected.std())
    assert 1e-4 < error < (0.03 if quantization == "int8" else 0.2)


# ---- drafts


def proposed(
    drafter: SpeculatorDrafter, states: Sequence[Tensor], rows: Sequence[Row], budgets: Sequence[Budget]
) -> list[DraftTree]:
    """Drafts for rows with these last states."""
    for row, f in zip(rows, states):
        drafter.last_states[row] = LastState(len(row.tokens) - 1, f[None])
    steps = [RowStep(row, len(row.tokens) - 1, 1, budget=budget) for row, budget in zip(rows, budgets)]
    trees = drafter.propose(Batch(steps)).trees
    for tree, budget in zip(trees, budgets):
        check_tree(tree, budget)
    return list(trees)


def row_at(temperature: float, last: int = 9, seed: int = 0) -> Row:
    distribution = DistributionParams(temperature=temperature)
    return make_row([3, 1, 4, last], 3, seed=seed, distribution=distribution)


def paths_of(tree: DraftTree) -> Iterator[tuple[int, ...]]:
    """The tokens that lead to each node, its own at the end."""
    known: dict[int, tuple[int, ...]] = {ROOT: ()}
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents)):
        known[i] = (*known[parent], token)
        yield known[i]


@pytest.mark.parametrize("name", ["ibm", "lstm"])
def test_a_greedy_chain_equals_the_reference(name: str, llm: LLM, tmp_path: Path) -> None:
    case, f = CASES[name], torch.randn(HIDDEN)
    drafter, output = opened(llm, case, tmp_path), [9]
    for _ in range(STEPS):
        output.append(int(case.logits(f, output).argmax()))
    for depth in range(1, STEPS + 1):
        (tree,) = proposed(drafter, [f], [row_at(0.0)], [Budget(depth, depth)])
        assert tree.tokens == output[1 : depth + 1] and tree.parents == list(range(-1, depth - 1))
        shares = [float(case.logits(f, output[: i + 1]).softmax(-1)[output[i + 1]]) for i in range(depth)]
        assert tree.confidence == pytest.approx(shares, rel=1e-3), (
            "the same steps, however many are asked for"
        )


def expected_tree(case: Case, f: Tensor, top_k: Sequence[int], kept: int, nodes: int) -> set[tuple[int, ...]]:
    """The whole product, its best paths, their best nodes; by hand."""
    joint: dict[tuple[int, ...], float] = {(): 0.0}
    for level, k in enumerate(top_k):
        for path in [path for path in joint if len(path) == level]:
            logs = case.logits(f, [9, *path]).log_softmax(-1)
            joint |= {(*path, int(i)): joint[path] + float(logs[i]) for i in logs.topk(k).indices}
    leaves = sorted((path for path in joint if len(path) == len(top_k)), key=lambda path: -joint[path])[:kept]
    inner = {path[:length] for path in leaves for length in range(1, len(path) + 1)}
    return set(sorted(inner, key=lambda path: -joint[path])[:nodes])


@pytest.mark.parametrize(
    ("kept", "nodes", "levels"), [(5, 60, 3), (24, 60, 3), (5, 8, 3), (3, 60, 2), (1, 60, 3)]
)
def test_a_greedy_tree_keeps_the_likeliest_paths(
    kept: int, nodes: int, levels: int, llm: LLM, tmp_path: Path
) -> None:
    """Three rows at once, one of them with less to spend."""
    case = CASES["ibm"]
    drafter = opened(llm, case, tmp_path, top_k_tokens_per_head=list(TOP_K), n_candidates=kept, nodes=nodes)
    assert drafter.size(levels) == min(
        nodes, sum(min(math.prod(TOP_K[: level + 1]), kept) for level in range(levels))
    )
    states, rows = list(torch.randn(3, HIDDEN)), [row_at(0.0) for _ in range(3)]
    budgets = [Budget(levels, drafter.size(levels)), Budget(2, 3), Budget(levels, drafter.size(levels))]
    for f, tree, budget in zip(states, proposed(drafter, states, rows, budgets), budgets):
        expected = expected_tree(case, f, TOP_K[: budget.depth], kept, min(nodes, budget.nodes))
        assert set(paths_of(tree)) == expected and len(tree.tokens) == len(expected)


def test_the_tree_of_the_checkpoint_config(llm: LLM, tmp_path: Path) -> None:
    drafter = opened(llm, CASES["ibm"], tmp_path, top_k_tokens_per_head="config")
    assert (drafter.top_k, drafter.candidates, drafter.nodes) == (TOP_K, KEPT, 7)
    assert opened(llm, CASES["ibm"], tmp_path).top_k == (1, 1, 1)


@pytest.mark.parametrize("name", ["ibm", "lstm, joined"])
def test_drafts_at_a_temperature_share_the_noise(name: str, llm: LLM, tmp_path: Path) -> None:
    """Children of a node are the best of its logits under the position's noise, in fixed places."""
    case, f, row = CASES[name], torch.randn(HIDDEN), row_at(0.7, seed=5)
    drafter = opened(llm, case, tmp_path, top_k_tokens_per_head=list(TOP_K), n_candidates=KEPT, nodes=60)
    (tree,) = proposed(drafter, [f], [row], [Budget(STEPS, 60)])
    paths = [(), *paths_of(tree)]
    assert sum(len(path) == STEPS for path in paths) == KEPT
    for path in (path for path in paths if len(path) < STEPS):
        children = [other[-1] for other in paths if other[:-1] == path and other]
        key = key_of(row.seed, row.index, len(row.tokens) + len(path))
        assert children == pick(case.logits(f, [9, *path]).float(), row.distribution, key, len(children))[0]


def test_sampled_drafts_carry_their_distributions(llm: LLM, tmp_path: Path) -> None:
    """q of a step given the path; siblings are drawn without replacement, in places that no token decides."""
    case, f = CASES["lstm"], torch.randn(HIDDEN)
    drafter = opened(llm, case, tmp_path, top_k_tokens_per_head=list(TOP_K), n_candidates=KEPT, nodes=60)
    drafter.target = replace(drafter.target, needs_probs=True)
    shapes, texts = set(), set()
    for seed in range(6):
        row = row_at(1.0, seed=seed)
        (tree,) = proposed(drafter, [f], [row], [Budget(STEPS, 60)])
        for node, path in enumerate(paths_of(tree)):
            expected = case.logits(f, [9, *path[:-1]]).softmax(-1)
            distribution = tree.distribution(node)
            assert distribution is not None and torch.allclose(distribution, expected, atol=1e-5)
        shapes.add(tuple(tree.parents))
        texts.add(tuple(tree.tokens))
    assert len(shapes) == 1 and len(texts) == 6
    (tree,) = proposed(drafter, [f], [row_at(0.0)], [Budget(STEPS, 60)])
    assert not tree.distributions, "a greedy row has nothing to sample"


def test_rows_that_get_no_drafts(llm: LLM, tmp_path: Path) -> None:
    """Rows with an unknown or old state, in prefill, or without a budget, beside one that drafts."""
    drafter, rows = opened(llm, CASES["ibm"], tmp_path), [row_at(0.0) for _ in range(5)]
    f = torch.randn(HIDDEN)
    for row, computed in zip(rows[1:], (1, 3, 3, 3)):
        drafter.last_states[row] = LastState(computed, f[None])
    batch = Batch([RowStep(row, 3, 1, budget=Budget(3, 3)) for row in rows])
    batch[2].start, batch[2].known, batch[3].budget = 2, 2, Budget()
    assert [len(tree.tokens) for tree in drafter.propose(batch).trees] == [0, 0, 0, 0, 3]
    drafter.forget(rows[4], "preempted")
    assert not any(tree.tokens for tree in drafter.propose(batch).trees)


# ---- what is refused


def without(case: Case, *names: str) -> Case:
    return replace(
        case, stored={name: tensor for name, tensor in case.stored.items() if not name.endswith(names)}
    )


def changed(case: Case, **tensors: Tensor) -> Case:
    return replace(
        case,
        stored={
            **case.stored,
            **{f"speculator.{name.replace('_', '.')}": tensor for name, tensor in tensors.items()},
        },
    )


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            changed(ibm(), proj_0_weight=torch.zeros(INNER, 32)),
            r"proj.0.weight is \(96, 32\), and \(96, 64\) is needed",
        ),
        (
            changed(ibm(), emb_1_weight=torch.zeros(300, INNER)),
            r"emb.1.weight is \(300, 96\), and \(512, 96\) is needed",
        ),
        (changed(ibm(), proj_1_weight=torch.zeros(32, INNER)), "adds proj.1 of 32 numbers to emb.1 of 96"),
        (
            changed(ibm(), head_2_weight=torch.zeros(V, INNER, dtype=torch.int8)),
            "head.2.weight of .* is torch.int8",
        ),
        (without(ibm(), "ln.2.weight", "ln.2.bias"), "has weights for 3 steps, but no ln.2"),
        (without(ibm(), "ln.2.bias"), "has no tensor 'ln.2.0.bias'"),
        (without(lstm(False), "output_proj.1.weight"), "has no tensor 'output_proj.1.weight'"),
        (without(lstm(False), "cell_emb.0.weight"), "has no tensor 'cell_emb.0.weight'"),
        (replace(once(ibm(True)), config={"tie_weights": True}), "n_predict does not say for how many: None"),
        (
            replace(rnn(False, True), config={**rnn(False, True).config, "method": "sum_gru"}),
            "method 'sum_gru'; only sum_rnn and sum_lstm",
        ),
        (replace(ibm(), config={"speculators_model_type": "mlp"}), "type 'mlp' of speculators 0.1"),
        (
            Case({"model_type": "mlp_speculator"}, {}, {"foo.weight": torch.zeros(2, 2)}),
            "no proj.0.0.weight or proj.0.weight among its 1 tensors, foo",
        ),
    ],
)
def test_damaged_files_are_refused_with_the_reason(
    case: Case, message: str, llm: LLM, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        opened(llm, case, tmp_path)
    assert draft.detect(str(tmp_path)) == method_of(case)


def test_a_truncated_file_is_refused(llm: LLM, tmp_path: Path) -> None:
    ibm().write(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt or truncated"):
        MlpSpeculator(MlpSpeculator.Options(model=str(tmp_path)), llm.engine.target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k_tokens_per_head": [4, 0, 2]}, r"whole numbers in 1 … 64, or \"config\", got \[4, 0, 2\]"),
        ({"top_k_tokens_per_head": 3}, "got 3"),
        ({"top_k_tokens_per_head": "model"}, "got 'model'"),
        ({"top_k_tokens_per_head": [64, 64, 2]}, "makes 12352 nodes, at most 1024"),
        ({"top_k_tokens_per_head": [4, 3]}, r"\[4, 3\] is for 2 steps, and .* has 3"),
        (
            {"top_k_tokens_per_head": [4, 3, 2], "n_candidates": 0},
            "n_candidates must be a whole number in 1 … 1024 or None, got 0",
        ),
        (
            {"top_k_tokens_per_head": [4, 3, 2], "nodes": True},
            "nodes must be a whole number in 1 … 1024 or None, got True",
        ),
        ({"nodes": 8}, "nodes = 8 has no effect without top_k_tokens_per_head"),
        ({"n_candidates": 8}, "n_candidates = 8 has no effect without"),
        ({"num_speculative_tokens": 4}, r"num_speculative_tokens 4 is more than the 3 steps \(n_predict\)"),
        ({"top_k_tokens": [1]}, "Did you mean 'top_k_tokens_per_head'"),
        ({"quantization": "int3"}, "int3"),
        ({"model": 3}, "model must be"),
    ],
)
def test_options_are_refused_with_the_reason(
    options: dict[str, Any], message: str, llm: LLM, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.use({"method": "mlp_speculator", "model": ibm().write(tmp_path), **options})


def test_an_lstm_is_for_a_method_of_its_own(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="head for another method: say 'lstm_speculator'"):
        llm.use({"method": "mlp_speculator", "model": lstm(True).write(tmp_path)})


def test_a_model_must_be_given(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="needs 'model'"):
        llm.use({"method": "mlp_speculator"})


# ---- in the engine, beyond what the exactness suite runs


@pytest.mark.parametrize("judge", ["match", "rejection", "block"])
def test_a_text_is_a_function_of_its_seed(judge: str, llm: LLM, tmp_path: Path) -> None:
    """A chain of the recurrent variant: each prompt alone, and all together."""
    llm.use({"model": lstm(True).write(tmp_path), "verification": judge})
    assert isinstance(llm.engine.drafter, SpeculatorDrafter)
    prompts = [{"prompt_token_ids": list(range(i, 3 * i + 4))} for i in range(5)]
    params = [
        SamplingParams(temperature=0.8 * (i != 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(5)
    ]
    alone = [llm.generate(prompt, one)[0].outputs[0] for prompt, one in zip(prompts, params)]
    together = [out.outputs[0] for out in llm.generate(prompts, params)]
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert all(out.speculation.drafted > 0 for out in together)
    llm.engine.check()
    assert not llm.engine.drafter.last_states


def test_every_example_is_of_its_targets_shape(llm: LLM) -> None:
    drafter = MlpSpeculator.example(llm.engine.target)
    assert isinstance(drafter, MlpSpeculator) and isinstance(drafter.head, Head)
    before = torch.get_rng_state()
    again = MlpSpeculator.example(llm.engine.target)
    assert torch.equal(torch.get_rng_state(), before)
    same = [
        torch.equal(a.head.raw(name), b.head.raw(name))
        for a, b in itertools.pairwise([drafter, again])
        for name in a.head
    ]
    assert all(same) and len(same) == 5 * STEPS
