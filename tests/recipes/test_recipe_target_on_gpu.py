"""The target's run on one GPU: its loss is that of the other trainer, its rate ends with the time."""

import argparse
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from recipes.builtin import corpus, gpu_target
from recipes.builtin.model import TARGET, Shape, build
from recipes.builtin.train import Trainer, loss_weights

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, mlp=48, vocabulary=300, head_size=16, context=64)


def small_model():
    model = build(SHAPE, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def test_loss_and_gradients_are_those_of_the_other_trainer():
    model, rows = small_model(), np.random.RandomState(0).randint(6, 300, (3, 64))
    ids, weights = torch.from_numpy(rows), torch.from_numpy(loss_weights(rows, 0.1))
    other = Trainer.__new__(Trainer)
    other.model, other.device, other.teacher = model, "cpu", None
    found = []
    for loss_of in (gpu_target.Loss(model, 64, "cpu"), other._loss):
        model.zero_grad()
        loss = loss_of(ids, weights)
        loss.backward()
        found.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))
    (mine, gradients), (wanted, expected) = found
    assert mine == pytest.approx(wanted, rel=2e-3)
    for gradient, wished in zip(gradients, expected):
        assert (gradient - wished).norm() < 0.05 * wished.norm()


def test_rate_rises_stays_and_ends_with_the_time():
    rates = [gpu_target.rate_at(share / 1000) for share in range(1001)]
    assert 0 < rates[0] < rates[5] < 1 and max(rates) == 1 and rates[-1] == 0
    assert rates[20] == rates[300] == 1 > rates[600] > rates[900]


def test_training_begins_with_the_shipped_weights():
    shipped = gpu_target.initial_model("builtin").state_dict()
    fresh = gpu_target.initial_model(None).state_dict()
    assert shipped.keys() == fresh.keys()
    assert all(not torch.equal(shipped[name], fresh[name]) for name in shipped if "proj" in name)


def test_a_grown_target_computes_the_same_and_its_new_layers_learn():
    small = gpu_target.initial_model("builtin")
    large = gpu_target.initial_model("builtin", replace(TARGET, layers=16, mlp=1280))
    ids = torch.from_numpy(np.random.RandomState(0).randint(6, 8192, (2, 48)))
    with torch.no_grad():
        wanted, found = small(ids).logits, large(ids).logits
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()
    loss_of, weights = gpu_target.Loss(large, 48, "cpu"), torch.full(ids.shape, 1 / ids.numel())
    optimizer, losses = torch.optim.Adam(large.parameters(), 1e-3), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(ids, weights)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    layers = large.model.layers
    new = [part for i in range(1, 16, 2) for part in (layers[i].self_attn.o_proj, layers[i].mlp.down_proj)]
    wider = [layers[i].mlp.down_proj.weight[:, 1024:] for i in range(0, 16, 2)]
    assert all(part.abs().max() > 0 for part in [*wider, *(each.weight for each in new)])


@pytest.mark.parametrize(("count", "parts_of"), [(5, [2, 2, 1]), (2, [2])])
def test_batches_take_rows_of_both_sources_in_order(tmp_path, count, parts_of):
    rows = np.full((8, 1024), 7, np.uint16)
    np.save(tmp_path / "prose.npy", rows)
    for shard in range(3):
        np.save(corpus.shard_path(tmp_path, shard), rows + 1 + shard)
    given = argparse.Namespace(
        corpus=tmp_path, rows=count, micro=2, prose_share=0.2, first_shard=0, shard_rows=8, device="cpu"
    )
    batches = gpu_target.Batches(given)
    for step in range(3):
        parts = list(batches.parts())
        assert [len(ids) for ids, _ in parts] == parts_of
        seen = sorted(int(row[0]) for ids, _ in parts for row in ids)
        first = (count - 1) * step
        assert seen == sorted([7, *(8 + (first + i) // 8 for i in range(count - 1))])
        assert sum(float(weights[:, 1:].sum()) for _, weights in parts) == pytest.approx(1)


def test_a_generator_that_ends_too_soon_ends_the_run(tmp_path, monkeypatch):
    np.save(tmp_path / "prose.npy", np.full((8, 1024), 7, np.uint16))
    given = argparse.Namespace(
        corpus=tmp_path, rows=5, micro=2, prose_share=0.2, first_shard=0, shard_rows=8, device="cpu"
    )
    monkeypatch.setattr(gpu_target, "CHECKED_EVERY", 0.05)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    with pytest.raises(RuntimeError, match="no more task rows"):
        next(gpu_target.Batches(given, [ended]).parts())
