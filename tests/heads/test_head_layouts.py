"""Tables of published names: patterns, both directions, and the tables of all methods."""

from __future__ import annotations

import pytest
import torch

from outrider import draft
from outrider.checkpoints.heads import Head, builtin
from outrider.errors import ModelError
from outrider.heads.base import HeadDrafter
from outrider.heads.layouts import HeadFormat, Layout, fill, flat, matching, parse
from outrider.inspect.heads import format_of

HEADS = [name for name, method in draft.methods().items() if issubclass(method, HeadDrafter)]
TABLE = Layout(
    "test",
    ("extra.{i}.weight",),
    (
        ("extra.{i}.gate.{rest}", None),
        ("extra.{i}.{kind}", "layers.{i+1}.{kind}"),
        ("model.{i+first}.{rest}", "layers.{i}.{rest}"),
        ("out.{blocks}.weight", "lm_head.weight"),
    ),
    ("wrapped.",),
)
# (method, published name, our name, numbers) of what others write
PUBLISHED = [
    ("medusa", "medusa_head.3.1.linear.bias", "3.1.linear.bias", {}),
    ("medusa", "lm_heads.2.weight", "2.lm_head.weight", {}),
    ("medusa", "2.4.weight", "2.lm_head.weight", {"blocks": 4}),
    ("eagle", "fusion_fc.bias", "fc.bias", {}),
    ("eagle", "transformer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", {}),
    ("eagle3", "layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight", {}),
    ("eagle3", "additional_layers.1.hidden_norm.weight", "layers.2.input_layernorm.weight", {}),
    ("mtp", "model.layers.61.shared_head.norm.weight", "layers.0.norm.weight", {"target_layers": 61}),
    ("mtp", "model.mtp_layers.1.input_proj.weight", "layers.1.eh_proj.weight", {}),
    ("mtp", "model.mtp_emb_norm.0.weight", "layers.0.enorm.weight", {}),
    ("redrafter", "lm_head.weight", "lm_head.2.weight", {"blocks": 2}),
    ("mlp_speculator", "emb.2.weight", "emb.2.0.weight", {}),
    ("hydra", "hydra_lm_head.1.weight", "hydra_lm_head.1.weight", {}),
    ("dspark", "markov_head.markov_w1.weight", "markov_w1.weight", {}),
]


def test_patterns_match_whole_names() -> None:
    assert parse("a.{i}.{kind}", "a.12.bias") == {"i": "12", "kind": "bias"}
    for name in ("a.12.bias.x", "x.a.12.bias", "a.b.bias", "a.1.scale", "aX12.bias"):
        assert parse("a.{i}.{kind}", name) is None
    assert parse("a.{i+first}", "a.7", first=5) == {"i": "2", "first": "5"}
    assert parse("a.{i+first}", "a.4", first=5) is None, "a layer before the first"
    assert fill("b.{i+1}.{rest}", {"i": "2", "rest": "x.y"}) == "b.3.x.y"
    with pytest.raises(KeyError):
        fill("b.{j}", {"i": "2"})


@pytest.mark.parametrize(
    ("published", "ours"),
    [
        ("extra.0.weight", "layers.1.weight"),
        ("wrapped.wrapped.extra.4.bias", "layers.5.bias"),
        ("model.9.mlp.weight", "layers.1.mlp.weight"),
        ("out.3.weight", "lm_head.weight"),
        ("extra.0.gate.weight", None),
        ("model.7.mlp.weight", None),
        ("something", None),
    ],
)
def test_table_is_read_and_written(published: str, ours: str | None) -> None:
    assert TABLE.ours(published, first=8) == ours
    if ours is not None:
        bare = published.removeprefix("wrapped.wrapped.")
        assert TABLE.published(ours, first=8, blocks=3) == bare


def test_first_matching_layout_is_chosen() -> None:
    other = Layout("other", ("{rest}",), (("{rest}", "{rest}"),), applies=lambda head: "other" in head.config)
    head_format = HeadFormat((other, TABLE))
    tensors = {"wrapped.extra.0.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    assert head_format.layout_of(Head.of("a", {}, tensors)) is TABLE
    assert head_format.layout_of(Head.of("a", {"other": 1}, tensors)) is other
    assert head_format.layout_of(Head.of("a", {}, {"lm_head.weight": torch.zeros(1)})) is None
    assert set(head_format.translate(Head.of("a", {}, tensors))) == {"layers.1.weight"}


def test_config_of_a_layer_fills_up_the_outer_one() -> None:
    inner = {"rms_norm_eps": 1e-5, "head_dim": 8}
    config = {
        "head_dim": 4,
        "rms_norm_eps": None,
        "model": {"head_dim": 2, "x": 1},
        "transformer_layer_config": inner,
    }
    assert {key: flat(config)[key] for key in ("head_dim", "rms_norm_eps", "x")} == {
        "head_dim": 4,
        "rms_norm_eps": 1e-5,
        "x": 1,
    }


def test_layout_changes_tensors_and_implies_config() -> None:
    turned = Layout(
        "turned",
        ("turned.weight",),
        (("turned.{kind}", "linear.{kind}"),),
        changes=((r"linear\.weight", lambda tensor, config: tensor * config["factor"]),),
        defaults=(("factor", 3), ("side", "left")),
    )
    tensors = {"turned.weight": torch.ones(2, 2), "turned.bias": torch.ones(2)}
    found = HeadFormat((turned,)).translate(Head.of("a", {"factor": 2}, tensors))
    assert found.raw("linear.weight").tolist() == [[2, 2], [2, 2]] and found.raw("linear.bias").tolist() == [
        1,
        1,
    ]
    assert (found.config["factor"], found.config["side"]) == (2, "left") and found.shape("linear.weight") == (
        2,
        2,
    )


def test_tensors_of_unknown_meaning_are_refused_by_kind() -> None:
    head_format = HeadFormat(
        (Layout("any", ("{rest}",), (("{rest}", "{rest}"),)),),
        known=r"fc\.weight",
        variants=(("gru", "a recurrent one"), ("", "another")),
    )
    fc = {"fc.weight": torch.zeros(1)}
    assert set(head_format.translate(Head.of("a", {}, fc))) == {"fc.weight"}
    for name, kind in (("gru.bias", "a recurrent one"), ("something", "another")):
        head = Head.of("a", {}, {**fc, name: torch.zeros(1)})
        with pytest.raises(ModelError, match=rf"{kind}.*has {name}\."):
            head_format.translate(head)
        assert name in head_format.renamed(head)


def test_heads_without_a_known_tensor_or_with_absurd_numbers_are_refused() -> None:
    tensors = {"extra.20000.weight": torch.zeros(1)}
    head_format = HeadFormat((Layout("numbered", ("extra.{i}.weight",), (("extra.{rest}", "{rest}"),)),))
    with pytest.raises(ModelError, match=r"'extra\.20000\.weight' has too large a number"):
        head_format.translate(Head.of("a", {}, tensors))
    with pytest.raises(ModelError, match=r"no extra\.{i}\.weight among its 1 tensors, other"):
        head_format.translate(Head.of("a", {}, {"other": torch.zeros(1)}))


def test_configs_name_the_method() -> None:
    head_format = HeadFormat((), kinds="shift|Shift.*", keys=("shift_",))
    for config in ({"model_type": "shift"}, {"architectures": ["ShiftModel"]}, {"shift_layers": 2}):
        assert head_format.named_in(config)
    assert not head_format.named_in({"model_type": "shifted", "layers": 2, "architectures": None})


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case[0]} {case[1]}")
def test_published_names_translate_both_ways(case: tuple[str, str, str, dict[str, int]]) -> None:
    method, published, ours, numbers = case
    layouts = format_of(method).layouts
    both = [
        layout
        for layout in layouts
        if layout.ours(published, **{"target_layers": 0, "blocks": 0, **numbers}) == ours
        and layout.published(ours, **{"blocks": 0, **numbers}) == published
    ]
    assert both, f"no layout of {method} has this pair"


@pytest.mark.parametrize("method", [name for name in HEADS if f"builtin-{name}" in builtin()])
def test_every_head_has_a_table(method: str) -> None:
    """The built-in head, which is our own export, has one of its layouts, and `outrider models` finds its
    sizes."""
    head, head_format = Head.open(f"builtin-{method}"), format_of(method)
    layout = head_format.layout_of(head)
    assert layout is not None and layout.publisher
    ours = layout.translate(head)
    assert any(True for pattern, _ in head_format.hidden for _ in matching(ours, pattern))
    assert len({one.publisher for one in head_format.layouts}) == len(head_format.layouts)
