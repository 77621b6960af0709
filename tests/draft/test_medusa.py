"""Medusa's published files load and equal naive float64 heads; invalid ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_heads import (
    CONFIG,
    PT,
    SAFE,
    Named,
    Parts,
    drafter_of,
    listened,
    naive,
    parts_of,
    reference,
    save_merged,
    vllm,
    without,
)
from toys import HIDDEN, V, save_head

from outrider import LLM, SamplingParams
from outrider.checkpoints.heads import Head
from outrider.config import SpeculativeOptions
from outrider.draft import detect
from outrider.draft.medusa import Medusa, Network
from outrider.errors import ConfigError, ModelError
from outrider.heads.sample import TargetWeights
from outrider.train.methods.medusa import Medusa as Trained


def dropped(named: Named) -> Named:
    """Without the second and third name of a block."""
    return {
        name: tensor for name, tensor in named.items() if ".1.linear" not in name and ".2.linear" not in name
    }


MAP = torch.arange(3, V, 4)  # 128 of the tokens
VLLM = {
    "model_type": "medusa",
    "hidden_size": HIDDEN,
    "vocab_size": V,
    "num_heads": 3,
    "num_hidden_layers": 1,
    "truncated_vocab_size": V,
}
FILES: dict[str, tuple[Parts, Callable[[Parts], Named], dict[str, Any], str]] = {
    "v0.1": (parts_of(5), reference, CONFIG, PT),
    "v0.1, three shared blocks": (parts_of(2, 3), reference, CONFIG, PT),
    "v0.1, blocks of their own": (parts_of(2, 3, shared=False), reference, CONFIG, PT),
    "v0.1, aliases dropped": (parts_of(2, 3), lambda p: dropped(reference(p)), {}, SAFE),
    "TGI V1": (parts_of(3), reference, CONFIG, SAFE),
    "TGI V2": (parts_of(3, own=False), reference, CONFIG, SAFE),
    "version 2, two blocks": (parts_of(3, 2, own=False), reference, {"version": "2"}, "medusa_lm_head.pt"),
    "version 2, aliases dropped": (
        parts_of(3, 2, own=False),
        lambda p: dropped(reference(p)),
        {"medusa_num_layers": 2},
        PT,
    ),
    "vLLM": (parts_of(3, bias=False), vllm, VLLM, "model.safetensors"),
    "vLLM, prefix and biases": (
        parts_of(3, 2, shared=False),
        lambda p: vllm(p, "medusa_heads."),
        VLLM,
        "pytorch_model.bin",
    ),
}


@pytest.mark.parametrize("layout", FILES)
def test_every_layout_is_the_same_network(layout: str, toy: LLM, tmp_path: Path) -> None:
    parts, names, config, file = FILES[layout]
    folder = save_head(tmp_path, config, names(parts), file)
    assert detect(folder) == "medusa"
    drafter = drafter_of(toy, folder)
    assert drafter.depth == len(parts), "the tensors count the heads, whatever the config says"
    states = torch.randn(5, HIDDEN)
    expected = naive(parts, states, TargetWeights.of(toy.engine.decoder).lm_head)
    assert torch.allclose(drafter.heads(states, len(parts)).double(), expected, atol=1e-3)
    assert torch.allclose(drafter.heads(states[:1], 2).double(), expected[:1, :2], atol=1e-3)


def test_a_block_under_many_names_is_kept_once(toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "a", CONFIG, reference(parts_of(2, 3)), PT)
    once = 2 * (HIDDEN * HIDDEN + HIDDEN + V * HIDDEN) * 4
    assert once < (tmp_path / "a" / PT).stat().st_size < once * 1.1, "the file has aliases"
    for blocks in drafter_of(toy, folder).heads.blocks:
        assert blocks[0] is blocks[1] is blocks[2]
    copied = save_head(
        tmp_path / "b", CONFIG, reference(parts_of(2, 3)), SAFE
    )  # the same numbers, three times
    assert all(blocks[0] is blocks[2] for blocks in drafter_of(toy, copied).heads.blocks)
    apart = save_head(tmp_path / "c", CONFIG, reference(parts_of(2, 3, shared=False)), PT)
    assert all(len({id(block) for block in blocks}) == 3 for blocks in drafter_of(toy, apart).heads.blocks)


@pytest.mark.parametrize("rows", ["of the map", "of all tokens"])
@pytest.mark.parametrize("one", [False, True])
def test_a_part_of_the_vocabulary(rows: str, one: bool, toy: LLM, tmp_path: Path) -> None:
    """vLLM's token_map, with heads of their own, or one for all; the file may hold the rows of all tokens."""
    parts = parts_of(3)
    parts = [(blocks, parts[0][1] if one else lm_head) for blocks, lm_head in parts]
    named = {
        name: tensor[MAP] if "lm_head" in name and rows == "of the map" else tensor
        for name, tensor in vllm(parts).items()
    }
    named = without(named, "lm_heads.1.weight", "lm_heads.2.weight") if one else named
    config = {**VLLM, "truncated_vocab_size": len(MAP), "original_lm_head": one}
    drafter = drafter_of(toy, save_head(tmp_path, config, {**named, "token_map": MAP}))
    states = torch.randn(4, HIDDEN)
    got = drafter.heads(states, 3)
    assert drafter.heads.ids is not None and drafter.heads.ids.tolist() == MAP.tolist()
    assert torch.allclose(got.double(), naive(parts, states)[..., MAP], atol=1e-3)
    llm = toy.variant({"model": str(tmp_path), "tree": "chain"})
    drafted = [token for _, tree in listened(llm, [1, 2, 3]) for token in tree.tokens]
    assert drafted and set(drafted) <= set(MAP.tolist())


def test_a_scale_of_the_logits(toy: LLM, tmp_path: Path) -> None:
    parts, states = parts_of(2), torch.randn(3, HIDDEN)
    drafter = drafter_of(toy, save_head(tmp_path, {**VLLM, "logit_scale": 0.5}, vllm(parts)))
    assert torch.allclose(drafter.heads(states, 2).double(), 0.5 * naive(parts, states), atol=1e-3)


def test_int8_heads_stay_near_the_full_ones(toy: LLM, tmp_path: Path) -> None:
    parts, states = parts_of(2), torch.randn(8, HIDDEN)
    drafter = drafter_of(toy, save_head(tmp_path, CONFIG, reference(parts), PT), quantization="int8")
    expected = naive(parts, states)
    error = (drafter.heads(states, 2).double() - expected).pow(2).mean().sqrt() / expected.std()
    assert 1e-5 < float(error) < 0.03


def test_a_merged_checkpoint_is_target_and_heads(toy: LLM, tmp_path: Path) -> None:
    parts = parts_of(4)
    folder = save_merged(tmp_path, toy.engine.options.model, parts)
    assert detect(folder) == "medusa"
    llm = LLM(folder, dtype="float32", speculative_config={"model": folder})
    states = torch.randn(3, HIDDEN)
    drafter: Any = llm.engine.drafter
    assert torch.allclose(drafter.heads(states, 4).double(), naive(parts, states), atol=1e-3)
    prompt, params = (
        {"prompt_token_ids": [9, 8, 7]},
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    )
    assert (
        llm.generate(prompt, params)[0].outputs[0].token_ids
        == toy.generate(prompt, params)[0].outputs[0].token_ids
    )


@pytest.mark.parametrize(
    ("heads", "hidden", "vocabulary", "blocks", "size"),
    [(5, 4096, 32000, 1, 1_478_533_120), (2, 5120, 32000, 2, 760_238_080), (3, 4096, 32000, 1, 887_119_872)],
)
def test_the_network_has_the_size_of_published_files(
    heads: int, hidden: int, vocabulary: int, blocks: int, size: int
) -> None:
    """Sizes of vicuna-7b-v1.3 (1.48 GB), apar-13b (760,282,446, pickled) and medusa_test (887,123,735)."""
    with torch.device("meta"):
        network = Network(hidden, vocabulary, heads, blocks)
    assert 2 * sum(parameter.numel() for parameter in network.parameters()) == size
    assert len(network.state_dict()) == heads * (2 * blocks + 1), "aliases and all"


# ---- writing


@pytest.mark.parametrize("layout", ["reference", "vllm"])
@pytest.mark.parametrize("file", ["v0.1", "v0.1, three shared blocks"])
def test_what_is_written_is_read_back(layout: str, file: str, toy: LLM, tmp_path: Path) -> None:
    parts, names, config, _ = FILES[file]
    config, tensors = Trained.export(config, names(parts), layout)
    json.dumps(config)
    assert set(tensors) == set((reference if layout == "reference" else vllm)(parts))
    if layout == "vllm":
        assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (
            len(parts),
            len(parts[0][0]),
            True,
        )
        assert (config["vocab_size"], config["hidden_size"]) == (V, HIDDEN)
    states = torch.randn(3, HIDDEN)
    drafter = drafter_of(toy, save_head(tmp_path, config, tensors))
    assert torch.allclose(drafter.heads(states, len(parts)).double(), naive(parts, states), atol=1e-3)


def test_what_vllm_would_not_read_is_not_written() -> None:
    with pytest.raises(ConfigError, match="lm_head"):
        Trained.export({}, reference(parts_of(2, own=False)), "vllm")
    with pytest.raises(ConfigError, match="sglang"):
        Trained.export({}, reference(parts_of(2)), "sglang")


# ---- what is refused


def test_targets_of_other_shapes(checkpoint: Callable[..., Path]) -> None:
    """Two layers, tied, and one that transformers runs; heads that ask the target's own head."""
    for given in ({}, {"tie_word_embeddings": True}, {"family": "Phi"}):
        llm = LLM(str(checkpoint(**given)), dtype="float32")
        plain = (
            llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=12))[0]
            .outputs[0]
            .token_ids
        )
        parts = parts_of(2, own=False)
        drafter = Medusa(Medusa.Options(nodes=12), llm.engine.target, Head.of("two", {}, reference(parts)))
        states = torch.randn(3, HIDDEN)
        expected = naive(parts, states, TargetWeights.of(llm.engine.decoder).lm_head)
        if given.get("family") is None:  # Phi's head has a bias
            assert torch.allclose(drafter.heads(states, 2).double(), expected, atol=1e-3)
        twin = llm.variant(None)
        twin.engine.use(drafter, SpeculativeOptions.of({"method": "medusa"}))
        out = twin.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=12))[
            0
        ].outputs[0]
        assert out.token_ids == plain and out.speculation.drafted > 0


def test_heads_for_another_target_are_refused(toy: LLM, tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide = {
        "0.0.linear.weight": torch.randn(96, 96),
        "0.0.linear.bias": torch.randn(96),
        "0.1.weight": torch.randn(V, 96),
    }
    with pytest.raises(ModelError, match=r"\(96, 96\).*\(64, 64\)"):
        drafter_of(toy, save_head(tmp_path / "a", CONFIG, wide, PT))
    fewer = {**reference(parts_of(2)), "1.1.weight": torch.randn(500, HIDDEN)}
    with pytest.raises(ModelError, match=r"\(500, 64\).*\(512, 64\)"):
        drafter_of(toy, save_head(tmp_path / "b", CONFIG, fewer, PT))


@pytest.mark.parametrize("name", ["1.2.weight", "1.1.linear.weight", "0.0.linear.bias", "0.0.linear.weight"])
def test_a_missing_tensor_is_named(name: str, toy: LLM, tmp_path: Path) -> None:
    named = without(reference(parts_of(2, 2, shared=False)), name)
    output = {"1.2.weight": "1.lm_head.weight"}.get(name, name)
    with pytest.raises(ModelError, match=output.replace(".", r"\.")):
        drafter_of(toy, save_head(tmp_path, CONFIG, named, PT))


def test_contradictory_files_are_refused_by_name(toy: LLM, tmp_path: Path) -> None:
    whole = reference(parts_of(2))
    cases: list[tuple[str, dict[str, Any], Named]] = [
        ("int8", {}, {**whole, "0.0.linear.weight": torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)}),
        ("number 1, 2", {}, {**without(whole, "1.1.weight"), "1.2.weight": torch.zeros(V, HIDDEN)}),
        (r"there is no {i}\.{j}\.linear", {"medusa_num_heads": 3}, {"something.weight": torch.zeros(2)}),
        ("token_map", VLLM, {**vllm(parts_of(2)), "token_map": torch.tensor([1.0, 2.0])}),
        (r"2 tokens in 3 … 512.*512", VLLM, {**vllm(parts_of(2)), "token_map": torch.tensor([3, 512])}),
        ("named once", VLLM, {**vllm(parts_of(2)), "token_map": torch.tensor([3, 3])}),
    ]
    for i, (message, config, named) in enumerate(cases):
        with pytest.raises(ModelError, match=message):
            drafter_of(toy, save_head(tmp_path / str(i), config, named, PT))


@pytest.mark.parametrize("file", [SAFE, PT])
def test_a_truncated_file_is_refused(file: str, toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, CONFIG, reference(parts_of(2)), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt"):
        drafter_of(toy, folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "chains"}, "Did you mean 'chain'"),
        ({"tree": "vicuna_7b_stage3"}, "Did you mean 'vicuna_7b_stage"),
        ({"tree": [[0], [1, 0]]}, r"\[1, 0\] and not \[1\]"),
        ({"tree": [[0], [2]]}, r"\[2\] and not \[1\]"),
        ({"tree": []}, "list of paths"),
        ({"tree": [[0], [64]]}, "0 … 63"),
        ({"tree": 7}, "list of paths"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"nodes": 4, "tree": "chain"}, "no effect"),
        ({"quantization": "int3"}, "int8"),
        ({"model": 3}, "model"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Medusa.Options(**options)


def test_more_levels_than_heads_are_refused(toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, CONFIG, reference(parts_of(3)), PT)
    with pytest.raises(ConfigError, match=r"4.*3 heads"):
        toy.variant({"model": folder, "num_speculative_tokens": 4})
    with pytest.raises(ConfigError, match=r"4.*3 heads"):
        drafter_of(toy, folder, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])
    with pytest.raises(ConfigError, match="judges chains"):
        toy.variant({"model": folder, "verification": "block"})
    toy.variant({"model": folder, "verification": "block", "tree": "chain"})
    with pytest.raises(ConfigError, match="model"):
        toy.variant({"method": "medusa"})
