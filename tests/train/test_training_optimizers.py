"""Muon beside torch's, and which weights it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outrider.draft.medusa import Network as Medusa
from outrider.draft.mlp_speculator import Network as Speculator
from outrider.draft.redrafter import Network as Redrafter
from outrider.train.optimizers import SIZE, Muon, optimizers, orthogonalized


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_orthogonalized_keeps_directions_and_evens_out_sizes(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = u.T @ orthogonalized(matrix) @ v.T
    assert float(found.diagonal().min()) > 0.6 and float(found.diagonal().max()) < 1.3
    assert float((found - found.diagonal().diag()).abs().max()) < 1e-3


def test_updates_are_those_of_torch() -> None:
    """torch iterates in bfloat16, and calls 0.2 of the root mean square of AdamW's updates a rate of 1."""
    torch.manual_seed(2)
    start, gradients, ratio = torch.randn(16, 32), [torch.randn(16, 32) for _ in range(4)], SIZE / 0.2
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    pair = (
        Muon([ours], {"lr": 0.05, "weight_decay": 0.1 * ratio}),
        torch.optim.Muon([theirs], lr=0.05 * ratio, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in pair:
            optimizer.step()
    assert float((theirs - start).detach().norm()) > 1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)


def test_muon_trains_the_matrices_of_layers() -> None:
    parts = {
        "embed_tokens": nn.Embedding(9, 4),
        "mlp": nn.Linear(4, 4),
        "lm_head": nn.Linear(4, 9, bias=False),
    }
    network = nn.ModuleDict(parts)
    network["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    (adam,), (rest, muon) = (optimizers(network, 9, name, 1e-3, 0.0) for name in ("adamw", "muon"))
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (adam, rest, muon)]
    assert sizes == [[4], [3], [1]]
    assert muon.param_groups[0]["params"][0] is network["mlp"].weight


def test_muon_trains_no_table_of_tokens_under_any_name() -> None:
    """Also those of a smaller vocabulary; the residual blocks before a last linear are layers."""
    made = {
        "mlp_speculator": (Speculator(12, 8, 40, n_predict=2), {"proj.0", "proj.1"}),
        "medusa": (Medusa(12, 40, heads=1), {"0.0.linear"}),
        "redrafter": (Redrafter(12, 40, 1), {"lm_head.0.linear", "rnn_u", "rnn_w"}),
    }
    for network, layers in made.values():
        _, muon = optimizers(network, 40, "muon", 1e-3, 0.0)
        names = {id(p): n.removesuffix(".weight") for n, p in network.named_parameters()}
        assert {names[id(p)] for p in muon.param_groups[0]["params"]} == layers
    small = nn.ModuleDict(
        {"lm_head": nn.Linear(12, 7), "markov_w2": nn.Linear(3, 7), "fc": nn.Linear(12, 12)}
    )
    assert optimizers(small, 40, "muon", 1e-3, 0.0)[1].param_groups[0]["params"] == [small["fc"].weight]


def test_a_matrix_that_no_loss_has_read_keeps_its_values() -> None:
    network = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    before = network["unused"].weight.detach().clone()
    network["used"](torch.ones(1, 4)).sum().backward()
    for optimizer in optimizers(network, 9, "muon", 1e-3, 0.5):
        optimizer.step()
    assert torch.equal(network["unused"].weight, before)
