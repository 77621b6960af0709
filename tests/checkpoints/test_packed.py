"""AWQ, GPTQ and compressed-tensors checkpoints, packed here by hand, give the same model as float32."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import answer, check_speculation, decoder_of, text_logits, weight_bytes
from packed_files import AWQ, COMPRESSED, FORMATS, FP8, GPTQ, floats, groups_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM, ModelError, SamplingParams
from outrider.checkpoints.hub import Checkpoint
from outrider.config import EngineOptions
from outrider.core.quantized import QuantizedWeight
from outrider.inspect.card import card_of
from outrider.testing import random_prompts, tiny_checkpoint

PROMPTS = random_prompts(3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(
        tiny_checkpoint(tmp_path_factory.mktemp("source") / "s", num_hidden_layers=1, attention_bias=True)
    )


@pytest.fixture(scope="module")
def make(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """name -> the quantized checkpoint, and the same weights in float32.  One layer is left as it is."""
    made: dict[str, tuple[Path, Path]] = {}

    def of(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder, rng = tmp_path_factory.mktemp(name), random.Random(name)
            packed, plain = (shutil.copytree(source, folder / kind) for kind in ("packed", "plain"))
            few, whole = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
            for full in [n for n in whole if n.endswith("_proj.weight") and "o_proj" not in n]:
                layer, whole[full] = FORMATS[name][0](*whole[full].shape, rng)
                del few[full]
                few |= {f"{full.removesuffix('.weight')}.{key}": tensor for key, tensor in layer.items()}
            save_file(few, packed / "model.safetensors", {"format": "pt"})
            save_file(whole, plain / "model.safetensors", {"format": "pt"})
            configure(packed, FORMATS[name][1] | {"modules_to_not_convert": ["o_proj"]})
            made[name] = packed, plain
        return made[name]

    return of


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def logits(folder: Path) -> Tensor:
    return text_logits(decoder_of(folder), PROMPTS[0] + PROMPTS[1])


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_and_text_are_those_of_the_plain_weights(
    name: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight, then logits and greedy text: the torch kernels use the values as stored."""
    packed, plain = make(name)
    few, whole = (Checkpoint.open(str(folder)).tensors() for folder in (packed, plain))
    sizes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    for part, size in sizes.items():
        layer = f"model.layers.0.{'self_attn' if part in 'qkv' else 'mlp'}.{part}_proj"
        found = few.linear(layer, *size)
        assert (found.bits if isinstance(found, QuantizedWeight) else None) == FORMATS[name][2]
        dense = found.dense() if isinstance(found, QuantizedWeight) else found
        torch.testing.assert_close(dense, whole.get(f"{layer}.weight", *size), rtol=1e-6, atol=1e-6)
    expected, rounded = logits(plain), logits(packed)
    assert (rounded - expected).pow(2).mean().sqrt() < 0.05 * expected.std()
    monkeypatch.setenv("OUTRIDER_KERNELS", "torch")
    expected = logits(plain)
    torch.testing.assert_close(logits(packed), expected, rtol=1e-3, atol=1e-3)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    one, two = (LLM(str(folder), dtype="float32") for folder in (packed, plain))
    assert (
        answer(one, PROMPTS[2], params).outputs[0].token_ids
        == answer(two, PROMPTS[2], params).outputs[0].token_ids
    )


@pytest.mark.parametrize(
    "name", ["awq", "awq-symmetric", "gptq-8", "compressed-asymmetric", "fp8-blocks", "compressed-int8"]
)
def test_card_memory_equals_the_loaded_size(name: str, make: Any) -> None:
    packed, plain = make(name)
    card = card_of(EngineOptions(str(packed)))
    assert card.weight_bytes == pytest.approx(weight_bytes(LLM(str(packed))), rel=0.07), (
        "up to the padding of 300 tokens to 320"
    )
    assert card.parameters == card_of(EngineOptions(str(plain))).parameters


@pytest.mark.parametrize("name", ["awq", "gptq-8", "gptq-act-order", "compressed-asymmetric", "fp8"])
def test_speculation_changes_nothing(name: str, make: Any) -> None:
    check_speculation(str(make(name)[0]), PROMPTS)


def test_groups_in_activation_order_are_expanded_and_logged(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logits(make("gptq-act-order")[0])
    assert [r.message for r in caplog.records if "desc_act" in r.message and "expanded" in r.message] != []
    caplog.clear()
    logits(make("gptq")[0])
    assert not caplog.records


# ---- what is refused

CURE = "GGUF, AWQ"


@pytest.mark.parametrize(
    ("given", "expected_message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("'bitsandbytes'", CURE)),
        ({"quant_method": "fbgemm_fp8"}, ("'fbgemm_fp8'", CURE)),
        (FP8 | {"fmt": "e5m2"}, ("'e5m2'", CURE)),
        (FP8 | {"weight_block_size": [128]}, ("two sizes", "[128]")),
        (FP8 | {"weight_block_size": [0, 128]}, ("weight_block_size",)),
        ({"bits": 4}, ("'unknown'", CURE)),
        (AWQ | {"version": "gemv"}, ("'gemv'", "gemm", CURE)),
        (AWQ | {"bits": 3}, ("3 bits",)),
        (AWQ | {"group_size": 0}, ("group_size", "0")),
        (GPTQ | {"bits": 3}, ("3 bits", "4 and 8")),
        (GPTQ | {"group_size": "128"}, ("group_size", "'128'")),
        (GPTQ | {"checkpoint_format": "marlin"}, ("'marlin'", CURE)),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, ("dynamic", CURE)),
        (COMPRESSED | {"format": "marlin-24"}, ("'marlin-24'", CURE)),
        (COMPRESSED | {"format": "float-quantized"}, ("group_0", "8 bits of float", CURE)),
        (floats(block_structure="big"), ("block_structure", "'big'")),
        (floats(block_structure="0x128"), ("two sizes", "'0x128'")),
        (floats(block_structure=[128.9, 128]), ("block_structure", "128.9")),
        (floats(block_structure=[True, True]), ("block_structure", "True")),
        (floats(block_structure=[32]), ("two sizes", "[32]")),
        (
            COMPRESSED
            | {"config_groups": {"g": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}},
            ("activations", CURE),
        ),
        (COMPRESSED | {"config_groups": groups_of(4, 32, type="float")}, ("integers", CURE)),
        (COMPRESSED | {"config_groups": groups_of(2, 32)}, ("2 bits",)),
        (COMPRESSED | {"config_groups": {}}, ("config_groups",)),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, ("transform_config", CURE)),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_with_the_cure(
    given: Any, expected_message: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "c")
    configure(folder, given)
    with pytest.raises(ModelError) as error:
        LLM(str(folder))
    assert all(part in str(error.value) for part in expected_message) and "\n" not in str(error.value)


def test_dynamic_rules_that_only_exclude_layers_are_accepted(make: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(make("gptq")[0], tmp_path / "c")
    configure(folder, GPTQ | {"dynamic": {"-:.*o_proj": {}}})
    assert torch.equal(logits(folder), logits(make("gptq")[0]))


def spoil(
    name: str, make: Any, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], **given: Any
) -> str:
    folder = shutil.copytree(make(name)[0], tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    configure(folder, FORMATS[name][1] | given)
    with pytest.raises(ModelError) as error:
        LLM(str(folder))
    return str(error.value)


V = "model.layers.0.self_attn.v_proj"


@pytest.mark.parametrize("name", ["awq", "gptq", "compressed"])
def test_another_group_size_than_announced_is_named(name: str, make: Any, tmp_path: Path) -> None:
    given = {"config_groups": groups_of(4, 16)} if name == "compressed" else {"group_size": 16}
    expected_message = spoil(name, make, tmp_path, lambda tensors: None, **given)
    assert (
        "gate_proj of [96, 64] is not quantized to 4 bits in groups of 16" in expected_message
        and "(96, 2)" in expected_message
    )


def test_more_bits_than_announced_are_named(make: Any, tmp_path: Path) -> None:
    assert "4 bits" in spoil("gptq-8", make, tmp_path, lambda tensors: None, bits=4)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("awq", "scales"),
        ("awq", "qzeros"),
        ("gptq-asymmetric", "qzeros"),
        ("compressed-asymmetric", "weight_zero_point"),
    ],
)
def test_a_missing_tensor_is_named(name: str, key: str, make: Any, tmp_path: Path) -> None:
    assert f"'{V}.{key}'" in spoil(name, make, tmp_path, lambda tensors: tensors.pop(f"{V}.{key}"))


def test_a_layer_with_neither_words_nor_weight_is_named(make: Any, tmp_path: Path) -> None:
    assert f"'{V}.weight'" in spoil("gptq", make, tmp_path, lambda tensors: tensors.pop(f"{V}.qweight"))


def test_an_index_out_of_range_is_named(make: Any, tmp_path: Path) -> None:
    expected_message = spoil(
        "gptq", make, tmp_path, lambda tensors: tensors.update({f"{V}.g_idx": torch.full((64,), 2).int()})
    )
    assert f"{V}.g_idx is corrupt" in expected_message and "2 groups" in expected_message


def test_zero_points_of_another_shape_are_named(make: Any, tmp_path: Path) -> None:
    expected_message = spoil(
        "awq", make, tmp_path, lambda tensors: tensors.update({f"{V}.qzeros": torch.zeros(3, 4).int()})
    )
    assert f"{V}.qzeros is torch.int32 (3, 4)" in expected_message


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("fp8-blocks", {"weight_scale_inv": torch.ones(2, 3)}, "scales of (2, 3)"),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(1, 2, dtype=torch.int32)}, "scales are fractions"),
        ("fp8", {"weight": torch.ones(32, 64, dtype=torch.float8_e5m2)}, "no fp8 (e4m3) or int8"),
        ("fp8", {"weight": torch.ones(32, 60).to(torch.float8_e4m3fn)}, "has shape (32, 60)"),
        ("compressed-int8", {"weight_scale": torch.ones(31, 1)}, "scales of (31, 1)"),
    ],
)
def test_damaged_weights_beside_scales_are_named(
    name: str, change: dict[str, Tensor], text: str, make: Any, tmp_path: Path
) -> None:
    given = {f"{V}.{part}": tensor for part, tensor in change.items()}
    message = spoil(name, make, tmp_path, lambda tensors: tensors.update(given))
    assert V in message and text in message


def test_fp8_without_its_scales_is_refused(make: Any, tmp_path: Path) -> None:
    message = spoil("fp8", make, tmp_path, lambda tensors: tensors.pop(f"{V}.weight_scale"))
    assert f"{V}.weight is torch.float8_e4m3fn, without scales" in message
