"""Hybrid models in transformers' code and in the lean decoder: logits, and states between the layers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fallback_cases import chain, fallback, lean, needs_c, prompts
from hybrids import HYBRIDS, write
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from toys import read as read_text

from outrider import LLM
from outrider.backends.recurrent_path import path_of
from outrider.cache.pages import Cache
from outrider.checkpoints.hub import Checkpoint
from outrider.core.device import to_device
from outrider.core.recurrent import RecurrentRows, Replay
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.errors import ConfigError, ModelError
from outrider.heads.sample import read_states
from outrider.models.base import Model
from outrider.models.decoder import Decoder
from outrider.models.fallback import mixers
from outrider.models.load import load, needs_fallback
from outrider.models.placement import Precision
from outrider.models.selftest import bit_exact

FILE = "model.safetensors"
TABLE, CPU = array("i", range(256)), torch.device("cpu")


LEAN = ("qwen3.5", "qwen3.5-moe", "qwen3-next")
KERNELS = {"lean": "", "torch": "torch"}  # how the lean decoder runs: OUTRIDER_KERNELS


@pytest.fixture(scope="module", params=[*HYBRIDS, *(f"{name}, {kind}" for name in LEAN for kind in KERNELS)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A transformers model and ours."""
    folder = tmp_path_factory.mktemp("hybrid")
    name, _, kind = request.param.partition(", ")
    theirs = write(name, folder)
    with pytest.MonkeyPatch.context() as patch:
        if kind:
            patch.setenv("OUTRIDER_KERNELS", KERNELS[kind])
        ours = lean(folder, torch.float32) if kind else fallback(folder, torch.float32)
    yield theirs, ours


@torch.inference_mode()
def test_logits_are_those_of_transformers(pair: tuple[Any, Model]) -> None:
    """In chunks, then token by token, with the texts of two requests in turns."""
    theirs, ours = pair
    pool, text = ours.pool(256), prompts()[-1]
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    parts = [chain(ours, pool, 0, text[:13]), chain(ours, pool, 13, text[13:22])]
    parts += [chain(ours, pool, at, text[at : at + 1]) for at in range(22, len(text))]
    error = (torch.cat(parts) - expected).abs().max()
    assert error < 2e-3 * expected.std()


@needs_c
def test_a_row_is_the_same_in_a_chunk_and_in_a_tree(pair: tuple[Any, Model]) -> None:
    assert pair[1].exact and bit_exact(pair[1])


@needs_c
@torch.inference_mode()
def test_accepted_nodes_are_replayed(pair: tuple[Any, Model]) -> None:
    """A tree of six nodes, whose path 1, 3, 5 is accepted: then the logits of the text follow."""
    ours, text = pair[1], prompts()[-1]
    plain, pool = ours.pool(256), ours.pool(256)
    chain(ours, plain, 0, text[:10])
    expected = torch.cat([chain(ours, plain, at, text[at : at + 1]) for at in range(10, 16)])
    chain(ours, pool, 0, text[:10])
    tokens, parents = [7, text[11], 8, text[12], 9, text[13]], [-1, -1, 1, 1, 0, 3]
    step_input, paths = StepInput(), list[list[int]]()
    step_input.chain(TABLE, 10, text[10:11])
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), 11 + node])
    step_input.nodes(TABLE, 11, paths, tokens)
    step_input.recurrent = RecurrentRows([0], [0])
    hidden = ours.forward(step_input.build(), pool)
    assert torch.equal(ours.logits(hidden, [0, 2, 4, 6]), expected[:4])
    pool.move([TABLE[11 + node] for node in (1, 3, 5)], TABLE[11:14].tolist())
    following = StepInput()
    following.chain(TABLE, 14, text[14:16])
    following.recurrent = RecurrentRows([0], [1], [Replay(0, (1, 3, 5))])
    hidden = ours.forward(following.build(), pool)
    assert torch.equal(ours.logits(hidden, [0, 1]), expected[4:])


@torch.inference_mode()
def test_indices_of_a_step_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every recurrence: on a GPU each is a transfer."""
    write("qwen3.5", tmp_path)
    ours, made = fallback(tmp_path, torch.float32), list[int]()
    pool = ours.pool(64)
    assert pool.states is not None and len(pool.states.states) > 1

    def counting(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(len(x))
        return to_device(x, device)

    monkeypatch.setattr("outrider.backends.recurrent_path.to_device", counting)
    first, second = StepInput(), StepInput()
    first.chain(TABLE, 0, [5, 6, 7, 8])
    first.recurrent = RecurrentRows([0], [1])
    ours.forward(first.build(), pool)
    second.chain(TABLE, 3, [9])
    second.recurrent = RecurrentRows([0], [0], [Replay(0, (0,))])
    ours.forward(second.build(), pool)
    assert made == [2, 1], "the drafted rows of the first step, the replayed ones of the second"


@torch.inference_mode()
def test_states_between_the_layers_are_those_of_transformers(pair: tuple[Any, Model]) -> None:
    theirs, ours = pair
    tokens, layers = prompts()[-1], ours.spec.layers
    expected = theirs(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    states = read_text(ours, tokens, range(layers + 1)).states
    for layer in range(layers):
        assert torch.allclose(states[layer], expected[layer][0].float(), rtol=1e-3, atol=5e-3)


@torch.inference_mode()
def test_states_of_texts_read_together_are_those_of_each(
    pair: tuple[Any, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 16 tokens end within texts, which go on from their own recurrent states."""
    monkeypatch.setattr("outrider.heads.sample.HOST_CHUNK", 16)
    ours, texts = pair[1], prompts()
    together = read_states(ours, texts, (FINAL,))[FINAL]
    each = torch.cat([read_states(ours, [text], (FINAL,))[FINAL] for text in texts])
    assert torch.allclose(together, each, rtol=1e-4, atol=1e-4)
    assert torch.equal(together, each) or not ours.exact


@pytest.mark.parametrize(("name", "read"), [("granite-hybrid-rope", fallback), ("qwen3.5", lean)])
def test_bfloat16(name: str, read: Callable[[Path, torch.dtype], Model], tmp_path: Path) -> None:
    """Its rows are the same in a chunk and in a tree, too."""
    write(name, tmp_path, torch.bfloat16)
    model = read(tmp_path, torch.bfloat16)
    assert bit_exact(model) or not model.exact


@torch.inference_mode()
@pytest.mark.parametrize("name", LEAN)
def test_a_step_of_the_engine_has_the_bits_of_layers_alone(name: str, tmp_path: Path) -> None:
    """`forward_step`, one call, of chunks whose middle layer is read too, with drafts and their replays."""
    write(name, tmp_path)
    ours, text = lean(tmp_path, torch.float32), prompts()[-1]
    found = [list[Tensor](), list[Tensor]()]
    for fused, logits in zip((ours.fused, None), found):
        ours.fused, pool, states = fused, ours.pool(64), {2: torch.empty(0)}
        for start, end, replay in ((0, 7, ()), (7, 12, ()), (10, 16, (1, 2))):
            step_input = StepInput()
            step_input.chain(TABLE, start, text[start:end])
            step_input.recurrent = RecurrentRows([0], [1], [Replay(0, replay)] if replay else [])
            step_input.logits_rows = [*range(end - start)]
            logits.append(ours.forward_step(step_input.build(), pool, states).clone())
            logits.append(states[2].clone())
    assert all(map(torch.equal, *found))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3.5-moe", "qwen3-next"])
def test_experts_in_one_tensor_of_a_layer(name: str, tmp_path: Path) -> None:
    """As transformers has them in memory, and some files."""
    theirs, text = write(name, tmp_path), prompts()[-1]
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, tmp_path / FILE)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in load_file(tmp_path / FILE))
    ours = lean(tmp_path, torch.float32)
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    assert (chain(ours, ours.pool(64), 0, text) - expected).abs().max() < 2e-3 * expected.std()


def test_a_misshapen_tensor_of_experts(tmp_path: Path) -> None:
    tensors = dict(write("qwen3.5-moe", tmp_path).state_dict())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for wrong, message in (
        (tensors[name].transpose(1, 2), r"gate_up_proj has shape \(4, 64, 96\)"),
        (tensors[name][:3], r"asks for \(more than 3, 96, 64\)"),
        (tensors[name].to(torch.float8_e4m3fn), "float8_e4m3fn; only floating-point weights"),
    ):
        save_file({key: t.contiguous() for key, t in {**tensors, name: wrong}.items()}, tmp_path / FILE)
        with pytest.raises(ModelError, match=message):
            lean(tmp_path, torch.float32)


@pytest.mark.parametrize(("name", "bits"), [("qwen3.5", "int8"), ("qwen3.5", "int4"), ("qwen3-next", "int8")])
@torch.inference_mode()
def test_few_bits(name: str, bits: str, tmp_path: Path) -> None:
    """Its linears are quantized while loading, but for those of the gates."""
    theirs = write(name, tmp_path, hidden_size=128)
    ours, text = load(Checkpoint.open(str(tmp_path)), Precision(torch.float32, bits), CPU, 64), prompts()[-1]
    assert isinstance(ours, Decoder) and bit_exact(ours)
    delta = ours.layers[0].delta
    assert delta is not None and delta.qkvz.kind != delta.gates.kind
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    error = (chain(ours, ours.pool(64), 0, text) - expected).pow(2).mean().sqrt() / expected.std()
    assert error < (0.3 if bits == "int8" else 0.9)  # without quantization 5e-5, of other texts 1.4


@torch.inference_mode()
def test_rotations_and_biases_of_a_lean_hybrid(tmp_path: Path) -> None:
    """A half of a head is rotated, its set of parameters names the parts of images, and q_proj has biases."""
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
    theirs = write("qwen3.5", tmp_path, rope_parameters=rope, attention_bias=True)
    ours, text = lean(tmp_path, torch.float32), prompts()[-1]
    assert ours.spec.rotated == 8 and not ours.adapts
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    assert (chain(ours, ours.pool(64), 0, text) - expected).abs().max() < 2e-3 * expected.std()


def test_what_a_lean_hybrid_refuses(tmp_path: Path) -> None:
    write("qwen3.5", tmp_path)
    checkpoint = Checkpoint.open(str(tmp_path))
    assert not needs_fallback(checkpoint)
    with pytest.raises(ConfigError, match="has recurrent layers and runs on one device"):
        needs_fallback(checkpoint, split=True)
    with pytest.raises(ConfigError, match=r"enable_lora is for .* not Qwen3_5ForCausalLM"):
        LLM(str(tmp_path), enable_lora=True)
    with pytest.raises(ConfigError, match="layers can be skipped in"):
        lean(tmp_path, torch.float32).layer_range(0, 2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("linear_num_value_heads", 5, "must be a multiple of the second"),
        ("linear_key_head_dim", 513, "linear_key_head_dim"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim"),
        ("layer_types", ["linear_attention"] * 4, "all of its layers are recurrent"),
    ],
)
def test_sizes_of_a_lean_hybrid_are_checked(key: str, value: Any, message: str, tmp_path: Path) -> None:
    write("qwen3.5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(str(tmp_path))


# ---- what is refused, and what is not


@pytest.mark.parametrize("read", [fallback, lean])
def test_a_model_of_a_hybrid_family_without_recurrences(
    read: Callable[[Path, torch.dtype], Model], tmp_path: Path
) -> None:
    theirs = write("qwen3.5", tmp_path, layer_types=["full_attention"] * 4)
    ours, text = read(tmp_path, torch.float32), prompts()[-1]
    assert not ours.state_bytes(0)
    expected = theirs(torch.tensor([text]), use_cache=False).logits[0].float()
    assert (chain(ours, ours.pool(64), 0, text) - expected).abs().max() < 2e-3 * expected.std()


def test_a_recurrence_of_an_unknown_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("olmo-hybrid", tmp_path)
    monkeypatch.setattr("outrider.models.fallback.mixers.RECURRENCES", {})
    with pytest.raises(ModelError, match="recurrent state of an unknown kind"):
        fallback(tmp_path, torch.float32)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    write("lfm2", tmp_path, layer_types=["conv"] * 4)
    with pytest.raises(ModelError, match="all of its layers are recurrent"):
        fallback(tmp_path, torch.float32)


class Named(nn.Module):
    """Code in which the name of a recurrence is that of a method."""

    def causal_conv1d_fn(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.causal_conv1d_fn(x)


def test_an_attribute_with_the_name_of_a_recurrence() -> None:
    assert not mixers.route(nn.Sequential(Named(), nn.Identity()), lambda _: None)


# ---- paths and slots


def test_rows_follow_their_parents_and_replays() -> None:
    """Request a replays two nodes and drafts a tree, b a chain; c has a replay, and no row in the step."""
    a, b = array("i", range(64)), array("i", range(64, 128))
    step_input = StepInput()
    step_input.chain(a, 9, [1, 2])  # rows 0, 1
    step_input.nodes(a, 11, [[11], [12], [11, 13]], [3, 4, 5])  # rows 2, 3, 4
    step_input.chain(b, 0, [6, 7, 8])  # rows 5, 6, 7
    replays = [Replay(4, (6, 8), {1: 9}), Replay(0, (1,))]
    step_input.recurrent = RecurrentRows([4, 2], [1, 5], replays, {0: 7, 5: 8})
    found = path_of(step_input.build())
    assert found.replayed == [6, 8, 1] and found.drafted == [2, 3, 4, 6, 7]
    assert found.path.parent.tolist() == [-1, 0, -1, 1, 3, 4, 4, 5, -1, 8, 9]
    assert found.path.slot.tolist() == [4, 4, 0, 4, 4, 4, 4, 4, 2, 2, 2]
    assert [row for row, saved in enumerate(found.path.save) if saved] == [2, 4, 8]
    assert {row: slot for row, slot in enumerate(found.path.copy) if slot >= 0} == {1: 9, 3: 7, 8: 8}
    assert found.path.fresh == {2} and found.path.num_slots == 10


def test_a_table_has_a_state_slot_until_it_is_closed() -> None:
    cache = Cache(8, 64, states=2)
    first, second = cache.open(), cache.open()
    assert sorted((first.state, second.state)) == [0, 1] and not cache.prefix_caching
    cache.check()
    freed = first.state
    cache.close(first)
    assert first.state == -1 and cache.open().state == freed
    cache.check()
    cache.clear()
    cache.check()
    assert second.state == -1 and cache.free_states == [1, 0]
