"""EAGLE-3 files: every layout loads and equals a naive float64 forward; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_heads import (
    HEADS,
    KV,
    PAIRS,
    VD,
    Config,
    D,
    H,
    Tensors,
    agree,
    official,
    packed,
    random_network,
)
from torch import Tensor
from toys import HIDDEN, V, save_head, toy_target

from outrider import LLM, ConfigError, ModelError, draft
from outrider.checkpoints.heads import Head
from outrider.draft.eagle3 import FORMAT, Eagle3
from outrider.heads.layer import Sizes
from outrider.heads.tapped import TAPS, taps_of


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", speculative_config=None)


# ---- layouts


def prefixed(tensors: Tensors, prefix: str, *bare: str) -> Tensors:
    return {name if name in bare else f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def speculators(config: Config, tensors: Tensors, new: bool) -> tuple[Config, Tensors]:
    own = {
        "draft_vocab_size": VD,
        "speculators_model_type": "eagle3",
        "norm_before_residual": False,
        "target_hidden_size": None,
    }
    layer = {key: value for key, value in config.items() if key not in ("draft_vocab_size", "architectures")}
    tensors = renamed(tensors, "midlayer.", "layers.0.") | {"verifier_norm.weight": torch.ones(H)}
    return {
        **own,
        "architectures": ["Eagle3DraftModel" if new else "Eagle3Speculator"],
        "transformer_layer_config": layer,
    }, tensors


def vllm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    mapped = renamed(renamed(tensors, "midlayer.", "layers.0."), "d2t", "draft_id_to_target_id")
    mapped.pop("t2d")
    mapped = prefixed(mapped, "model.", "lm_head.weight", "draft_id_to_target_id")
    return {
        "model_type": "eagle",
        "architectures": ["Eagle3LlamaForCausalLM"],
        "method": "eagle3",
        "model": config,
    }, mapped


def absolute(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    return config, {**tensors, "d2t": tensors["d2t"] + torch.arange(VD)}


LAYOUTS: dict[str, Callable[[Config, Tensors], tuple[Config, Tensors]]] = {
    "official": lambda config, tensors: (config, tensors),
    "sglang": lambda config, tensors: ({**config, "architectures": ["LlamaForCausalLMEagle3"]}, tensors),
    "speculators, old": lambda config, tensors: speculators(config, tensors, False),
    "speculators, new": lambda config, tensors: speculators(config, tensors, True),
    "vllm": vllm,
    "absolute d2t": absolute,
    "embedding": lambda config, tensors: (config, tensors),  # which is added below
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_every_layout_computes_the_naive_logits(layout: str, file: str, llm: LLM, tmp_path: Path) -> None:
    config, tensors = official()
    if layout == "embedding":
        tensors["embed_tokens.weight"] = torch.randn(V, H)
    folder = save_head(tmp_path, *LAYOUTS[layout](config, tensors), file)
    assert draft.detect(folder) == "eagle3"
    net = agree(llm, folder, (config, tensors))
    assert net.taps == (2, 4, 5)
    assert net.ids.tolist() == (tensors["d2t"] + torch.arange(VD)).tolist()
    assert (net.pairs.embedding is not net.model.embedding) == (layout == "embedding")


def test_aliased_storages_of_a_pickle_are_read(llm: LLM, tmp_path: Path) -> None:
    """Tensors that are views into one block, and two that share their storage, as torch.save keeps them."""
    config, tensors = official()
    block = torch.cat([t.flatten() for t in tensors.values() if t.is_floating_point()])
    parts = block.split([t.numel() for t in tensors.values() if t.is_floating_point()])
    views = {
        name: part.view(t.shape)
        for part, (name, t) in zip(parts, ((n, t) for n, t in tensors.items() if t.is_floating_point()))
    }
    views["midlayer.hidden_norm.weight"] = views["midlayer.input_layernorm.weight"]
    both = {**tensors, **views}
    agree(llm, save_head(tmp_path, config, both, "pytorch_model.bin"), (config, both))


# ---- variants


def more_layers(tensors: Tensors, at: str = "layers.1", norm: str = "input_layernorm") -> Tensors:
    shapes = {
        "self_attn.q_proj": (HEADS * D, H),
        "self_attn.k_proj": (KV * D, H),
        "self_attn.v_proj": (KV * D, H),
    }
    torch.manual_seed(5)
    added = {f"{at}.{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    same = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    added |= {f"{at}.{name}.weight": tensors[f"midlayer.{name}.weight"].flip(0) for name in same}
    return added | {f"{at}.{norm}.weight": 1 + torch.randn(H) * 0.2}


def variant(name: str) -> tuple[Config, Tensors, Config, Tensors, dict[str, Any]]:
    """(config and tensors of the file, those for the naive forward, and how)."""
    config, tensors = official()
    how: dict[str, Any] = {}
    if name == "rope_theta":
        config["rope_theta"] = 1e6
    elif name == "norm_before_residual":
        config, how = {**config, "norm_before_residual": True}, {"residual_normed": True}
    elif name == "norm_output, speculators":
        config, how = (
            {**config, "norm_output": True, "speculators_model_type": "eagle3"},
            {"output_normed": True},
        )
    elif name == "norm_output false, SpecForge":
        config, how = (
            {**config, "norm_output": False, "architectures": ["LlamaForCausalLMEagle3"]},
            {"bare": True},
        )
    elif name == "norm_output true, SpecForge":
        config = {**config, "norm_output": True, "architectures": ["LlamaForCausalLMEagle3"]}
    elif name == "fc_norm":
        tensors |= {f"fc_norm.{i}.weight": 1 + torch.randn(HIDDEN) * 0.2 for i in range(3)}
    elif name == "norm_before_fc":
        tensors["input_norm.weight"] = 1 + torch.randn(3 * HIDDEN) * 0.2
    elif name == "biases":
        tensors |= {"fc.bias": torch.randn(H), "midlayer.self_attn.q_proj.bias": torch.randn(HEADS * D)}
    elif name == "all tokens":
        tensors["lm_head.weight"] = torch.randn(V, H)
        del tensors["d2t"], tensors["t2d"]
    elif name == "two layers, vLLM":
        idle = {"layers.1.hidden_norm.weight": torch.zeros(H)}
        return (
            config,
            renamed(tensors, "midlayer.", "layers.0.") | more_layers(tensors) | idle,
            config,
            tensors | more_layers(tensors),
            how,
        )
    elif name == "two layers, SGLang":
        theirs = tensors | more_layers(tensors, "additional_layers.0", "hidden_norm")
        return config, theirs, config, tensors | more_layers(tensors), how
    return config, tensors, config, tensors, how


VARIANTS = (
    "rope_theta", "norm_before_residual", "norm_output, speculators", "norm_output false, SpecForge",
    "norm_output true, SpecForge",
    "fc_norm", "norm_before_fc", "biases", "all tokens", "two layers, vLLM", "two layers, SGLang",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_computes_the_naive_logits(name: str, llm: LLM, tmp_path: Path) -> None:
    config, tensors, *ours, how = variant(name)
    agree(llm, save_head(tmp_path, config, tensors), (ours[0], ours[1]), **how)


def test_a_head_narrower_than_the_target(llm: LLM, tmp_path: Path) -> None:
    """target_hidden_size: the head brings an embedding of its own width."""
    sizes = Sizes(32, 48, HEADS, KV, D)
    network = random_network(sizes, V, (2, 4, 5), tuple(range(0, V, 4)), embeds=True)
    wide = {"fc.weight": torch.randn(32, 3 * HIDDEN) * 0.2}
    head = {**network.config(), "target_hidden_size": HIDDEN}, {**network.state_dict(), **wide}
    folder = save_head(tmp_path, *head)
    assert draft.detect(folder) == "eagle3"
    agree(llm, folder, head)
    del head[1]["embed_tokens.weight"]
    with pytest.raises(ModelError, match="no embed_tokens, a width of 32, and the target embeds in 64"):
        packed(llm, save_head(tmp_path / "bare", *head), torch.zeros(PAIRS, 3 * HIDDEN))


def test_head_without_an_lm_head_uses_the_targets(llm: LLM, tmp_path: Path) -> None:
    config, tensors = official(draft_vocab_size=None)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    theirs = dict(
        tensors, **{"lm_head.weight": llm.engine.decoder.head_logits(torch.eye(HIDDEN)).T.contiguous()}
    )
    net = agree(llm, save_head(tmp_path, config, tensors), (config, theirs))
    assert net.ids is None and net.lm_head is None


def test_a_copy_of_the_targets_embedding_is_not_kept_twice(llm: LLM, tmp_path: Path) -> None:
    config, tensors = official()
    tensors["embed_tokens.weight"] = llm.engine.decoder.embed(range(V)).clone()
    net = agree(llm, save_head(tmp_path, config, tensors), (config, tensors))
    assert net.pairs.embedding is llm.engine.decoder.embedding


def test_no_fc_reads_the_last_state(llm: LLM, tmp_path: Path) -> None:
    config, tensors = official(eagle_config={"use_aux_hidden_state": False})
    del tensors["fc.weight"]
    assert agree(llm, save_head(tmp_path, config, tensors), (config, tensors), taps=1).taps == (-1,)


def test_head_is_quantized_while_loading(llm: LLM, tmp_path: Path) -> None:
    config, tensors = official()
    folder, states = save_head(tmp_path, config, tensors), torch.randn(PAIRS, 3 * HIDDEN)
    (_, whole), (_, few) = packed(llm, folder, states), packed(llm, folder, states, quantization="int8")
    assert not torch.equal(few, whole)
    assert torch.cosine_similarity(few, whole).min() > 0.99


# ---- taps

SGLANG, SPEC = (
    {"architectures": ["LlamaForCausalLMEagle3"]},
    {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]},
)


@pytest.mark.parametrize(
    ("config", "layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),
        (SGLANG, 32, (2, 16, 29)),
        ({**SGLANG, TAPS: [1, 46, 90]}, 94, (2, 47, 91)),  # the default, as SGLang counts
        ({**SGLANG, "eagle_config": {TAPS: [1, 11, 21]}}, 24, (2, 12, 22)),  # one later than the default
        ({**SPEC, TAPS: [1, 23, 44]}, 48, (1, 23, 44)),
        ({**SPEC, "architectures": SGLANG["architectures"], TAPS: [2, 30, 58]}, 61, (2, 30, 58)),
        ({TAPS: [2, 30, 58]}, 61, (2, 30, 58)),
        ({**SGLANG, TAPS: [1, 3, 7]}, 8, (2, 4, 8)),  # what leaves the last layer
        ({}, 7, (2, 3, 4)),
        ({}, 2, (0, 1, 2)),
        ({}, 1, (0, 0, 1)),
    ],
)
def test_both_conventions_of_layer_numbers(config: Config, layers: int, taps: tuple[int, ...]) -> None:
    head = FORMAT.renamed(Head.of("a head", config, {}))
    assert taps_of(head, layers) == taps
    assert taps_of(head, layers, given=[0, 1]) == (0, 1)
    if listed := head.config.get(TAPS):
        assert [taps_of(head, layers, offset=i) for i in (-1, 0)] == [
            tuple(t + i for t in listed) for i in (-1, 0)
        ]


def test_taps_of_the_user_override_the_file(llm: LLM, tmp_path: Path) -> None:
    config, tensors = official(**{TAPS: [1, 3, 4]})
    folder, target = save_head(tmp_path, config, tensors), llm.engine.target
    assert Eagle3(Eagle3.Options(model=folder), target).needs.states == (1, 3, 4)
    assert Eagle3(Eagle3.Options(model=folder, tap_offset=1), target).needs.states == (2, 4, 5)
    assert Eagle3(
        Eagle3.Options(model=folder, eagle_aux_hidden_state_layer_ids=[0, 4, 8]), target
    ).needs.states == (0, 4, 8)
    with pytest.raises(ModelError, match=r"\[5, 7, 9\]; the target has 0 … 8"):
        Eagle3(Eagle3.Options(model=folder, eagle_aux_hidden_state_layer_ids=[5, 7, 9]), target)
    with pytest.raises(ModelError, match=r"fc.weight is \(64, 192\), and \(64, 128\)"):
        Eagle3(Eagle3.Options(model=folder, eagle_aux_hidden_state_layer_ids=[5, 7]), target)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_hidden": torch.zeros(1, 3 * HIDDEN)}, "another method: say 'peagle'"),
        (
            {"fc.weight": torch.zeros(H, 3 * 48)},
            r"does not fit the target: its fc.weight is \(64, 144\), and \(64, 192\) is needed",
        ),
        ({"midlayer.mlp.up_proj.weight": None}, "has no tensor 'midlayer.mlp.up_proj.weight'"),
        ({"norm.weight": None}, "has no tensor 'norm.weight'"),
        ({"lm_head.weight": None}, "has no tensor 'lm_head.weight'"),
        ({"lm_head.weight": torch.zeros(VD + 1, H)}, "an lm_head of 129 tokens, a list of 128; V is 512"),
        ({"norm.weight": torch.zeros(H, dtype=torch.int32)}, "norm.weight .* is torch.int32"),
        ({"embed_tokens.weight": torch.zeros(V - 1, H)}, "it embeds 511 tokens, and the target has 512"),
        ({"d2t": torch.arange(VD)}, "contradict"),
        ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, "is quantized"),
        ({"layers.1.self_attn.q_proj.weight": torch.zeros(HEADS * D, H)}, "has no tensor 'layers.1"),
    ],
)
def test_files_that_are_refused(
    change: dict[str, Tensor | None], message: str, llm: LLM, tmp_path: Path
) -> None:
    config, tensors = official()
    changed = {name: t for name, t in {**tensors, **change}.items() if t is not None}
    with pytest.raises(ModelError, match=message):
        Eagle3(Eagle3.Options(model=save_head(tmp_path, config, changed)), llm.engine.target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"speculators_model_type": "peagle"}, "another method: say 'peagle'"),
        ({TAPS: "2"}, "must be a list"),
        ({TAPS: [2, 4, 9]}, "the target has 0 … 8"),
        ({"head_dim": 20}, "no heads of head_dim 20"),
        ({"norm_before_fc": True}, "has no tensor 'input_norm.weight'"),
    ],
)
def test_configs_that_are_refused(config: Config, message: str, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        Eagle3(Eagle3.Options(model=save_head(tmp_path, *official(**config))), llm.engine.target)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(file: str, llm: LLM, tmp_path: Path) -> None:
    folder = save_head(tmp_path, *official(), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="corrupt"):
        Eagle3(Eagle3.Options(model=folder), llm.engine.target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tap_offset": 0.5}, "tap_offset must be a whole number"),
        ({TAPS: "2,4,5"}, "list of layer numbers"),
        ({TAPS: []}, "list of layer numbers"),
        ({TAPS: [1, 2, 3], "tap_offset": 1}, "leave one of them out"),
        ({"tree": "dynamc"}, "Did you mean 'dynamic'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3.Options(**options)
