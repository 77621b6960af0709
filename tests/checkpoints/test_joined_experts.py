"""Files of gpt-oss: experts joined, in MXFP4 and in GGUF are the model that transformers computes."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import oss_files
import pytest
import torch
from gguf_files import PROMPTS, logits
from helpers import check_speculation, decoder_of, text_logits, weight_bytes
from kernel_cases import needs_c
from safetensors.torch import load_file, save_file

from outrider import LLM, ModelError
from outrider.checkpoints import hub
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.mxfp4 import unpack
from outrider.config import EngineOptions
from outrider.core.quantized import QuantizedWeight
from outrider.inspect.card import card_of
from outrider.models.differentiable import load_weights, new_module
from outrider.models.fallback.model import Fallback
from outrider.models.placement import Precision


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A dense checkpoint, and one in MXFP4 with the same numbers."""
    path = tmp_path_factory.mktemp("oss")
    dense = oss_files.checkpoint(path / "dense")
    return dense, oss_files.in_mxfp4(dense, path / "mxfp4")


def theirs(folder: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPTS[0] + PROMPTS[1]])).logits[0]
    return found


def changed(source: str, folder: Path, name: str, change: Any = None) -> str:
    """A copy of a checkpoint with one tensor of layer 1 changed, or without it."""
    tensors, full = load_file(Path(source) / "model.safetensors"), f"model.layers.1.{name}"
    tensor = tensors.pop(full)
    if change is not None:
        tensors[full] = change(tensor).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((Path(source) / "config.json").read_text())
    return str(folder)


def test_numbers_are_those_of_transformers(folders: tuple[str, str]) -> None:
    """Which has the format from its publisher."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dense, packed = (load_file(Path(folder) / "model.safetensors") for folder in folders)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    parts = packed[f"{name}_blocks"], packed[f"{name}_scales"]
    assert torch.equal(convert_moe_packed_tensors(*parts, dtype=torch.float32), dense[name])


def test_a_scale_may_be_any_power_of_two() -> None:
    exponents = torch.arange(1, 255, dtype=torch.uint8)[:, None]
    pairs = torch.full((254, 1, 16), 0x22, dtype=torch.uint8)  # the number 1, twice
    assert torch.equal(
        unpack(pairs, exponents).dense()[:, 7].double(), 2.0 ** (exponents[:, 0].double() - 127)
    )


def test_weights_in_mxfp4_are_read_as_they_are(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The torch kernels use the numbers; the C kernels also round activations to 8 bits."""
    dense, packed = folders
    expected = theirs(dense)
    torch.testing.assert_close(logits(dense), expected, rtol=1e-3, atol=1e-3)
    assert (logits(packed) - expected).pow(2).mean().sqrt() < 0.1 * expected.std()
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    torch.testing.assert_close(logits(packed), expected, rtol=1e-3, atol=1e-3)


@needs_c
def test_weights_in_mxfp4_stay_in_four_bits(folders: tuple[str, str]) -> None:
    dense, packed = folders
    experts = decoder_of(packed).layers[0].experts
    assert experts is not None
    assert {weight.data.numel() for weight in experts.down} == {64 * 96 * 9 // 16}, "4.5 bits each"
    assert all(weight.levels is not None for weight in experts.gate_up)
    card = card_of(EngineOptions(packed))
    assert card.parameters == card_of(EngineOptions(dense)).parameters
    assert card.stored_as["mxfp4 in 4 bits"] == 3 * 8 * 3 * 64 * 96
    assert card.weight_bytes == pytest.approx(weight_bytes(LLM(packed)), rel=0.15)  # routers are padded to 64


@pytest.mark.parametrize("window", [1, 16, 1000])
def test_windows_of_any_length(window: int, tmp_path: Path) -> None:
    folder = oss_files.checkpoint(tmp_path, sliding_window=window)
    torch.testing.assert_close(logits(folder), theirs(folder), rtol=1e-3, atol=1e-3)


def test_a_config_as_it_is_published(folders: tuple[str, str], tmp_path: Path) -> None:
    """With names of older versions of transformers, and keys of other programs."""
    shutil.copytree(folders[1], tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope,
        "experts_per_token": 3,
        "initial_context_length": 64,
    }
    config |= {"torch_dtype": "float32"}
    file.write_text(json.dumps(config))
    assert Checkpoint.open(str(tmp_path / "m")).spec == Checkpoint.open(folders[1]).spec
    assert torch.equal(logits(tmp_path / "m"), logits(folders[1]))


def test_speculation_changes_nothing(folders: tuple[str, str]) -> None:
    check_speculation(folders[1], PROMPTS)


@pytest.mark.parametrize("kind", [0, 1], ids=["dense", "mxfp4"])
def test_a_gguf_file_is_the_same_model(folders: tuple[str, str], kind: int, tmp_path: Path) -> None:
    """It says nothing of the clamp, which is 7 there."""
    source = oss_files.checkpoint(tmp_path / "dense", swiglu_limit=7.0, rms_norm_eps=2**-17)
    source = oss_files.in_mxfp4(source, tmp_path / "mxfp4") if kind else source
    file = oss_files.in_gguf(tmp_path / "m.gguf", source)
    assert Checkpoint.open(file).spec == Checkpoint.open(source).spec
    found, expected = (decoder_of(model) for model in (file, source))
    assert torch.equal(found.parts[0].stack.alive[1], expected.parts[0].stack.alive[1]), "rotations"
    torch.testing.assert_close(logits(file), logits(source), rtol=1e-4, atol=1e-4)
    if kind:
        assert all(a.levels is not None for a in found.layers[1].experts.gate_up)  # type: ignore[union-attr]


def test_transformers_own_code_runs_them_expanded(folders: tuple[str, str]) -> None:
    """As on a GPU."""
    found = []
    for folder in folders:
        model = Fallback(Checkpoint.open(folder), Precision(torch.float32), torch.device("cpu"), 256)
        found.append(text_logits(model, PROMPTS[0]))
    assert torch.equal(*found)


@pytest.mark.parametrize("form", ["dense", "mxfp4", "gguf"])
def test_a_module_for_training_has_the_same_weights(
    folders: tuple[str, str], form: str, tmp_path: Path
) -> None:
    source = folders[form != "dense"]
    model = oss_files.in_gguf(tmp_path / "m.gguf", source) if form == "gguf" else source
    checkpoint = Checkpoint.open(model)
    module, expected = new_module(checkpoint.config), load_file(Path(folders[0]) / "model.safetensors")
    load_weights(module, checkpoint)
    found = module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_copies_for_other_programs_are_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "original/model.safetensors",
        "metal/model.bin",
    ]
    found: list[str] = []

    def download(repo: str, allow_patterns: list[str], ignore_patterns: list[str], revision: None) -> str:
        for file in files:
            wanted, left = (
                any(fnmatch(file, pattern) for pattern in patterns)
                for patterns in (allow_patterns, ignore_patterns)
            )
            found.extend([file] if wanted and not left else [])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    hub.download("me/oss")
    assert found == files[:2]


def test_every_tensor_is_found_under_the_name_of_an_expert(folders: tuple[str, str]) -> None:
    dense, packed = (Checkpoint.open(folder).tensors() for folder in folders)
    for part, inputs in (("gate", 64), ("up", 64), ("down", 96)):
        outputs, name = 160 - inputs, f"model.layers.2.mlp.experts.7.{part}_proj"
        assert f"{name}.weight" in dense and f"{name}.bias" in packed
        found = packed.linear(name, outputs, inputs)
        assert isinstance(found, QuantizedWeight)
        assert torch.equal(found.dense(), dense.get(f"{name}.weight", outputs, inputs).float())
        assert torch.equal(packed.get(f"{name}.weight", outputs, inputs), found.dense())
    assert "model.layers.0.mlp.experts.0.up_proj.scale" not in packed
    assert torch.equal(
        packed.get("model.layers.0.mlp.gate.bias", 8), dense.get("model.layers.0.mlp.router.bias", 8)
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_blocks", lambda t: t[:, :, :1], "gate_up_proj_blocks has shape"),
        ("gate_up_proj_scales", lambda t: t[:, :-2], "gate_up_proj_scales has shape"),
        ("down_proj_blocks", lambda t: t[:7], "down_proj_blocks has shape"),
        ("down_proj_scales", lambda t: t.float(), "down_proj_scales is torch.float32, not uint8"),
        ("down_proj_bias", lambda t: t.to(torch.uint8), "down_proj_bias is torch.uint8, not of floating"),
        ("down_proj_bias", lambda t: t[:7], "down_proj_bias has shape"),
        ("gate_up_proj_bias", lambda t: t.sum(), "gate_up_proj_bias has shape"),
        ("gate_up_proj_blocks", lambda t: t.flatten(), "gate_up_proj_blocks has shape"),
        ("down_proj_scales", None, "no tensor '.*down_proj_scales'"),
        ("down_proj_blocks", None, "no tensor '.*down_proj'"),
    ],
)
def test_a_misshapen_tensor_is_refused_by_name(
    folders: tuple[str, str], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    model = changed(folders[1], tmp_path, f"mlp.experts.{name}", change)
    with pytest.raises(ModelError, match=message):
        LLM(model)


@pytest.mark.parametrize("layout", ["dense", "mxfp4"])
@pytest.mark.parametrize(
    "name",
    ["mlp.experts.down_proj_bias", "mlp.experts.gate_up_proj_bias", "mlp.router.bias"]
    + [f"self_attn.{part}_proj.bias" for part in "qkvo"],
)
def test_a_missing_bias_is_refused_by_name(
    folders: tuple[str, str], tmp_path: Path, name: str, layout: str
) -> None:
    """Without it the model would have other texts."""
    with pytest.raises(ModelError, match=f"no tensor 'model.layers.1.{name}'"):
        LLM(changed(folders[layout == "mxfp4"], tmp_path, name))


def test_attention_without_biases_by_its_config(tmp_path: Path) -> None:
    folder = oss_files.checkpoint(tmp_path, attention_bias=False)
    assert "model.layers.0.self_attn.q_proj.bias" not in load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(folder), theirs(folder), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("part", ["gate_proj.bias", "down_proj.bias", "router.bias", "q_proj.bias"])
def test_a_gguf_file_without_a_bias_is_refused(
    folders: tuple[str, str], tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = oss_files._parts

    def without(*given: Any) -> list[Any]:
        return [each for each in parts(*given) if not each[0].endswith(part)]

    monkeypatch.setattr(oss_files, "_parts", without)
    with pytest.raises(ModelError, match=r"has no tensor 'model.layers.0.*bias'"):
        LLM(oss_files.in_gguf(tmp_path / "m.gguf", folders[1]))


@pytest.mark.parametrize("change", [lambda x: x[0].copy(), lambda x: x[:7].copy()], ids=["one", "seven"])
@pytest.mark.parametrize("part", ["down_proj.bias", "down_proj.weight"])
def test_a_gguf_file_with_parts_of_some_experts_is_refused(
    folders: tuple[str, str], tmp_path: Path, part: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = oss_files._parts

    def fewer(*given: Any) -> list[Any]:
        return [(n, change(x) if n.endswith(part) else x, kind) for n, x, kind in parts(*given)]

    monkeypatch.setattr(oss_files, "_parts", fewer)
    with pytest.raises(ModelError, match=rf"model.layers.0.*experts.*{part} has shape \("):
        LLM(oss_files.in_gguf(tmp_path / "m.gguf", folders[1]))


def test_misshapen_blocks_are_refused_in_transformers_own_code(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    model = changed(folders[1], tmp_path, "mlp.experts.gate_up_proj_blocks", lambda t: t.flatten())
    with pytest.raises(ModelError, match="gate_up_proj_blocks has shape"):
        Fallback(Checkpoint.open(model), Precision(torch.float32), torch.device("cpu"), 256)


@pytest.mark.parametrize("value", [0, -7.0, "x", 1e9])
def test_a_clamp_out_of_range_is_refused(value: Any, tmp_path: Path) -> None:
    folder = oss_files.checkpoint(tmp_path / "m")
    file = Path(folder) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "swiglu_limit": value}))
    with pytest.raises(ModelError, match="swiglu_limit must be"):
        LLM(folder)
