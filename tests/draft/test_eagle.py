"""EAGLE's published files load, and its network equals a naive one in float64."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import CONFIG, EPS, HEADS, KV, D, layouts, naive, norm, tensors
from torch import Tensor
from toys import HIDDEN, V, acceptance, samples, save_head, teach, toy_target

from outrider import LLM
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft import detect
from outrider.draft.eagle import Eagle, Network
from outrider.draft.hydra import Hydra
from outrider.errors import ConfigError, ModelError
from outrider.heads.layer import Sizes
from outrider.heads.ranks import EAGLE, paths
from outrider.heads.sample import TargetWeights
from outrider.train.methods.eagle import Eagle as Trained


def ours(llm: LLM, folder: str, ids: list[int], f: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the packed network of a folder for pairs, and the logits of the last one."""
    drafter = Eagle(Eagle.Options(model=folder), llm.engine.target)
    drafter.allocate(64, drafter.net.stack.pool(1))
    step_input = StepInput.of_chain(array("i", range(1, 40)), 0, ids)
    out = drafter.net.forward(step_input, drafter.pool, drafter.net.from_states(f))
    return out, drafter.net.logits(out[-1:])


@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("layout", list(layouts({})))
def test_every_layout_is_the_same_network(
    toy: LLM, tmp_path: Path, layout: str, fc_bias: bool, qkv_bias: bool
) -> None:
    w = tensors(fc_bias, qkv_bias)
    config, stored, file = layouts(w)[layout]
    folder = save_head(tmp_path, config, stored, file)
    assert detect(folder) == "eagle"
    ids, f = [5, 9, 400, 3, 77, 12, 8], torch.randn(7, HIDDEN)
    outer = TargetWeights.of(toy.engine.decoder)
    out, logits = ours(toy, folder, ids, f)
    expected = naive(w, outer.embedding[ids], f)
    assert torch.allclose(out.double(), expected, atol=1e-4)
    assert torch.allclose(logits[0].double(), expected[-1] @ outer.lm_head.double().T, atol=1e-3)


def test_norms_of_other_trainers(toy: LLM, tmp_path: Path) -> None:
    """Norms before fc, after the layer, and a second layer with one of its own."""
    w = tensors(layers=2)
    w["enorm.weight"], w["hnorm.weight"], w["norm.weight"] = (
        torch.rand(HIDDEN) + 0.5,
        torch.rand(HIDDEN) + 0.5,
        torch.rand(HIDDEN) + 0.5,
    )
    folder = save_head(tmp_path, {"model_type": "eagle", "model": CONFIG}, w)
    ids, f, outer = [5, 9, 400], torch.randn(3, HIDDEN), TargetWeights.of(toy.engine.decoder)
    out, logits = ours(toy, folder, ids, f)
    expected = naive(w, outer.embedding[ids], f)
    assert torch.allclose(out.double(), expected, atol=1e-4)
    last = norm(expected[-1], w["norm.weight"].double())
    assert torch.allclose(logits[0].double(), last @ outer.lm_head.double().T, atol=1e-3)


def test_hydras_eagle_attn_loads_as_an_eagle_head(tmp_path: Path) -> None:
    """A layer with an input norm, under Hydra's names; its sizes are the target's."""
    rope = {"rope_type": "default", "rope_theta": CONFIG["rope_theta"]}
    sizes = {"head_dim": D, "num_attention_heads": HEADS, "num_key_value_heads": KV, "rms_norm_eps": EPS}
    folder = toy_target(tmp_path / "toy", rope_parameters=rope, **sizes)
    toy = LLM(folder, dtype="float32", kv_cache_memory_bytes=1 << 24)
    w = {**tensors(fc_bias=True), "layers.0.input_layernorm.weight": torch.rand(HIDDEN) + 0.5}
    stored = {name.replace("layers.0.", "attn."): tensor for name, tensor in w.items()}
    stored["input_embed_fn.weight"] = stored.pop("embed_tokens.weight")
    config = {"hydra_head_arch": "eagle-attn", "hydra_num_heads": 1, "hidden_state_offset": 0}
    folder = save_head(tmp_path / "head", config, {**stored, "lm_head.weight": torch.zeros(V, HIDDEN)})
    assert detect(folder) == "eagle"
    ids, f, outer = [5, 9, 400], torch.randn(3, HIDDEN), TargetWeights.of(toy.engine.decoder)
    assert torch.allclose(ours(toy, folder, ids, f)[0].double(), naive(w, outer.embedding[ids], f), atol=1e-4)
    with pytest.raises(ModelError, match="which is an EAGLE head: the method eagle reads it"):
        Hydra(Hydra.Options(model=folder), toy.engine.target)
    other = save_head(tmp_path / "other", {**config, "hidden_state_offset": 1}, stored)
    with pytest.raises(ModelError, match="reads states 1 layers before the last"):
        Eagle(Eagle.Options(model=other), toy.engine.target)


def test_a_part_of_the_vocabulary(toy: LLM, tmp_path: Path) -> None:
    w = {**tensors(), "token_map": torch.arange(0, V, 4), "lm_head.weight": torch.randn(V // 4, HIDDEN)}
    folder = save_head(tmp_path, {"model_type": "eagle", "model": CONFIG, "truncated_vocab_size": V // 4}, w)
    drafter = Eagle(Eagle.Options(model=folder), toy.engine.target)
    assert drafter.net.ids is not None and drafter.net.ids.tolist() == list(range(0, V, 4))
    assert ours(toy, folder, [5], torch.randn(1, HIDDEN))[1].shape == (1, V // 4)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_full_vocabulary_head_is_cut_to_its_draft_tokens(
    toy: LLM, tmp_path: Path, quantization: str | None
) -> None:
    """As vLLM does; the map is in no order, and the rows may be padded."""
    ids, whole = torch.randperm(V)[: V // 4], torch.randn(V + 8, HIDDEN)
    w, config = (
        {**tensors(), "token_map": ids},
        {"model_type": "eagle", "model": CONFIG, "truncated_vocab_size": len(ids)},
    )
    o, output = torch.randn(3, HIDDEN), []
    for name, rows in (("whole", whole), ("cut", whole[ids])):
        folder = save_head(tmp_path / name, config, {**w, "lm_head.weight": rows})
        net = Eagle(Eagle.Options(model=folder, quantization=quantization), toy.engine.target).net
        assert net.ids is not None and net.ids.tolist() == ids.tolist()
        output.append(net.logits(o))
    assert torch.equal(*output) and torch.allclose(
        output[0].double(), o.double() @ whole[ids].double().T, atol=1e-3 if quantization is None else 0.5
    )
    few = save_head(tmp_path / "few", config, {**w, "lm_head.weight": whole[: int(ids.max())]})
    with pytest.raises(
        ModelError, match=rf"lm_head.weight is \({int(ids.max())}, 64\), and \(128, 64\) is needed"
    ):
        Eagle(Eagle.Options(model=few), toy.engine.target)


def test_the_network_has_the_size_of_the_published_file() -> None:
    """EAGLE-LLaMA3-Instruct-8B: the file has the embedding and no head; our names add up to its 1.55 GB."""
    with torch.device("meta"):
        network = Network(Sizes(4096, 14336, 32, 8, 128), 128256, bias=False)
        total = sum(tensor.numel() for tensor in network.state_dict().values()) + 128256 * 4096
    assert round(2 * total / 1e9, 2) == 1.55


def test_the_published_static_tree() -> None:
    nodes = paths(EAGLE["mc_sim_7b_63"])
    assert [sum(len(path) == level for path in nodes) for level in range(1, 6)] == [4, 8, 8, 3, 2]


@pytest.fixture(scope="module")
def taught(toy: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    network = Network.like(toy.engine.target).train()
    data, outer = samples(toy, (FINAL,)), TargetWeights.of(toy.engine.decoder)
    teach(network, network.loss, data, outer, steps=60)
    folder = tmp_path_factory.mktemp("taught")
    return save_head(folder, *Trained.export(network.config(), network.state_dict(), "reference"))


def test_a_trained_head_is_mostly_right(toy: LLM, taught: str) -> None:
    """Acceptance of a trained head as a chain and as trees; by chance it would be 1/512."""
    target = toy.engine.options.model
    assert acceptance(target, {"model": taught, "tree": "chain", "num_speculative_tokens": 1}) > 0.2
    for tree in ("dynamic", "mc_sim_7b_63"):
        assert (
            acceptance(target, {"model": taught, "tree": tree, "num_speculative_tokens": 3, "nodes": 8})
            > 0.04
        )


def test_a_shift_is_caught(toy: LLM, taught: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a state and the token before the one sampled from it."""
    before = StepInput.chain

    def shifted(self: StepInput, table: Any, start: int, ids: Any, *rest: Any) -> None:
        before(self, table, start, [7, *list(ids)[:-1]], *rest)

    import outrider.heads.recurrent as recurrent

    class Shifted(StepInput):
        chain = shifted

    monkeypatch.setattr(recurrent, "StepInput", Shifted)
    assert (
        acceptance(toy.engine.options.model, {"model": taught, "tree": "chain", "num_speculative_tokens": 1})
        < 0.1
    )


def test_a_head_for_another_target_is_refused(toy: LLM, tmp_path: Path) -> None:
    w = tensors()
    w["fc.weight"] = torch.randn(96, 192)
    with pytest.raises(ModelError, match=r"\(96, 192\).*\(64, 128\)"):
        Eagle(Eagle.Options(model=save_head(tmp_path, CONFIG, w)), toy.engine.target)


def test_a_head_of_another_method_is_named(toy: LLM, tmp_path: Path) -> None:
    folder = save_head(
        tmp_path,
        {"medusa_num_heads": 1},
        {"0.0.linear.weight": torch.eye(HIDDEN), "0.0.linear.bias": torch.zeros(HIDDEN)},
    )
    with pytest.raises(ModelError, match="another method: say 'medusa'"):
        Eagle(Eagle.Options(model=folder), toy.engine.target)


@pytest.mark.parametrize(
    "name",
    [
        "mlp.experts.0.gate_proj.weight",
        "self_attn.sinks",
        "post_attention_layernorm.bias",
        "pre_feedforward_layernorm.weight",
    ],
)
def test_another_layer_is_refused_by_name(toy: LLM, tmp_path: Path, name: str) -> None:
    w = {**tensors(), f"layers.0.{name}": torch.zeros(HIDDEN)}
    with pytest.raises(ModelError, match=rf"only dense layers as Llama's and Qwen's .* layers\.0\.{name}"):
        Eagle(Eagle.Options(model=save_head(tmp_path, CONFIG, w)), toy.engine.target)


def test_a_missing_tensor_is_named(toy: LLM, tmp_path: Path) -> None:
    w = tensors()
    del w["layers.0.mlp.down_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        Eagle(Eagle.Options(model=save_head(tmp_path, CONFIG, w)), toy.engine.target)


@pytest.mark.parametrize(
    "config",
    [{**CONFIG, "hidden_act": "gelu"}, {"model_type": "eagle", "model": {**CONFIG, "hidden_act": "gelu"}}],
)
def test_another_activation_is_refused(config: dict[str, Any], toy: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"hidden_act 'gelu'.*'silu'"):
        Eagle(Eagle.Options(model=save_head(tmp_path, config, tensors())), toy.engine.target)
    Eagle(
        Eagle.Options(model=save_head(tmp_path, {**CONFIG, "hidden_act": "swish"}, tensors())),
        toy.engine.target,
    )


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(toy: LLM, tmp_path: Path, file: str) -> None:
    folder = save_head(tmp_path, CONFIG, tensors(), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt"):
        Eagle(Eagle.Options(model=folder), toy.engine.target)


def test_options_are_checked(toy: LLM) -> None:
    with pytest.raises(ConfigError, match="dynamic"):
        Eagle.Options(tree="dynamics")
    with pytest.raises(ConfigError, match="top_k"):
        Eagle.Options(top_k=0)
    with pytest.raises(ConfigError, match="model"):
        Eagle(Eagle.Options(), toy.engine.target)


@pytest.mark.parametrize("bias", [False, True])
def test_sglang_export_has_a_zero_bias_where_the_head_has_none(toy: LLM, tmp_path: Path, bias: bool) -> None:
    """The fc of its class always has a bias: without one in the file it must be zero."""
    network = Network.like(toy.engine.target, bias=bias)
    config, stored = Trained.export(network.config(), network.state_dict(), "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and json.dumps(config)
    assert stored["fc.bias"].shape == (HIDDEN,) and stored["fc.bias"].dtype == stored["fc.weight"].dtype
    assert config["bias"] is True and bool(stored["fc.bias"].any()) == bias
    folder = save_head(tmp_path, config, stored)
    assert detect(folder) == "eagle"
    ids, f = [5, 9, 400], torch.randn(3, HIDDEN)
    with torch.no_grad():
        assert torch.allclose(
            ours(toy, folder, ids, f)[0],
            network(TargetWeights.of(toy.engine.decoder).embedding[ids], f),
            atol=1e-4,
        )


def test_export_for_vllm_has_no_bias(toy: LLM) -> None:
    """The reference's, but its fc has no bias."""
    network = Network.like(toy.engine.target, bias=False)
    config, stored = Trained.export(network.config(), network.state_dict(), "vllm")
    assert (config, stored.keys()) == (network.config(), network.state_dict().keys())
    biased = Network.like(toy.engine.target)
    with pytest.raises(ConfigError, match=r"vLLM .* bias"):
        Trained.export(biased.config(), biased.state_dict(), "vllm")
    assert "fc.bias" in Trained.export(biased.config(), biased.state_dict(), "reference")[1]
    with pytest.raises(ConfigError, match="Did you mean 'sglang'"):
        Trained.export(biased.config(), biased.state_dict(), "sglan")


def test_speculators_export_is_read_back(toy: LLM, tmp_path: Path) -> None:
    network = Network.like(toy.engine.target)
    config, stored = Trained.export(network.config(), network.state_dict(), "speculators")
    json.dumps(config)
    folder = save_head(tmp_path, config, stored)
    assert detect(folder) == "eagle"
    ids, f = [5, 9, 400], torch.randn(3, HIDDEN)
    out, _ = ours(toy, folder, ids, f)
    with torch.no_grad():
        assert torch.allclose(out, network(TargetWeights.of(toy.engine.decoder).embedding[ids], f), atol=1e-4)
