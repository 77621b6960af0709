"""Block-parallel heads: published files load, and drafted blocks equal those of a naive float64 network."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import (
    BLOCK,
    IDS,
    MASK,
    TAPS,
    WIDE,
    BlockOutput,
    Case,
    naive,
    recorded_blocks,
    speculators,
    tensors,
    zlab,
)
from torch import Tensor
from toys import HIDDEN, V, acceptance, read, samples, save_head, teach, toy_target

from outrider import LLM, SamplingParams
from outrider.core.step import Batch
from outrider.draft import detect
from outrider.draft.dflash import DFlash, Network
from outrider.heads.sample import TargetWeights


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=40)


def part(w: dict[str, Tensor], offset: bool, t2d: bool) -> dict[str, Tensor]:
    """The same with a quarter of the vocabulary."""
    torch.manual_seed(9)
    ids = torch.tensor(IDS)
    more = {
        "lm_head.weight": torch.randn(len(IDS), HIDDEN) * 0.3,
        "d2t": ids - torch.arange(len(IDS)) if offset else ids,
    }
    return {
        **w,
        **more,
        **({"t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, ids, True)} if t2d else {}),
    }


def cases() -> dict[str, Case]:
    w, sliding = tensors(), {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    both = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    own = {
        "embed_tokens.weight": torch.randn(V, HIDDEN) * 0.1,
        "lm_head.weight": torch.randn(V, HIDDEN) * 0.3,
    }
    return {
        "speculators": Case(speculators(), {**w, "verifier_norm.weight": torch.ones(HIDDEN)}),
        "speculators, offsets": Case(speculators(draft_vocab_size=len(IDS)), part(w, True, True)),
        "speculators, ids": Case(speculators(), part(w, False, False), "pytorch_model.bin"),
        "speculators, window": Case(
            speculators(both, sliding_window_non_causal=False), w, windows=(5, 5), causal=(True, True)
        ),
        "speculators, window both ways": Case(
            speculators(sliding, sliding_window_non_causal=True), w, windows=(5, 0)
        ),
        "speculators, from the anchor": Case(speculators(sample_from_anchor=True), w),
        "z-lab": Case(zlab(), w, "pytorch_model.bin"),
        "z-lab, as vLLM has it": Case(zlab(), {f"model.{name}": tensor for name, tensor in w.items()}),
        "z-lab, window": Case(zlab(**sliding), w, windows=(5, 0), causal=(True, False)),
        "JetSpec": Case(zlab({"causal_head": True}), w, causal=(True, True)),
        "z-lab, one way": Case(zlab({"causal": True}), w, causal=(True, True)),
        "z-lab, MiMo's window": Case(
            zlab({"causal": False, "use_swa": True, "swa_window_size": 4}), w, windows=(4, 4)
        ),
        "its own ends, biases": Case(zlab(attention_bias=True), {**tensors(bias=True), **own}),
    }


def close(got: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(got.to(WIDE), expected, atol=2e-4))


def check(llm: LLM, case: Case, blocks: Sequence[BlockOutput]) -> None:
    """Each block against the naive one, on the states that the target has when it reads the text alone."""
    outer, from_anchor = TargetWeights.of(llm.engine.decoder), case.config.get("sample_from_anchor", False)
    for known, logits, _ in blocks:
        states = read(llm.engine.decoder, known[:-1], TAPS).states
        count = len(logits) + (not from_anchor)
        expected = naive(case, outer, torch.cat([states[tap] for tap in TAPS], dim=-1), known[-1], count)
        assert close(logits, expected if from_anchor else expected[1:])


@pytest.mark.parametrize("layout", cases())
def test_logits_of_every_layout_equal_a_naive_block(layout: str, toy: LLM, tmp_path: Path) -> None:
    """In the engine: prompts in chunks, rows of different lengths side by side, full blocks and cut ones."""
    case = cases()[layout]
    folder = save_head(tmp_path, case.config, case.tensors, case.file)
    assert detect(folder) == "dflash"
    llm = toy.variant({"model": folder})
    drafter: DFlash = llm.engine.drafter  # type: ignore[assignment]
    assert drafter.depth == BLOCK - (not case.config.get("sample_from_anchor", False))
    prompts = [{"prompt_token_ids": [(7 * i + n) % V for i in range(n)]} for n in (3, 70, 20)]
    with recorded_blocks(drafter) as blocks:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert {len(emitted.logits) for emitted in blocks} >= {1, drafter.depth}
    check(
        llm,
        case,
        random.Random(1).sample(blocks, 3) + [emitted for emitted in blocks if len(emitted.known) > 71][:1],
    )


def test_blocks_behind_a_prefix_hit(toy: LLM, tmp_path: Path) -> None:
    """A prompt that is cached but for its last token is drafted for as soon as one token is emitted."""
    case = cases()["speculators"]
    llm = toy.variant({"model": save_head(tmp_path, case.config, case.tensors)})
    prompt = {"prompt_token_ids": [(11 * i) % V for i in range(33)]}
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    with recorded_blocks(llm.engine.drafter) as blocks:  # type: ignore[arg-type]
        again = llm.generate(prompt, params)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert len(blocks[0].known) == 34
    check(llm, case, blocks[:1])


def test_pages_of_a_request_that_ends_at_once_have_context(toy: LLM, tmp_path: Path) -> None:
    """What they share is what the head has read."""
    case = cases()["speculators"]
    llm = toy.variant({"model": save_head(tmp_path, case.config, case.tensors)})
    prompt = {"prompt_token_ids": [(11 * i) % V for i in range(33)]}
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    with recorded_blocks(llm.engine.drafter) as blocks:  # type: ignore[arg-type]
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    check(llm, case, blocks[:2])


def test_a_row_drafts_on_after_an_interrupted_step(
    toy: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row keeps the tokens of that step without states; pages with them are not shared."""
    case = cases()["speculators"]
    params, prompt = (
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        {"prompt_token_ids": [5, 9, 77]},
    )
    plain = toy.variant(None).generate(prompt, params)[0].outputs[0].token_ids
    llm = toy.variant({"model": save_head(tmp_path, case.config, case.tensors)})
    drafter: DFlash = llm.engine.drafter  # type: ignore[assignment]
    stream = llm.stream(prompt, params)
    for _ in range(3):
        last = next(stream)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "observe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    gap = len(last.prompt_token_ids) + len(last.outputs[0].token_ids) - 1
    with recorded_blocks(drafter) as blocks:
        for last in stream:  # noqa: B007 - the last one is looked at
            pass
    assert last.outputs[0].token_ids == plain
    assert len(blocks) > 3 and all(bool(logits.isfinite().all()) for _, logits, _ in blocks)
    again = llm.generate({"prompt_token_ids": last.prompt_token_ids + last.outputs[0].token_ids}, params)[0]
    assert (again.num_cached_tokens or 0) <= gap


# ---- what a taught head does


@pytest.fixture(scope="module")
def taught(toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(4)
    network, outer = (
        Network.like(toy.engine.target, layers=1, block=3, mask=MASK),
        TargetWeights.of(toy.engine.decoder),
    )
    teach(network, network.loss, samples(toy, network.taps), outer, steps=40, rate=6e-3)
    return save_head(tmp_path_factory.mktemp("taught"), network.config(), network.state_dict())


@pytest.mark.parametrize("nodes", [None, 6])
def test_a_trained_head_is_often_right(nodes: int | None, toy: LLM, taught: str) -> None:
    """A random token is right 1 time in V; a tree has nodes beside the best one."""
    assert acceptance(toy.engine.checkpoint.name, {"model": taught, "nodes": nodes}) > (
        0.05 if nodes is None else 0.03
    )


def test_a_shift_by_one_is_detected(toy: LLM, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that begin one token too early repeat known tokens; the naive blocks check the taps."""
    right, block_logits = acceptance(toy.engine.checkpoint.name, {"model": taught}), DFlash.block_logits
    monkeypatch.setattr(
        DFlash,
        "block_logits",
        lambda self, batch, *rest: block_logits(
            self, Batch([replace(step, start=step.start - 1) for step in batch]), *rest
        ),
    )
    assert acceptance(toy.engine.checkpoint.name, {"model": taught}) < right / 1.5


def test_sampled_chains_and_trees_carry_their_distributions(toy: LLM, taught: str) -> None:
    """q of a level is the same at all its nodes, and every sampled token is possible under it."""
    for config, rule in (({"nodes": 7}, "traversal"), ({}, "block")):
        llm = toy.variant({"model": taught, "verification": rule, **config})
        trees, verify = [], llm.engine.verify

        def listening(batch: Batch, output: Any, verify: Any = verify, trees: Any = trees) -> Any:
            trees.extend(step.tree for step in batch)
            return verify(batch, output)

        llm.engine.verify = listening
        llm.generate(
            {"prompt_token_ids": [5, 9, 77]},
            SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
        )
        full = [tree for tree in trees if len(tree.tokens) > 1]
        assert full and all(len(tree.distributions) == len(set(tree.probs_of)) <= 2 for tree in full)
        for tree in full:
            assert all(
                float(tree.distributions[distribution][token]) > 0
                for token, distribution in zip(tree.tokens, tree.probs_of)
            )
            assert not config or any(parent != i - 1 for i, parent in enumerate(tree.parents))
