"""Block-parallel heads: which files are refused, how their numbers are read, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import BLOCK, HIDDEN, MASK, TAPS, V, dspark, speculators, tensors, zlab
from torch import Tensor
from toys import save_head

from outrider import LLM
from outrider.checkpoints.heads import Head
from outrider.draft import detect, method
from outrider.draft.dflash import DFlash, Network
from outrider.errors import ConfigError, ModelError
from outrider.heads.block_layouts import BlockLayout, spread
from outrider.heads.blocks import BlockDrafter
from outrider.heads.layer import Sizes


def opened(
    toy: LLM, tmp_path: Path, config: dict[str, Any], w: dict[str, Tensor], **options: Any
) -> BlockDrafter:
    """With the method that the file is for."""
    folder = save_head(tmp_path / "head", config, w)
    drafter = method(detect(folder))
    assert issubclass(drafter, BlockDrafter)
    return drafter(drafter.Options(model=folder, **options), toy.engine.target)


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("config", "w", "message"),
    [
        (speculators(), without("layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight"),
        (
            speculators(),
            {**tensors(), "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)},
            r"\(64, 128\), and \(64, 192\) is needed",
        ),
        (
            speculators(),
            {**tensors(), "fc.weight": torch.zeros(48, 192)},
            "a width of 48, and the target embeds in 64",
        ),
        (speculators(), {**tensors(), "norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}, "int32"),
        (
            speculators(),
            {**tensors(), "markov_head.lag_transforms.0.weight": torch.zeros(V, 4)},
            "DSpark with another table.*lag_transforms",
        ),
        (
            zlab({"projector_type": "domino"}),
            {
                **tensors(),
                "embed_proj.0.weight": torch.zeros(8, 96),
                "prefix_gru.weight_ih_l0": torch.zeros(96, HIDDEN),
                "prefix_gru.weight_ih_l1": torch.zeros(96, HIDDEN),
            },
            "Domino with other layers.*weight_ih_l1",
        ),
        (speculators(), {**tensors(), "markov_w1.weight": torch.zeros(V, 4)}, "markov_w2"),
        (speculators(), {**tensors(), "something.weight": torch.zeros(4)}, "something.weight"),
        (speculators(aux_hidden_state_layer_ids=[2, 4, 9]), tensors(), r"\[2, 4, 9\]; the target has 0 … 8"),
        (speculators(mask_token_id=V), tensors(), "mask_token_id is 512, of 512"),
        (speculators(mask_token_id=None), tensors(), "mask_token_id .* whole number"),
        (speculators(block_size="8"), tensors(), "block_size .* whole number"),
        (zlab({"shift_label": "false"}), tensors(), "shift_label .* True or False"),
        (speculators(block_size=1), tensors(), "drafts nothing"),
        (speculators({"layer_types": ["sliding_attention"] * 2}), tensors(), "sliding_window"),
        (speculators({"hidden_act": "gelu"}), tensors(), "silu"),
        (speculators({"head_dim": 7}), tensors(), "no heads of head_dim 7"),
    ],
)
def test_contradictory_files_are_refused(
    config: dict[str, Any], w: dict[str, Tensor], message: str, toy: LLM, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        opened(toy, tmp_path, config, w)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(file: str, toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, zlab(), tensors(), file)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes()[:5000])
    with pytest.raises(ModelError, match="corrupt"):
        DFlash(DFlash.Options(model=folder), toy.engine.target)


def test_options_are_checked(toy: LLM) -> None:
    for options, message in (
        ({"nodes": 0}, "nodes"),
        ({"tap_offset": 2}, "tap_offset"),
        ({"tap_offset": True}, "tap_offset"),
        ({"model": 3}, "model"),
    ):
        with pytest.raises(ConfigError, match=message):
            DFlash.Options(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'tap_offset'"):
        toy.variant({"method": "dflash", "tap_ofset": 1})
    with pytest.raises(ConfigError, match="needs 'model'"):
        toy.variant({"method": "dflash"})


def test_layer_numbers_follow_the_files_convention(toy: LLM, tmp_path: Path) -> None:
    def taps(config: dict[str, Any], offset: int | None = None) -> tuple[int, ...]:
        return BlockLayout.of(
            DFlash.FORMAT.translate(Head.of("head", config, tensors())), False, 8, offset
        ).taps

    assert taps(speculators()) == taps(zlab()) == TAPS
    assert taps(speculators(), 1 - 1) == TAPS and taps(zlab(), 0) == (1, 3, 7)
    assert taps(zlab({"target_layer_ids": [0, 3, 6]}), 1) == (1, 4, 7)
    assert spread(36, 5) == [1, 9, 17, 25, 33], "as in the published files for 36 layers"
    assert taps({**zlab(), "dflash_config": {"mask_token_id": MASK}}) == (2, 6)
    assert opened(toy, tmp_path, zlab(), tensors()).needs.states == TAPS


def test_dspark_in_a_flat_config_samples_from_the_anchor(toy: LLM, tmp_path: Path) -> None:
    """As SpecForge writes it: nothing says so but the projector, or the tensors; a file may say otherwise."""
    config, w = dspark()
    drafter = opened(toy, tmp_path, config, w)
    assert drafter.sources == ("dspark",)
    assert (
        drafter.layout.from_anchor
        and drafter.depth == BLOCK
        and drafter.correction is not None
        and drafter.layout.taps == TAPS
    )
    bare = {**config, "dflash_config": {**config["dflash_config"], "projector_type": None}}
    assert opened(toy, tmp_path, bare, w).depth == BLOCK
    assert opened(toy, tmp_path, dspark(sample_from_anchor=False)[0], w).depth == BLOCK - 1
    assert opened(toy, tmp_path, {**config, "sample_from_anchor": False}, w).depth == BLOCK - 1
    assert opened(toy, tmp_path, zlab(), tensors()).depth == BLOCK - 1
    with pytest.raises(ModelError, match="markov_head_type is 'fir', and none of vanilla, gated, rnn"):
        opened(toy, tmp_path, *dspark(markov_head_type="fir"))


@pytest.mark.parametrize("projector", ["dspark", "domino"])
def test_heads_that_correct_their_logits_are_for_methods_of_their_own(
    projector: str, toy: LLM, tmp_path: Path
) -> None:
    """By their tensors or, without any, by what the config calls them."""
    config, w = dspark() if projector == "dspark" else (zlab({"projector_type": projector}), tensors())
    bare = save_head(tmp_path / "bare", zlab({"projector_type": projector}), tensors())
    for folder in (save_head(tmp_path / "own", config, w), bare):
        assert detect(folder) == projector
        with pytest.raises(ModelError, match=f"head for another method: say '{projector}'"):
            toy.variant({"method": "dflash", "model": folder})
    plain = save_head(tmp_path / "plain", zlab({"projector_type": "linear"}), tensors())
    assert detect(plain) == "dflash"


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_a_block_without_normed_attention_heads_is_known_by_its_config(kind: str, tmp_path: Path) -> None:
    config, w = dspark() if kind == "dspark" else (zlab(), tensors())
    w = {name: tensor for name, tensor in w.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    assert detect(save_head(tmp_path / "named", {**config, "architectures": ["DFlashDraftModel"]}, w)) == kind
    assert detect(save_head(tmp_path / "bare", {**config, "architectures": []}, w)) == kind


def test_depth_is_bounded_by_the_block(toy: LLM, tmp_path: Path) -> None:
    drafter = opened(toy, tmp_path, zlab(), tensors())
    assert (drafter.size(0), drafter.size(3), drafter.size(50)) == (0, 3, BLOCK - 1)
    tree = DFlash(DFlash.Options(model=str(tmp_path / "head"), nodes=20), toy.engine.target)
    assert (tree.size(0), tree.size(1), tree.size(50)) == (0, 8, 20)


def test_bytes_of_the_published_shape() -> None:
    """Five layers and five taps for a target of 4096: the sum of the published shapes."""
    h, inner, q, kv, d = 4096, 12288, 4096, 1024, 128
    with torch.device("meta"):
        sizes = Sizes(h, inner, 32, 8, d)
        stored = Network(sizes, 151936, (2, 10, 18, 26, 34), 151669, 5, 16).state_dict()
    layer = 2 * q * h + 2 * kv * h + 3 * inner * h + 2 * h + 2 * d
    assert sum(tensor.numel() for tensor in stored.values()) == 5 * layer + 5 * h * h + 2 * h
    assert len(stored) == 5 * 11 + 3


def test_a_saved_network_is_read_back(toy: LLM, tmp_path: Path) -> None:
    network = Network.like(toy.engine.target)
    folder = save_head(tmp_path, network.config(), network.state_dict())
    layout = DFlash(DFlash.Options(model=folder), toy.engine.target).layout
    assert detect(folder) == "dflash"
    assert (layout.taps, layout.block, layout.mask) == (network.taps, 8, V - 1)
