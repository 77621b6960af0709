"""`outrider export`: every layout of every method, back and forth."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hydras import AT, BLOCKS, CONFIG, once, tensors
from safetensors.torch import save_file
from torch import Tensor
from toys import save_head

from outrider import draft
from outrider.checkpoints.heads import Head
from outrider.cli import main
from outrider.errors import ConfigError
from outrider.train.base import write_head
from outrider.train.conversions import plain
from outrider.train.export import export
from outrider.train.methods import method

LAYOUTS = {
    "eagle": ("reference", "vllm", "sglang", "speculators"),
    "eagle3": ("vllm", "sglang"),
    "mlp_speculator": ("reference", "vllm"),
    "mtp": ("deepseek", "speculators"),
    "dflash": ("speculators", "z-lab"),
    "redrafter": ("reference", "tensorrt-llm"),
}
PAIRS = [(name, *pair) for name, layouts in LAYOUTS.items() for pair in itertools.permutations(layouts, 2)]
NAMED = {"architectures", "model_type", "add_para_norm", "bias", "torch_dtype"}  # by a layout


def ours(folder: Path, method: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors under our names.  A bias of zeros is as none."""
    head = draft.head_methods()[method].translate(Head.open(str(folder)))
    config = {key: value for key, value in plain(head.config).items() if key not in NAMED and value}
    tensors = {name: head.raw(name) for name in head}
    return config, {name: tensor for name, tensor in tensors.items() if name != "fc.bias" or tensor.any()}


@pytest.mark.parametrize(("method", "first", "second"), PAIRS)
def test_layouts_convert_there_and_back_without_loss(
    tmp_path: Path, method: str, first: str, second: str
) -> None:
    export(f"builtin-{method}", first, tmp_path / "a")
    assert export(str(tmp_path / "a"), second, tmp_path / "b") == method, "recognised by its tensors"
    export(str(tmp_path / "b"), first, tmp_path / "c")
    (config, tensors), (_, others), (again, back) = (ours(tmp_path / at, method) for at in "abc")
    assert config == again and tensors.keys() == others.keys() == back.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]) and torch.equal(tensor, back[name]), name
    one, other = (Head.open(str(tmp_path / at)) for at in "ab")
    same = {method, first, second} == {"eagle", "reference", "vllm"}
    assert same == ((one.config, one.stored) == (other.config, other.stored))


def test_taps_are_counted_as_the_layout_does(tmp_path: Path) -> None:
    export("builtin-eagle3", "sglang", tmp_path / "a")
    listed = Head.open(str(tmp_path / "a")).config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert listed == [1, 3, 4], "outputs of layers; the head reads the inputs of 2, 4, 5"
    export(str(tmp_path / "a"), "vllm", tmp_path / "b")
    assert Head.open(str(tmp_path / "b")).config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def medusa(folder: Path, own: bool) -> str:
    tensors = {f"{i}.0.linear.weight": torch.randn(8, 8) for i in range(2)}
    tensors |= {f"{i}.0.linear.bias": torch.randn(8) for i in range(2)}
    tensors |= {f"{i}.1.weight": torch.randn(20, 8) for i in range(2)} if own else {}
    write_head(folder, {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    return str(folder)


def test_medusa_for_vllm_and_back(tmp_path: Path) -> None:
    name = medusa(tmp_path / "a", own=True)
    export(name, "vllm", tmp_path / "b")
    export(str(tmp_path / "b"), "reference", tmp_path / "c")
    before, after = Head.open(name), Head.open(str(tmp_path / "c"))
    assert {*before} == {*after} and all(torch.equal(before.raw(one), after.raw(one)) for one in before)
    assert "blocks.0.layers.0.weight" in Head.open(str(tmp_path / "b"))


@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_hydra_as_its_reference_stores_it(tmp_path: Path, arch: str) -> None:
    """Every name of the reference's modules, but for its copies of the target's embedding."""
    w = {name: tensor.bfloat16() for name, tensor in once(tensors(arch)).items()}
    config = {**CONFIG, "hydra_head_arch": arch}
    save_head(tmp_path / "a", config, {})
    save_file(w, tmp_path / "a" / "model.safetensors")
    assert export(str(tmp_path / "a"), "reference", tmp_path / "b") == "hydra"
    made, published = Head.open(str(tmp_path / "b")), tensors(arch)
    assert {*made} == {*published} - {"input_embed_fn.weight", f"{AT}.embed_tokens.weight"}
    for name in made:
        assert torch.equal(made.raw(name), published[name].bfloat16()), name
    assert config.items() <= made.config.items() and made.config["hydra_num_layers"] == BLOCKS
    export(str(tmp_path / "b"), "reference", tmp_path / "c")
    again = Head.open(str(tmp_path / "c"))
    assert {*again} == {*made} and all(torch.equal(again.raw(name), made.raw(name)) for name in made)


def test_what_a_layout_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vLLM .* lm_head of their own"):
        export(medusa(tmp_path / "a", own=False), "vllm", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"Did you mean 'vllm'"):
        export("builtin-eagle3", "vlm", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"an lm_head each, and these use the target's"):
        export("builtin-hydra", "reference", tmp_path / "b")
    with pytest.raises(ConfigError, match="one published layout"):
        method("peagle").convert(Head.open("builtin-eagle3"), "vllm")
    with pytest.raises(ConfigError, match="last norm cannot be written as 'mimo'"):
        export("builtin-mtp", "mimo", tmp_path / "b")
    export("builtin-eagle", "reference", tmp_path / "plain")
    head = Head.open(str(tmp_path / "plain"))
    tensors = {"embedding_layernorm.weight": torch.ones(384), **{name: head.raw(name) for name in head}}
    write_head(tmp_path / "normed", head.config, tensors)
    with pytest.raises(ConfigError, match="'reference' cannot hold norm_token"):
        export(str(tmp_path / "normed"), "reference", tmp_path / "b")


def test_folders_and_models_are_refused(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ConfigError, match="only trained heads"):
        export(str(tiny), "vllm", tmp_path / "b")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export("builtin-eagle", "vllm", tmp_path)
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(ConfigError, match="cannot be written"):
            export("builtin-eagle", "reference", path)


def test_export_command_writes_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit, match="0"):
        main(["export", "builtin-eagle", "--format", "vllm", "--out", out, "--quantization-draft", "int8"])
    assert "a head for 'eagle' in the layout 'vllm'" in capsys.readouterr().out
    assert Head.open(out).config["quantization_config"]["quant_method"] == "compressed-tensors"
