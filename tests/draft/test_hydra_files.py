"""Hydra's published files load as they are; what cannot be used is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hydras import (
    AT,
    BLOCKS,
    CONFIG,
    HEADS,
    INNER,
    KV,
    D,
    Q,
    engine,
    judged,
    once,
    overhear,
    prompts,
    tensors,
    toy_like,
)
from safetensors.torch import save_file
from torch import Tensor
from toys import HIDDEN, V, save_head

from outrider import LLM, ConfigError, ModelError, SamplingParams
from outrider.draft import detect
from outrider.draft.hydra import Hydra, Network
from outrider.heads.layer import Sizes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return toy_like(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def toy(target: str) -> LLM:
    return LLM(target, dtype="float32")


LAYOUTS = ["prefix-mlp .pt", "prefix-mlp safetensors", "prefix-mlp stored once", "mlp .pt", "mlp safetensors"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_network(toy: LLM, target: str, tmp_path: Path, layout: str) -> None:
    arch = layout.split()[0]
    w = tensors(arch)
    if layout.endswith("once"):
        folder = save_head(tmp_path, CONFIG, {})
        stored = once(w)
        assert sum("hydra_mlp" in name for name in stored) == 6 * HEADS
        save_file(stored, tmp_path / "model.safetensors")
    else:
        folder = save_head(
            tmp_path,
            {**CONFIG, "hydra_head_arch": arch},
            w,
            "hydra_lm_head.pt" if ".pt" in layout else "model.safetensors",
        )
    assert detect(folder) == "hydra"
    llm = engine(target, folder)
    heard = overhear(llm)
    llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    judged(toy, w, heard)
    assert llm.engine.drafter.depth == HEADS
    assert (llm.engine.drafter.slot_bytes == 0) == (arch == "mlp")


# ---- shapes


@pytest.mark.parametrize("arch", ["prefix-mlp", "mlp"])
def test_the_published_names_and_bytes(arch: str) -> None:
    """Hydra's names; of a head for Vicuna 13B the bytes that its shapes give, on the meta device."""
    prefix = Sizes(HIDDEN, INNER, Q, KV, D)
    network = Network(HIDDEN, V, HEADS, BLOCKS, prefix if arch == "prefix-mlp" else None)
    unread = ("embed_tokens", "input_embed_fn", "rotary_emb")
    assert {name: tensor.shape for name, tensor in network.state_dict().items()} == {
        name: tensor.shape
        for name, tensor in tensors(arch).items()
        if not any(part in name for part in unread)
    }
    h, inner, v = 5120, 13824, 32000
    with torch.device("meta"):
        wide = Sizes(h, inner, 40, 40, h // 40)
        large = Network(h, v, HEADS, BLOCKS, wide if arch == "prefix-mlp" else None)
    mlps = sum(2 * (h * (i + 2) * h + h) + h * h + h for i in range(HEADS))  # a shared block counts once
    layer = 4 * h * h + 3 * h * inner + 3 * h
    assert sum(p.numel() for p in large.parameters()) == mlps + HEADS * (v * h + v) + (
        layer if arch == "prefix-mlp" else 0
    )


# ---- what cannot be used


def refused(
    toy: LLM, folder: Path, config: dict[str, Any], w: dict[str, Tensor], file: str = "hydra_lm_head.pt"
) -> str:
    with pytest.raises(ModelError) as caught:
        Hydra(Hydra.Options(model=save_head(folder, config, w, file)), toy.engine.target)
    return str(caught.value)


@pytest.mark.parametrize("arch", ["cross-attn", "eagle-attn", "mpl"])
def test_other_archs_are_refused_by_name(toy: LLM, tmp_path: Path, arch: str) -> None:
    output = refused(
        toy,
        tmp_path,
        {**CONFIG, "hydra_head_arch": arch},
        {"attn.self_attn.q_proj.weight": torch.zeros(4, 4)},
    )
    assert repr(arch) in output and ("the method eagle" if arch == "eagle-attn" else "prefix-mlp") in output


@pytest.mark.parametrize(
    "name",
    [
        "hydra_mlp.2.1.res_connection.bias",
        "hydra_mlp.0.1.linear.weight",
        "hydra_lm_head.1.1.weight",
        "hydra_lm_head.3.1.bias",
        f"{AT}.norm.weight",
        f"{AT}.layers.0.input_layernorm.weight",
        f"{AT}.layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(toy: LLM, tmp_path: Path, name: str) -> None:
    w = tensors()
    del w[name]
    assert ".".join(name.split(".")[:2]) in refused(toy, tmp_path, CONFIG, w)


def test_missing_prefix_layer_is_refused(toy: LLM, tmp_path: Path) -> None:
    w = {name: tensor for name, tensor in tensors().items() if not name.startswith(AT)}
    assert "q_proj" in refused(toy, tmp_path, CONFIG, w)


def test_a_head_for_another_target_is_refused(toy: LLM, tmp_path: Path) -> None:
    output = refused(
        toy, tmp_path / "narrow", {**CONFIG, "hydra_head_arch": "mlp"}, tensors("mlp", hidden=32)
    )
    assert "(32,)" in output and "(64,)" in output
    output = refused(
        toy, tmp_path / "words", {**CONFIG, "hydra_head_arch": "mlp"}, tensors("mlp", vocabulary=V + 8)
    )
    assert f"({V + 8},)" in output and f"({V},)" in output


def test_wrong_kinds_are_refused(toy: LLM, tmp_path: Path) -> None:
    w = tensors("mlp")
    ungrounded = {name: tensor for name, tensor in w.items() if "res_connection" not in name}
    assert "not grounded" in refused(toy, tmp_path / "a", {"hydra_head_arch": "mlp"}, ungrounded)
    w["hydra_lm_head.0.weight"] = w["hydra_lm_head.0.weight"].to(torch.int32)
    assert "int32" in refused(toy, tmp_path / "b", {"hydra_head_arch": "mlp"}, w)
    assert "hidden_state_offset" in refused(
        toy, tmp_path / "c", {**CONFIG, "hidden_state_offset": 99}, tensors()
    )
    two = {**tensors(), f"{AT}.layers.1.input_layernorm.weight": torch.ones(HIDDEN)}
    assert "more than one layer" in refused(toy, tmp_path / "d", CONFIG, two)


def test_a_prefix_layer_has_the_activation_of_the_target(
    toy: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy.engine.checkpoint.config, "hidden_act", "gelu")
    assert "hidden_act 'gelu'" in refused(toy, tmp_path, CONFIG, tensors())


@pytest.mark.parametrize("file", ["model.safetensors", "hydra_lm_head.pt"])
def test_a_truncated_file_is_refused(toy: LLM, tmp_path: Path, file: str) -> None:
    folder = save_head(tmp_path, CONFIG, tensors(), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt"):
        Hydra(Hydra.Options(model=folder), toy.engine.target)


def test_options_are_checked(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'chain'"):
        Hydra.Options(tree="chains")
    with pytest.raises(ConfigError, match="nodes"):
        Hydra.Options(nodes=0)
    with pytest.raises(ConfigError, match="'model'"):
        LLM(target, speculative_config={"method": "hydra"})
    folder = save_head(tmp_path, CONFIG, tensors(), "hydra_lm_head.pt")
    with pytest.raises(ConfigError, match=r"num_speculative_tokens 5 .* 4 heads"):
        LLM(target, speculative_config={"model": folder, "num_speculative_tokens": 5})
    assert (
        LLM(
            target, speculative_config={"model": folder, "num_speculative_tokens": 2}
        ).engine.controller.depth_for(1)
        == 2
    )
