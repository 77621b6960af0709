"""DFlare: published files load, blocks are those of a naive network, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import BLOCK, HIDDEN, KV, MASK, TAPS, WIDE, Case, D, naive, recorded_blocks, tensors, zlab
from torch import Tensor
from toys import V, acceptance, read, samples, save_head, teach, toy_target

from outrider import LLM, SamplingParams
from outrider.draft import detect
from outrider.draft.dflare import DFlare, Network
from outrider.errors import ModelError
from outrider.heads.layer import Sizes
from outrider.heads.sample import TargetWeights
from outrider.inspect.heads import head_card
from outrider.train.methods.dflash import DFlash as Trained


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=40)


def file() -> Case:
    """The published names and shapes."""
    w = tensors()
    del w["fc.weight"]
    w["layer_fusion_weights"] = torch.randn(2, len(TAPS))
    for i in range(2):
        for name in "kv":
            w[f"layers.{i}.self_attn.{name}_proj_target.weight"] = torch.randn(KV * D, HIDDEN) * 0.15
    return Case(zlab({"causal": False}, architectures=["DFlareQwen3Model"]), w)


def test_blocks_equal_a_naive_network(toy: LLM, tmp_path: Path) -> None:
    """In the engine: rows of different lengths side by side, chunks of prompts, full blocks and cut ones."""
    case = file()
    folder = save_head(tmp_path, case.config, case.tensors)
    assert detect(folder) == "dflare"
    card = head_card(folder)
    assert card is not None and card.refused is None
    assert (card.method, card.levels, card.hidden) == ("dflare", BLOCK - 1, HIDDEN)
    llm = toy.variant({"model": folder})
    drafter: Any = llm.engine.drafter
    prompts = [{"prompt_token_ids": [(7 * i + n) % V for i in range(n)]} for n in (3, 70, 20)]
    with recorded_blocks(drafter) as blocks:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    outer = TargetWeights.of(llm.engine.decoder)
    for known, logits, _ in random.Random(1).sample(blocks, 4):
        states = read(llm.engine.decoder, known[:-1], TAPS).states
        taps = torch.cat([states[tap] for tap in TAPS], dim=-1)
        expected = naive(case, outer, taps, known[-1], len(logits) + 1)
        assert torch.allclose(logits.to(WIDE), expected[1:], atol=5e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_fusion_weights": torch.zeros(2, 2)}, r"\(2, 2\), and \(2, 3\) is needed"),
        ({"layers.1.self_attn.v_proj_target.weight": None}, "v_proj_target"),
        ({"layers.1.self_attn.gate.weight": torch.zeros(2)}, "another kind of head"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    change: dict[str, Tensor | None], message: str, toy: LLM, tmp_path: Path
) -> None:
    case = file()
    stored = {name: tensor for name, tensor in {**case.tensors, **change}.items() if tensor is not None}
    with pytest.raises(ModelError, match=message):
        DFlare(DFlare.Options(model=save_head(tmp_path, case.config, stored)), toy.engine.target)


def test_a_file_fits_the_network_for_training() -> None:
    """Layers begin with one state each, from the first to the last."""
    network = Network(Sizes(HIDDEN, 96, 4, 2, 24), V, TAPS, MASK, layers=2, block=BLOCK)
    assert {name: tuple(t.shape) for name, t in network.state_dict().items()} == {
        name: tuple(t.shape) for name, t in file().tensors.items()
    }
    assert network.layer_fusion_weights.tolist() == [[2, 0, 0], [0, 2, 0]]


def test_a_taught_head_is_accepted_and_exported(toy: LLM, tmp_path: Path) -> None:
    """More often than a new one, with the text of plain decoding; the published names come back.

    A random token is right 1 time in V.
    """
    torch.manual_seed(2)
    network, found = Network.like(toy.engine.target, taps=TAPS, block=3, layers=1), list[float]()
    data, outer = samples(toy, TAPS), TargetWeights.of(toy.engine.decoder)
    target = str(toy.engine.target.checkpoint.name)
    for step in range(2):
        config, stored = Trained.export(network.config(), network.state_dict(), "z-lab")
        assert stored.keys() == network.state_dict().keys()
        folder = save_head(tmp_path / str(step), config, stored)
        assert detect(folder) == "dflare"
        found.append(acceptance(target, {"model": folder}))
        if not step:
            teach(network, network.loss, data, outer, steps=60, rate=6e-3)
    assert found[1] > 0.05 > found[0]
