"""`outrider models` of trained heads, which reads the headers of their files only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Run
from toys import save_head

from outrider.checkpoints.weights import Weights
from outrider.draft.eagle import SGLANG
from outrider.draft.redrafter import Network
from outrider.inspect import heads
from outrider.inspect.heads import head_card

H, V = 64, 512
Shapes = dict[str, tuple[int, ...]]


def test_card_of_a_head_reads_only_headers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Network(H, V, exit_dim=96).to(torch.bfloat16)
    folder = save_head(tmp_path / "head", net.config(), dict(net.state_dict()))

    def reads(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Weights, "raw", reads)
    (line,) = run("models", folder, "--json").out.splitlines()
    weights = sum(p.numel() for p in net.parameters())
    assert json.loads(line) == {
        "name": folder,
        "method": "redrafter",
        "layout": "reference",
        "inside": False,
        "levels": None,
        "hidden": H,
        "vocabulary": V,
        "parameters": weights,
        "stored_as": {"bfloat16": weights},
        "bytes": 2 * weights,
        "refused": None,
    }
    sheet = run("models", folder, "builtin")
    assert sheet.status == 0
    for words in (
        "for method redrafter",
        "one, which recurs",
        "hidden size 64",
        "512",
        "bfloat16",
        "lean decoder",
    ):
        assert words in sheet.out


def test_aliases_in_a_pickle_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "detect", lambda *_: "medusa")
    shared, head = torch.zeros(H, H), torch.zeros(V, H)
    folder = save_head(
        tmp_path,
        {},
        {"0.0.linear.weight": shared, "0.1.linear.weight": shared, "0.2.weight": head},
        "medusa_lm_head.pt",
    )
    card = head_card(folder)
    assert card is not None
    assert (card.parameters, card.bytes) == (H * H + V * H, 4 * (H * H + V * H))


def medusa(prefix: str) -> Shapes:
    return {f"{prefix}{i}.0.linear.weight": (H, H) for i in range(3)} | {
        f"{prefix}{i}.1.weight": (V, H) for i in range(3)
    }


def vllm_medusa() -> Shapes:
    return {f"blocks.{i}.layers.0.weight": (H, H) for i in range(5)} | {
        f"lm_heads.{i}.weight": (128, H) for i in range(5)
    }


def hydra() -> Shapes:
    return {f"hydra_lm_head.{i}.1.weight": (V, H) for i in range(4)} | {
        "hydra_mlp.0.1.linear.weight": (H, 2 * H)
    }


def mlp(prefix: str, count: int) -> Shapes:
    return {f"{prefix}proj.0.weight": (32, H)} | {
        f"{prefix}{part}.{i}.weight": (V, 32) for part in ("emb", "head") for i in range(count)
    }


def eagle3(layer: str) -> Shapes:
    return {
        "fc.weight": (H, 3 * H),
        f"{layer}.hidden_norm.weight": (H,),
        f"{layer}.self_attn.q_proj.weight": (H, 2 * H),
    } | {"lm_head.weight": (128, H), "d2t": (128,)}


def eagle(prefix: str = "") -> Shapes:
    return {
        f"{prefix}fc.weight": (H, 2 * H),
        f"{prefix}layers.0.self_attn.q_proj.weight": (H, H),
        f"{prefix}embed_tokens.weight": (V, H),
    }


KNOWN: dict[str, tuple[Shapes, dict[str, Any], str, int | None, int, int | None]] = {
    "medusa": (medusa(""), {"medusa_num_heads": 2}, "reference", 3, H, V),
    "medusa, blocks only": (
        {"0.0.linear.weight": (H, H), "1.0.linear.weight": (H, H)},
        {},
        "reference",
        2,
        H,
        None,
    ),
    "medusa, vLLM": (vllm_medusa(), {}, "vLLM", 5, H, 128),
    "medusa, vLLM, prefixed": (
        {f"medusa_heads.{n}": s for n, s in vllm_medusa().items()},
        {},
        "vLLM",
        5,
        H,
        128,
    ),
    "hydra": (hydra(), {"hydra_num_heads": 4}, "reference", 4, H, V),
    "mlp": (mlp("speculator.", 4), {"n_predict": 4}, "IBM", 4, H, V),
    "mlp, tied": (mlp("", 1), {"n_predict": 5}, "IBM", 5, H, V),
    "eagle-3": (eagle3("midlayer"), {"vocab_size": V}, "reference, SGLang", None, H, 128),
    "eagle-3, norms": ({**eagle3("midlayer"), "fc_norm.0.weight": (H,)}, {}, "reference", None, H, 128),
    "eagle-3, vLLM": (eagle3("layers.0"), {}, "speculators, vLLM", None, H, 128),
    "eagle-3, one tap": (
        {**eagle3("midlayer"), "fc.weight": (H, H)},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [7]}},
        "reference, SGLang",
        None,
        H,
        128,
    ),
    "peagle": ({**eagle3("layers.0"), "mask_hidden": (1, 1, H)}, {}, "speculators, vLLM", None, H, 128),
    "eagle": ({**eagle(), "fc.bias": (H,)}, {}, "reference", None, H, V),
    "eagle, no bias": (eagle(), {}, "reference, vLLM", None, H, V),
    "eagle, no architectures": (eagle(), {"architectures": None}, "reference, vLLM", None, H, V),
    "eagle, SGLang": ({**eagle(), "fc.bias": (H,)}, {"architectures": [SGLANG]}, "SGLang", None, H, V),
    "eagle, vLLM": (eagle("model."), {}, "vLLM", None, H, V),
    "speculators": (
        {"fusion_fc.weight": (H, 2 * H)},
        {"transformer_layer_config": {"vocab_size": V}},
        "speculators",
        None,
        H,
        V,
    ),
    "dspark": (
        {"hidden_norm.weight": (H,), "fc.weight": (H, 2 * H), "markov_head.markov_w1.weight": (V, 8)},
        {"block_size": 7, "dflash_config": {"projector_type": "dspark", "target_layer_ids": [1, 2]}},
        "z-lab, SpecForge",
        7,
        H,
        None,
    ),
    "dflash": (
        {"hidden_norm.weight": (H,), "fc.weight": (H, 5 * H)},
        {"block_size": 8, "dflash_config": {"target_layer_ids": [1, 2, 3, 4, 5]}},
        "z-lab, SpecForge",
        7,
        H,
        None,
    ),
    "redrafter, plural": (
        {"lm_heads.0.linear.weight": (96, 96), "lm_heads.1.weight": (V, 96)},
        {"hidden_size": H},
        "reference",
        None,
        H,
        V,
    ),
}


METHODS = {"mlp": "mlp_speculator", "eagle-3": "eagle3", "speculators": "eagle"}


@pytest.mark.parametrize("case", KNOWN)
def test_layouts_are_recognized_by_their_tensors(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = case.split(",")[0]
    monkeypatch.setattr(heads, "detect", lambda *_: METHODS.get(name, name))
    shapes, config, label, levels, hidden, vocabulary = KNOWN[case]
    tensors = {
        name: torch.zeros(shape, dtype=torch.int64 if name == "d2t" else torch.float16)
        for name, shape in shapes.items()
    }
    card = head_card(save_head(tmp_path, config, tensors))
    assert card is not None
    assert (card.layout, card.levels, card.hidden, card.vocabulary, card.inside) == (
        label,
        levels,
        hidden,
        vocabulary,
        False,
    )
    assert card.parameters == card.stored_as["float16"]
    assert card.bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_head_inside_its_target_gets_a_second_card(
    run: Run, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    from safetensors.torch import load_file

    whole = checkpoint("Llama")
    extra = {name: torch.zeros(shape) for name, shape in medusa("medusa_head.").items()}
    config = json.loads((whole / "config.json").read_text())
    folder = save_head(tmp_path, config, {**load_file(whole / "model.safetensors"), **extra})
    monkeypatch.setattr(heads, "detect", lambda *_: "medusa")
    model, head = map(json.loads, run("models", folder, "--json").out.splitlines())
    assert model["architecture"] == "LlamaForCausalLM"
    assert head["levels"] == 3 and head["parameters"] == sum(tensor.numel() for tensor in extra.values())


REFUSED: dict[str, tuple[str, Shapes, dict[str, Any], str]] = {
    "Hydra, cross-attn": ("hydra", hydra(), {"hydra_head_arch": "cross-attn"}, "'cross-attn'"),
    "DSpark, another table": (
        "dspark",
        {
            "hidden_norm.weight": (H,),
            "fc.weight": (H, 2 * H),
            "layers.0.self_attn.q_norm.weight": (16,),
            "markov_head.lag.weight": (4, 4),
        },
        {},
        "DSpark with another table",
    ),
    "prediction layers in few bits": (
        "mtp",
        {"model.layers.4.eh_proj.weight": (H, 2 * H), "model.layers.4.mlp.up_proj.qzeros": (H, H)},
        {},
        "quantized weights",
    ),
    "EAGLE with experts": (
        "eagle",
        {**eagle(), "layers.0.mlp.experts.0.up_proj.weight": (H, H)},
        {},
        "another kind of head",
    ),
    "Medusa without a block": (
        "medusa",
        {"0.0.linear.weight": (H, H), "1.1.linear.weight": (H, H)},
        {},
        "has no tensor",
    ),
    "MLP of speculators": (
        "mlp_speculator",
        {"a.weight": (2, 2)},
        {"speculators_model_type": "mlp"},
        "of the type 'mlp' of speculators",
    ),
    "quantized": ("redrafter", {"rnn_u.weight": (H, H), "rnn_u.weight_scale": (1,)}, {}, "is quantized"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_card_gives_the_reason_for_which_loading_fails(case: str, run: Run, tmp_path: Path) -> None:
    method, shapes, config, reason = REFUSED[case]
    folder = save_head(tmp_path, config, {name: torch.zeros(shape) for name, shape in shapes.items()})
    (line,) = run("models", folder, "--json").out.splitlines()
    card = json.loads(line)
    assert card["method"] == method and reason in card["refused"]
    sheet = run("models", folder).out
    assert "nothing:" in sheet and "for method" not in sheet


def test_pickle_without_tensors_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    folder = save_head(
        tmp_path, {}, {"state_dict": {"0.0.linear.weight": torch.zeros(H, H)}}, "medusa_lm_head.pt"
    )  # type: ignore[dict-item]
    result = run("models", folder)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1) and "'state_dict'" in result.err


def test_folder_without_a_head_is_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    save_head(tmp_path / "odd", {}, {"strange.weight": torch.zeros(2, 2)})
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "odd", tmp_path / "empty", "/no/head"):
        result = run("models", path)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "checkpoint folder" in run("models", "/no/head").err
