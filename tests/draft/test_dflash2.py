"""DFlash 2: published files load, blocks and choices are those of a naive network, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import BLOCK, HIDDEN, MASK, TAPS, WIDE, Case, drafted, naive, recorded_blocks, tensors, zlab
from torch import Tensor
from toys import V, acceptance, read, samples, save_head, teach, toy_target

from outrider import LLM, SamplingParams
from outrider.draft import detect
from outrider.draft.dflash import DFlash
from outrider.draft.dflash2 import DFlash2, Network, convolve, earlier_rows
from outrider.errors import ModelError
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights
from outrider.inspect.heads import head_card
from outrider.train.methods.dflash import DFlash as Trained

RANK, TOP_K, GROUP = 6, 5, 16


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=40)


def file(taps: int = 2, **own: Any) -> Case:
    """The published names, shapes and keys; block_size is in dflash_config."""
    w, kernel_rows = tensors(), 2 * taps * (HIDDEN // GROUP)
    for i in range(2):
        for part in ("attention", "mlp"):
            name = f"layers.{i}.{part}_conv"
            w[f"{name}.base_kernel"] = torch.randn(2, taps, HIDDEN) * 0.3 + 0.5
            w[f"{name}.kernel_projection.weight"] = torch.randn(kernel_rows, HIDDEN) * 0.1
    w["candidate_selector.hidden_projection.weight"] = torch.randn(RANK, HIDDEN) * 0.3
    for name in ("predecessor", "successor"):
        w[f"candidate_selector.{name}_codebook"] = torch.randn(V, RANK)
    given = {
        "block_size": BLOCK,
        "conv_kernel_size": taps,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
        **own,
    }
    config = zlab(given, architectures=["DFlash2DraftModel"], is_causal=False)
    del config["block_size"]
    return Case(config, w)


def chosen(case: Case, logits: Tensor, states: Tensor, token: int) -> list[int]:
    """The walk through the candidates of every place; logits [levels, V] and states [levels, h]."""
    w = {name: tensor.to(WIDE) for name, tensor in case.tensors.items()}
    found = list[int]()
    for row, x in zip(logits.to(WIDE), states.to(WIDE)):
        gate = w["candidate_selector.hidden_projection.weight"] @ x
        before = w["candidate_selector.predecessor_codebook"][token] * gate
        scores = {
            int(other): float(row[other] + before @ w["candidate_selector.successor_codebook"][other])
            for other in row.topk(TOP_K).indices
        }
        token = max(scores, key=lambda other: scores[other])
        found.append(token)
    return found


@pytest.mark.parametrize("taps", [2, 3])
def test_blocks_and_choices_equal_a_naive_network(taps: int, toy: LLM, tmp_path: Path) -> None:
    """In the engine: rows of different lengths side by side, chunks of prompts, full blocks and cut ones."""
    case = file(taps)
    folder = save_head(tmp_path, case.config, case.tensors)
    assert detect(folder) == "dflash2"
    card = head_card(folder)
    assert card is not None and (card.method, card.levels, card.refused) == ("dflash2", BLOCK - 1, None)
    llm = toy.variant({"model": folder})
    drafter: Any = llm.engine.drafter
    prompts = [{"prompt_token_ids": [(7 * i + n) % V for i in range(n)]} for n in (3, 70, 20)]
    with recorded_blocks(drafter) as blocks:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert {len(emitted.logits) for emitted in blocks} >= {1, BLOCK - 1}
    outer = TargetWeights.of(llm.engine.decoder)
    for known, logits, _ in random.Random(1).sample(blocks, 4):
        states = read(llm.engine.decoder, known[:-1], TAPS).states
        side_by_side = torch.cat([states[tap] for tap in TAPS], dim=-1)
        expected = naive(case, outer, side_by_side, known[-1], len(logits) + 1)
        assert torch.allclose(logits.to(WIDE), expected[1:], atol=5e-4)
    trees = drafted(llm)
    for block, tree in trees:
        walk = chosen(case, block.logits, block.states[1:], block.known[-1])
        assert tree.tokens == walk[: len(tree.tokens)]
    likeliest = [block.logits.argmax(-1).tolist() for block, _ in trees]
    assert likeliest != [tree.tokens for _, tree in trees], "the selector changes nothing here"


def test_samples_come_from_the_candidates_alone(toy: LLM, tmp_path: Path) -> None:
    case = file()
    folder = save_head(tmp_path, case.config, case.tensors)
    llm = toy.variant({"model": folder, "verification": "rejection"})
    trees = drafted(llm, temperature=1.0)
    assert len(trees) > 8
    for block, tree in trees:
        for node, (logits, token) in enumerate(zip(block.logits, tree.tokens)):
            q = tree.distribution(node)
            assert q is not None and token in logits.topk(TOP_K).indices
            assert q.nonzero().flatten().tolist() == sorted(logits.topk(TOP_K).indices.tolist())


@pytest.mark.parametrize(
    "more", [{"temperature": 0.0}, {"temperature": 1.0, "verification": "rejection"}], ids=str
)
def test_padding_of_its_lm_head_is_no_candidate(more: dict[str, Any], toy: LLM, tmp_path: Path) -> None:
    """Rows beyond the vocabulary have the highest logits, and no row in the codebooks."""
    case, found = file(), []
    params = {"temperature": more["temperature"], "seed": 1}
    rule = {name: value for name, value in more.items() if name == "verification"}
    rows = torch.randn(V, HIDDEN) * 0.3
    for padding in (torch.zeros(0, HIDDEN), torch.randn(64, HIDDEN) * 50):
        stored = {**case.tensors, "lm_head.weight": torch.cat([rows, padding])}
        folder = save_head(tmp_path / str(len(padding)), case.config, stored)
        trees = drafted(toy.variant({"model": folder, **rule}), **params)
        assert {block.logits.shape[1] for block, _ in trees} == {V + len(padding)}
        found.append([tree.tokens for _, tree in trees])
    assert found[0] == found[1] and len(found[0]) > 4


def test_rows_before_the_first_of_a_block_are_zero() -> None:
    x, ones = torch.arange(10.0).view(5, 2), torch.ones(3, 5, 2)
    mixed = convolve(x, ones, earlier_rows([3, 2], 3))
    assert mixed.tolist() == [[0, 1], [2, 4], [6, 9], [6, 7], [14, 16]]


def test_a_file_fits_the_network_for_training() -> None:
    """A new network is the plain block: convolutions are the identity, the selector adds 0."""
    torch.manual_seed(1)
    case = file()
    sizes = Sizes(HIDDEN, 96, 4, 2, 24)
    network = Network(sizes, V, TAPS, MASK, layers=2, block=BLOCK, rank=RANK)
    assert {name: tuple(t.shape) for name, t in network.state_dict().items()} == {
        name: tuple(t.shape) for name, t in case.tensors.items()
    }
    x = torch.randn(2 * BLOCK, HIDDEN)
    for conv in (network.layers[0].attention_conv, network.layers[1].mlp_conv):
        before, after = conv(x)
        assert torch.equal(convolve(x, before, earlier_rows([BLOCK] * 2, 2)), x)
        assert torch.equal(convolve(x, after, earlier_rows([BLOCK] * 2, 2)), x)
    assert not network.candidate_selector(torch.tensor([1, 2]), x[:2]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_selector.successor_codebook": None}, "selector.after|successor_codebook"),
        (
            {"candidate_selector.predecessor_codebook": torch.zeros(V - 40, RANK)},
            "its selector has 472 tokens",
        ),
        ({"layers.1.mlp_conv.base_kernel": torch.zeros(2, HIDDEN)}, "base_kernel"),
        ({"layers.1.mlp_conv.kernel_projection.weight": torch.zeros(4, HIDDEN)}, "kernel_projection"),
        (
            {
                "layers.1.mlp_conv.base_kernel": torch.zeros(2, 0, HIDDEN),
                "layers.1.mlp_conv.kernel_projection.weight": torch.zeros(0, HIDDEN),
            },
            "base_kernel",
        ),
        ({"candidate_selector.predecessor_codebook": torch.zeros(V)}, "predecessor_codebook is .*matrix"),
        ({"candidate_selector.successor_codebook": torch.zeros(V)}, "successor_codebook"),
        ({"candidate_selector.hidden_projection.weight": torch.zeros(RANK)}, "hidden_projection"),
        ({"d2t": torch.zeros(V, dtype=torch.int64)}, "vocabulary of its own"),
        ({"layers.0.mlp_conv.gate.weight": torch.zeros(2)}, "another kind of head"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    change: dict[str, Tensor | None], message: str, toy: LLM, tmp_path: Path
) -> None:
    case = file()
    stored = {name: tensor for name, tensor in {**case.tensors, **change}.items() if tensor is not None}
    folder = save_head(tmp_path, case.config, stored)
    with pytest.raises(ModelError, match=message):
        DFlash2(DFlash2.Options(model=folder), toy.engine.target)


@pytest.mark.parametrize("group", [24, 4 * HIDDEN])
def test_groups_that_do_not_divide_the_columns_are_refused(group: int, toy: LLM, tmp_path: Path) -> None:
    """Also if the projections have the rows for the groups that fit."""
    case = file(conv_group_size=group)
    for name in case.tensors:
        if name.endswith("kernel_projection.weight"):
            case.tensors[name] = torch.zeros(2 * 2 * (HIDDEN // group), HIDDEN)
    folder = save_head(tmp_path, case.config, case.tensors)
    with pytest.raises(ModelError, match=f"conv_group_size is {group}.* {HIDDEN} columns"):
        DFlash2(DFlash2.Options(model=folder), toy.engine.target)


def test_numbers_of_the_config_are_checked(toy: LLM, tmp_path: Path) -> None:
    case = file(selector_top_k=0)
    folder = save_head(tmp_path, case.config, case.tensors)
    with pytest.raises(ModelError, match="selector_top_k"):
        DFlash2(DFlash2.Options(model=folder), toy.engine.target)
    with pytest.raises(ModelError, match="say 'dflash2'"):
        DFlash(DFlash.Options(model=folder), toy.engine.target)


def test_a_taught_head_is_accepted_and_exported(toy: LLM, tmp_path: Path) -> None:
    """More often than a new one, with the text of plain decoding; the published names come back.

    A random token is right 1 time in V.
    """
    torch.manual_seed(2)
    network, found = Network.like(toy.engine.target, taps=TAPS, block=3, layers=1, rank=16), list[float]()
    data, outer = samples(toy, TAPS), TargetWeights.of(toy.engine.decoder)
    target = str(toy.engine.target.checkpoint.name)
    for step in range(2):
        config, stored = Trained.export(network.config(), network.state_dict(), "z-lab")
        assert stored.keys() == network.state_dict().keys() and "block_size" in config["dflash_config"]
        folder = save_head(tmp_path / str(step), config, stored)
        assert detect(folder) == "dflash2"
        found.append(acceptance(target, {"model": folder}))
        if not step:
            teach(network, network.loss, data, outer, steps=60, rate=6e-3)
    assert found[1] > 0.05 > found[0]
