"""Losses on one fixed batch, beside the formulas of the reference trainers written out."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eagle3_heads import random_network
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.draft.dspark import Network as Block
from outrider.draft.eagle import Network as Eagle
from outrider.draft.griffin import Network as Griffin
from outrider.draft.hydra import Network as Hydra
from outrider.draft.kangaroo import Network as Kangaroo
from outrider.draft.medusa import Network as Medusa
from outrider.draft.mlp_speculator import Network as Speculator
from outrider.draft.mtp import Network as Mtp
from outrider.draft.redrafter import Network as Redrafter
from outrider.heads.layer import Sizes
from outrider.heads.parts import acceptance_loss, rotary_angles
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.tapped_parts import Rows, attend_to_paths

T, H, V, TAPS = 16, 32, 40, (1, 2, 3)
SIZES = Sizes(H, 48, 4, 2, 8)


def batch(masked: bool) -> tuple[Sample, TargetWeights]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tokens = torch.randint(V, (T,), generator=generator)
    states, lm_head = {tap: normal(T, H) for tap in (FINAL, *TAPS)}, normal(V, H)
    mask = torch.arange(T) >= 4 if masked else None
    sample = Sample(tokens, states, states[FINAL] @ lm_head.T, mask)
    return sample, TargetWeights(normal(V, H), lm_head)


def test_eagle_equals_the_formulas_of_its_authors_trainer() -> None:
    """vloss: smooth L1, mean over the state, then over the mask; ploss: soft cross entropy; 1.0 and 0.1."""
    torch.manual_seed(1)
    network = Eagle(SIZES, V).eval()
    for masked in (False, True):
        sample, outer = batch(masked)
        predict = network(outer.embedding[sample.tokens[1:]], sample.states[FINAL][:-1])[None]
        target = sample.states[FINAL][None, 1:]
        loss_mask = torch.ones(1, T - 1, 1) if sample.mask is None else sample.mask[None, 1:, None].float()
        target_p = nn.Softmax(dim=2)(target @ outer.lm_head.T)
        plogp = target_p * nn.LogSoftmax(dim=2)(predict @ outer.lm_head.T)
        ploss = -torch.sum(torch.sum(loss_mask * plogp, 2)) / (loss_mask.sum() + 1e-5)
        criterion = nn.SmoothL1Loss(reduction="none")
        vloss = torch.sum(torch.mean(loss_mask * criterion(predict, target), 2)) / (loss_mask.sum() + 1e-5)
        torch.testing.assert_close(network.loss(sample, outer), vloss + 0.1 * ploss, rtol=1e-5, atol=1e-5)


def test_eagle3_equals_the_formulas_of_its_authors_trainer() -> None:
    """The reference's means are over all places, ours over those that count."""
    ids = tuple(range(0, V, 3))
    network = random_network(SIZES, V, TAPS, ids)
    network.steps, network.decay = 3, 0.8
    for masked in (False, True):
        sample, outer = batch(masked)
        states = torch.cat([sample.states[tap] for tap in TAPS], dim=-1)
        tokens = torch.cat([sample.tokens, torch.zeros(2, dtype=torch.int64)])
        total = torch.zeros(())
        for step, logits in enumerate(
            map(network.logits, network.outputs(states, tokens, outer.embedding, 3))
        ):
            loss_mask, target = torch.zeros(1, T - 1, 1), torch.zeros(1, T - 1, V)
            for place in range(T - 1 - step):
                counted = sample.mask is None or sample.mask[place + step + 1]
                loss_mask[0, place], target[0, place] = float(counted), sample.logits[place + step + 1]
            position_mask = network.t2d[target.argmax(-1)][..., None].int() * loss_mask
            target_p = nn.Softmax(dim=2)(target[..., network.t2d].float())
            reference = -torch.sum(position_mask * target_p * nn.LogSoftmax(dim=2)(logits[None]), 2).mean()
            total = total + 0.8**step * reference * (T - 1) / position_mask.sum().clamp_min(1)
        assert total > 0
        torch.testing.assert_close(network.loss(sample, outer), total, rtol=1e-5, atol=1e-5)


def test_kangaroo_equals_the_formulas_of_its_authors_trainer() -> None:
    """Its input is the state of the exit, its target the last state, both at the place that predicts."""
    torch.manual_seed(1)
    network = Kangaroo(SIZES, V, 2)
    (layer,), causal = network.layers, torch.ones(T, T, dtype=torch.bool).tril()
    for masked in (False, True):
        sample, outer = batch(masked)
        x = sample.states[2]
        angles = rotary_angles(torch.arange(T), SIZES.head_dim)
        attended = layer.self_attn(layer.input_layernorm(x), angles, causal)
        out_head = network.norm(x + attended) @ outer.lm_head.T
        target_p = nn.Softmax(dim=1)(sample.states[FINAL] @ outer.lm_head.T)
        loss_mask = torch.ones(T, 1) if sample.mask is None else sample.mask[:, None].float()
        plogp = target_p * nn.LogSoftmax(dim=1)(out_head)
        loss = -torch.sum(torch.sum(loss_mask * plogp, 1)) / loss_mask.sum()
        torch.testing.assert_close(network.loss(sample, outer), loss, rtol=1e-5, atol=1e-5)


def test_attention_to_paths_equals_a_mask_over_all_keys() -> None:
    torch.manual_seed(2)
    q, n = torch.randn(4, 6, 8), 6
    keys = [(torch.randn(2, n, 8), torch.randn(2, n, 8)) for _ in range(3)]
    k, v = (torch.cat(parts, dim=1)[None] for parts in zip(*keys))
    own = torch.eye(n, dtype=torch.bool).repeat(1, 2)
    mask = torch.cat([torch.ones(n, n, dtype=torch.bool).tril(), own], dim=-1)
    expected = nn.functional.scaled_dot_product_attention(q[None], k, v, attn_mask=mask, enable_gqa=True)[0]
    torch.testing.assert_close(
        attend_to_paths(q, keys, torch.ones(n, n, dtype=torch.bool).tril()), expected, rtol=1e-5, atol=1e-5
    )


def test_the_acceptance_loss_is_that_of_rejection_sampling() -> None:
    """-log of the sum of min(p, q), token by token; 0 for the target itself."""
    torch.manual_seed(3)
    ours, theirs = torch.randn(4, 9), torch.randn(4, 9)
    p, q = theirs.softmax(-1).tolist(), ours.softmax(-1).tolist()
    expected = [-math.log(sum(map(min, one, other))) for one, other in zip(p, q)]
    assert acceptance_loss(ours, theirs).tolist() == pytest.approx(expected, rel=1e-5)
    assert float(acceptance_loss(theirs, theirs).abs().max()) < 1e-6
    apart = torch.tensor([[0.0, 90.0]], requires_grad=True)
    acceptance_loss(apart, torch.tensor([[90.0, 0.0]])).sum().backward()
    assert apart.grad is not None and float(apart.grad.abs().max()) > 0.1, "nothing in common"
    network = random_network(SIZES, V, TAPS)
    plain = network.loss(*batch(True))
    network.row_loss = acceptance_loss
    assert 0 < network.loss(*batch(True)) < plain


def test_places_outside_answers_do_not_count() -> None:
    """Losses of an answer stay what they are if the target's logits in the prompt change."""
    torch.manual_seed(1)
    sample, outer = batch(True)
    assert sample.mask is not None
    changed = sample.logits.clone()
    changed[~sample.mask] = torch.randn(int((~sample.mask).sum()), V) * 9
    other = Sample(sample.tokens, sample.states, changed, sample.mask)
    for network in (Eagle(SIZES, V).eval(), random_network(SIZES, V, TAPS)):
        assert torch.equal(network.loss(sample, outer), network.loss(other, outer))


@pytest.mark.parametrize(("counted", "share"), [((5, 12, 13), 1 / 3), ((7, 8, 10), 0.0)])
def test_texts_behind_one_another_have_the_loss_of_each(counted: tuple[int, ...], share: float) -> None:
    """The mean over the places of all.  What the first tokens of a text follow is not the text before it."""
    torch.manual_seed(4)
    (sample, outer), sizes = batch(True), [7, 9]
    mask = torch.zeros(T, dtype=torch.bool)
    mask[list(counted)] = True
    parts = [
        Sample(
            sample.tokens.split(sizes)[i],
            {which: state.split(sizes)[i] for which, state in sample.states.items()},
            sample.logits.split(sizes)[i],
            mask.split(sizes)[i],
        )
        for i in range(2)
    ]
    eagle3 = random_network(SIZES, V, TAPS)
    eagle3.steps = 3
    networks = (
        eagle3,
        Medusa(H, V, 3),
        Hydra(H, V, 2),
        Redrafter(H, V, 2, H),
        Eagle(SIZES, V).eval(),
        Griffin(SIZES, V, steps=1),
        Kangaroo(SIZES, V, 2),
        Mtp(SIZES, V, 4, steps=2),
        Speculator(H, 24, V),
        Block(SIZES, V, TAPS, V - 1, layers=2, block=2),
    )
    for network in networks:
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.1)
        first, second = (network.loss(part, outer) for part in parts)
        joined = network.loss(replace(sample, mask=mask, lengths=sizes), outer)
        expected = share * first + (1 - share) * second
        torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", [(), (7, 9)])
def test_losses_need_no_value_from_a_device(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device has none, as a GPU that is still computing; and it refuses operands of two devices."""
    monkeypatch.setattr(Sample, "uniforms", lambda self, width: torch.rand(T, width, device="meta"))
    sample, outer = batch(True)
    mask = sample.mask
    moved = replace(
        sample,
        tokens=sample.tokens.to("meta"),
        states={which: state.to("meta") for which, state in sample.states.items()},
        logits=sample.logits.to("meta"),
        mask=mask,
        lengths=lengths,
    )
    outer = TargetWeights(outer.embedding.to("meta"), outer.lm_head.to("meta"))
    networks = (
        random_network(SIZES, V, TAPS, tuple(range(0, V, 3))),
        Medusa(H, V, 3),
        Hydra(H, V, 2, prefix=None),
        Redrafter(H, V, 2, H),
        Eagle(SIZES, V),
        Griffin(SIZES, V, steps=2),
        Kangaroo(SIZES, V, 2),
        Mtp(SIZES, V, 4, steps=2),
        Speculator(H, 24, V),
        Block(SIZES, V, TAPS, V - 1, layers=1, block=2),
    )
    for network in networks:
        loss = network.to("meta").loss(moved, outer)
        loss.backward()
        assert loss.device.type == "meta" and all(p.grad is not None for p in network.parameters())


def test_random_numbers_of_a_text_do_not_depend_on_the_texts_beside_it() -> None:
    """EAGLE's noise and DFlash's anchors."""
    torch.manual_seed(6)
    (sample, outer), sizes, seeds = batch(True), [7, 9], [3, 8]
    mask = torch.ones(T, dtype=torch.bool)
    mask[[6, 15]] = False
    eagle = Eagle(SIZES, V).train()
    dflash = Block(SIZES, V, TAPS, V - 1, layers=1, block=2)
    for network, count in ((eagle, lambda size: size - 1), (dflash, lambda size: 3)):
        joined = replace(sample, mask=mask, lengths=sizes, seeds=seeds)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("outrider.heads.block_parts.ANCHORS", 3)
            expected, total = torch.zeros(()), 0
            for i, size in enumerate(sizes):
                part = Sample(
                    sample.tokens.split(sizes)[i],
                    {which: state.split(sizes)[i] for which, state in sample.states.items()},
                    sample.logits.split(sizes)[i],
                    mask.split(sizes)[i],
                    seeds=seeds[i : i + 1],
                )
                weight = count(size - (network is eagle))
                expected, total = expected + weight * network.loss(part, outer), total + weight
            torch.testing.assert_close(network.loss(joined, outer), expected / total, rtol=1e-5, atol=1e-5)


def test_rows_outside_answers_are_not_computed() -> None:
    """What is left out changes no number."""
    sample, outer = batch(True)
    states = torch.cat([sample.states[tap] for tap in TAPS], dim=-1)
    network = random_network(SIZES, V, TAPS)
    whole = network.outputs(states, sample.tokens, outer.embedding, 3)
    some = torch.tensor([2, 5, 6])
    part = network.outputs(
        states, sample.tokens, outer.embedding, 3, Rows.of(some, [T - 3], torch.device("cpu"))
    )
    for one, other in zip(whole, part, strict=True):
        torch.testing.assert_close(one[some], other)


@torch.no_grad()
def test_the_confidence_of_a_part_of_the_vocabulary_learns_the_true_acceptance() -> None:
    """q has the head's tokens only, p has all: p of the others is lost."""
    torch.manual_seed(1)
    ids = tuple(range(0, V, 4))
    network = Block(SIZES, V, TAPS, V - 1, layers=1, block=3, ids=ids, confidence=True).eval()
    sample, outer = batch(False)
    flat = replace(sample, logits=torch.zeros(T, V))
    goals, given = list[Tensor](), F.binary_cross_entropy_with_logits

    def listening(logit: Tensor, goal: Tensor, **options: Any) -> Tensor:
        goals.append(goal)
        return given(logit, goal, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "binary_cross_entropy_with_logits", listening)
        network.loss(flat, outer)
    assert goals[0].max() <= len(ids) / V + 1e-6 and goals[0].min() > 0


def test_a_bias_of_the_lm_head_is_no_part_of_its_weight() -> None:
    weight, bias = torch.randn(V, H), torch.randn(V)
    model: Any = SimpleNamespace(
        spec=SimpleNamespace(hidden=H, vocabulary=V),
        backend=SimpleNamespace(activations=torch.float32),
        device="cpu",
        head_logits=lambda x: x @ weight.T + bias,
        embed=lambda ids: torch.zeros(len(ids), H),
    )
    outer, x = TargetWeights.of(model), torch.randn(3, H)
    torch.testing.assert_close(outer.lm_head, weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(outer.logits(x), model.head_logits(x), rtol=1e-4, atol=1e-4)
