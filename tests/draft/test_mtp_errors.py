"""Prediction layers that are not built, do not fit or are not there are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from layers import stored, tensors
from toys import LAYERS, save_head

from outrider import LLM
from outrider.core.step import FINAL
from outrider.draft import detect
from outrider.draft.mtp import Mtp
from outrider.errors import ConfigError, ModelError


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ("mlp.experts.0.gate_proj.weight", "not layers of Llama"),
        ("self_attn.kv_a_proj_with_mqa.weight", "not layers of Llama"),
        ("post_mlp_layernorm.weight", "not layers of Llama"),
        ("self_attn.q_proj.weight_scale_inv", "quantized"),
    ],
)
def test_other_blocks_are_refused_by_name(toy: LLM, tmp_path: Path, extra: str, reason: str) -> None:
    config, out = stored(tensors(), "deepseek")
    folder = save_head(tmp_path, config, {**out, f"model.layers.{LAYERS}.{extra}": torch.ones(4)})
    with pytest.raises(ModelError, match=rf"{reason}.*{extra}|{extra}.*{reason}"):
        Mtp(Mtp.Options(model=folder), toy.engine.target)


@pytest.mark.parametrize("kind", ["deepseek", "speculators"])
def test_another_activation_is_refused(kind: str, toy: LLM, tmp_path: Path) -> None:
    config, out = stored(tensors(), kind)
    other = {**config.get("transformer_layer_config", config), "hidden_act": "gelu"}
    config = other if kind == "deepseek" else {**config, "transformer_layer_config": other}
    with pytest.raises(ModelError, match=r"hidden_act 'gelu'.*'silu'"):
        Mtp(Mtp.Options(model=save_head(tmp_path, config, out)), toy.engine.target)


def test_gated_layers_need_a_target_of_their_family(toy: LLM, tmp_path: Path) -> None:
    hidden = toy.engine.target.decoder.spec.hidden
    tensors = {f"mtp.{name}.weight": torch.ones(hidden) for name in ("norm", "layers.0.input_layernorm")}
    folder = save_head(tmp_path, {}, {**tensors, "mtp.fc.weight": torch.ones(hidden, 2 * hidden)})
    assert detect(folder) == "mtp"
    with pytest.raises(ModelError, match=r"mtp\.layers\.0\.input_layernorm.*Llama"):
        Mtp(Mtp.Options(model=folder), toy.engine.target)


def test_target_without_layers_is_refused(toy: LLM) -> None:
    with pytest.raises(ModelError, match=r"no multi-token prediction layers.*'model'"):
        LLM(toy.engine.options.model, dtype="float32", speculative_config={"method": "mtp"})


def test_layers_that_do_not_fit(toy: LLM, tmp_path: Path) -> None:
    config, out = stored(tensors(), "mimo")
    with pytest.raises(ModelError, match=r"\(32, 64\).*\(64, 128\)"):
        Mtp(
            Mtp.Options(
                model=save_head(
                    tmp_path / "a",
                    config,
                    {**out, "model.mtp_layers.0.input_proj.weight": torch.ones(32, 64)},
                )
            ),
            toy.engine.target,
        )
    del out["model.mtp_layers.0.mlp.down_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        Mtp(Mtp.Options(model=save_head(tmp_path / "b", config, out)), toy.engine.target)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="prenorm"):
        Mtp.Options(prenorm="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dynamic"):
        Mtp.Options(tree="dynamics")


def test_prenorm_can_be_chosen(toy: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, *stored(tensors(), "mimo"))
    assert Mtp(Mtp.Options(model=folder, prenorm=False), toy.engine.target).net.taps == (FINAL,)
