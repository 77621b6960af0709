"""Loading of all heads: another target, a quantized target, and vLLM's options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import HIDDEN, V, save_head

from outrider import LLM, SamplingParams, draft
from outrider.checkpoints.heads import Head
from outrider.config import SpeculativeOptions
from outrider.draft.hydra import Hydra, Network
from outrider.errors import ConfigError, ModelError
from outrider.heads.base import HeadDrafter
from outrider.heads.vocabulary import check_size

HEADS = [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]
ChangedTensors = Callable[[dict[str, Any], dict[str, Tensor]], tuple[dict[str, Any], dict[str, Tensor]]]


def changed(llm: LLM, method: str, change: ChangedTensors, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example of a method, of which config and tensors were changed before it was loaded."""
    of = Head.of

    def other(name: str, config: Mapping[str, Any], tensors: Any) -> Head:
        return of(name, *change(dict(config), dict(tensors)))

    monkeypatch.setattr(Head, "of", staticmethod(other))
    return draft.method(method).example(llm.engine.target)


# ---- for another target of the same width


@pytest.mark.parametrize("method", HEADS)
def test_a_head_for_other_tokens_is_refused(method: str, toy: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32000 tokens, as its table of known ones or else its config says."""

    def other(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if "t2d" in tensors:
            return config, {
                **tensors,
                "t2d": torch.cat([tensors["t2d"], torch.zeros(32000 - V, dtype=torch.bool)]),
            }
        return {**config, "vocab_size": 32000}, tensors

    with pytest.raises(ModelError, match=r"does not fit the target: its (t2d|vocab_size) .* 32000 .* 512"):
        changed(toy, method, other, monkeypatch)


@pytest.mark.parametrize(
    ("config", "tensors"),
    [
        ({}, {"embed_tokens.weight": (V + 512, HIDDEN)}),
        ({"vocab_size": V}, {"model.embed_tokens.weight": (V + 512, HIDDEN)}),
        ({}, {"model.layers.8.embed_tokens.weight": (V + 512, HIDDEN)}),
        ({}, {"input_embed_fn.weight": (V + 512, HIDDEN)}),
        ({}, {"t2d": (V + 512,)}),
        ({}, {"t2d": (V,), "embed_tokens.weight": (V + 512, HIDDEN)}),
        ({"vocab_size": V + 512}, {}),
        ({"transformer_layer_config": {"vocab_size": V + 512}}, {}),
        ({"model": {"vocab_size": V + 512}}, {}),
    ],
)
def test_vocabulary_size_is_found_in_config_or_tensors(
    config: dict[str, Any], tensors: dict[str, tuple[int, ...]]
) -> None:
    """Up to 511 more or fewer are padding."""
    head = Head.of(
        "a head", config, {name: torch.empty(shape, device="meta") for name, shape in tensors.items()}
    )
    with pytest.raises(
        ModelError, match=rf"'a head' does not fit the target: .* {V + 512} tokens, and the target has {V}\."
    ):
        check_size(head, V)
    if len(tensors) < 2:
        check_size(head, V + 1)
        check_size(head, V + 1023)
        with pytest.raises(ModelError, match=f"{V + 512} .* {V + 1024}"):
            check_size(head, V + 1024)


def test_head_without_a_vocabulary_size_fits() -> None:
    output = {"vocab_size": None, "model": "llama", "draft_vocab_size": 9, "vision_config": {"vocab_size": 7}}
    unread = {
        "prefix_embeding_layer.embed_tokens.weight": torch.zeros(4, 2),
        "lm_head.weight": torch.zeros(9, 2),
    }
    check_size(Head.of("a head", {}, {}), 32000)
    check_size(Head.of("a head", output, unread), 32000)


# ---- files that draft nothing


def test_independent_speculators_model_is_refused(toy: LLM, tmp_path: Path) -> None:
    """A draft model with a note beside it; where the model itself is not there, the note says so."""
    note = {
        "speculators_model_type": "independent",
        "draft_model": "some/draft",
        "speculators_config": {"algorithm": "independent"},
    }
    bare = save_head(tmp_path / "bare", note, {"embed.weight": torch.zeros(2, 2)})
    with pytest.raises(
        ModelError, match=r"of the type 'independent' of speculators.* give the draft model itself"
    ):
        draft.detect(bare)
    other = save_head(
        tmp_path / "other", {"speculators_model_type": "new"}, {"embed.weight": torch.zeros(2, 2)}
    )
    with pytest.raises(ModelError, match="of the type 'new' of speculators, which no method reads"):
        draft.detect(other)
    whole = json.loads((Path(toy.engine.options.model) / "config.json").read_text())
    assert (
        draft.detect(save_head(tmp_path / "whole", {**whole, **note}, {"model.norm.weight": torch.ones(2)}))
        == draft.PLAIN_MODEL
    )


@pytest.mark.parametrize("blocks", [1, 3])
def test_specdecpp_classifier_is_refused(blocks: int, tmp_path: Path) -> None:
    """SpecDec++'s."""
    stored = {
        f"model.{i}.linear.{kind}": torch.zeros((4, 4) if kind == "weight" else (4,))
        for i in range(blocks)
        for kind in ("weight", "bias")
    }
    stored |= {f"model.{blocks}.weight": torch.zeros(2, 4), f"model.{blocks}.bias": torch.zeros(2)}
    with pytest.raises(ModelError, match=r"SpecDec\+\+.* makes none.* stop_classifier"):
        draft.detect(save_head(tmp_path, {"hidden_size": 4, "num_layers": blocks}, stored))


# ---- quantized


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("method", HEADS)
def test_int8_and_fp8_weights_without_scales_are_refused(
    method: str, kind: torch.dtype, toy: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scales are in other tensors."""

    def few(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return config, {
            name: tensor.to(kind) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }

    with pytest.raises(ModelError, match=rf"is {kind}; only float16, bfloat16, float32 and float64"):
        changed(toy, method, few, monkeypatch)


@pytest.mark.parametrize(
    "name", ["weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "qweight", "scales"]
)
def test_a_quantized_head_is_refused_by_name(name: str) -> None:
    found = Head.of("a head", {}, {"fc.weight": torch.zeros(2, 4), f"fc.{name}": torch.zeros(2)})
    for method in HEADS:
        with pytest.raises(
            ModelError, match=rf"'a head' is quantized \(fc.{name}\): load the unquantized head"
        ):
            draft.method(method).check(found)


@pytest.mark.parametrize("method", HEADS)
def test_file_is_checked_when_opened(
    method: str, toy: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_head(tmp_path, {}, {"fc.weight": torch.zeros(2, 4), "fc.weight_scale": torch.zeros(2)})
    kind = draft.method(method)
    with pytest.raises(ModelError, match="is quantized"):
        kind(kind.Options(model=folder), toy.engine.target)


def test_quantized_target_around_a_head_is_accepted() -> None:
    names = [
        "model.norm.weight",
        "model.layers.0.mlp.up_proj.qweight",
        "0.0.linear.weight",
        "0.0.linear.bias",
    ]
    draft.method("medusa").check(Head.of("a model", {}, {name: torch.zeros(2, 2) for name in names}))


# ---- what heads learn


@pytest.mark.parametrize("method", ["medusa", "hydra", "dflash"])
def test_only_ranked_trees_update_acceptance_by_rank(method: str, toy: LLM) -> None:
    """The first of several draws is no better than the last."""
    target = toy.engine.target
    drafter = draft.method(method).example(target)
    if method == "hydra":  # whose example has a published tree, and learns nothing
        network = Network.like(target, heads=2)
        drafter = Hydra(
            Hydra.Options(nodes=8), target, Head.of("heads", network.config(), network.state_dict())
        )
    prompt, params = (
        {"prompt_token_ids": [5, 6, 7]},
        SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True),
    )
    for verification, taught in (("rejection", False), ("match", True)):
        before = [list(level) for level in drafter.memory.accuracy]
        llm = toy.variant(None)
        speculation = SpeculativeOptions.of(
            {"method": method, "model": "a head", "verification": verification}
        )
        drafter.target = llm.engine.target_for(speculation)
        llm.engine.use(drafter, speculation)
        out = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
        assert out.speculation.drafted > 0
        assert (drafter.memory.accuracy != before) == taught


# ---- options


@pytest.mark.parametrize("method", HEADS)
def test_draft_tensor_parallel_size_above_one_is_for_decoder_layers(method: str) -> None:
    config = {"method": method, "model": "a head", "num_speculative_tokens": 2}
    for size in (1, 2):
        given = {**config, "draft_tensor_parallel_size": size}
        if size == 1 or method in ("eagle", "eagle3", "mtp", "peagle"):
            assert SpeculativeOptions.of(given).options.draft_tensor_parallel_size == size
        else:
            with pytest.raises(
                ConfigError, match="size must be 1, because one rank runs a head of this kind"
            ):
                SpeculativeOptions.of(given)
