"""Optimizers of a run: AdamW, or Muon for the matrices of layers and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

BETAS, MOMENTUM = (0.9, 0.95), 0.95
ITERATIONS, QUINTIC = 5, (3.4445, -4.7750, 2.0315)
SIZE = 0.6  # root mean square of Muon's updates, relative to the rate


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix with singular values near 1, by Newton-Schulz iterations."""
    (a, b, c), tall = QUINTIC, matrix.shape[0] > matrix.shape[1]
    x: Tensor = (matrix.T if tall else matrix) / matrix.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(Optimizer):
    """Orthogonalised Nesterov momentum (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    `torch.optim.Muon` iterates in bfloat16, which took 30 times as long on a CPU without such instructions.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if "moment" not in self.state[p]:
                    self.state[p]["moment"] = torch.zeros_like(p)
                moment = self.state[p]["moment"]
                moment.lerp_(p.grad, 1 - MOMENTUM)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = orthogonalized(p.grad.lerp(moment, MOMENTUM))
                p.sub_(update, alpha=SIZE * max(p.shape) ** 0.5 * group["lr"])


def optimizers(network: nn.Module, vocabulary: int, name: str, rate: float, decay: float) -> list[Optimizer]:
    """name: "adamw" or "muon".  A matrix with a row or column for each token belongs to no layer."""
    named = [(n, p) for n, p in network.named_parameters() if p.requires_grad]
    sizes = {vocabulary, *(len(p) for n, p in named if n.endswith(("lm_head.weight", "embed_tokens.weight")))}
    matrices = [p for _, p in named if name == "muon" and p.ndim == 2 and sizes.isdisjoint(p.shape)]
    chosen = {*matrices}
    adam = AdamW([p for _, p in named if p not in chosen], lr=rate, betas=BETAS, weight_decay=decay)
    return [adam, Muon(matrices, {"lr": rate, "weight_decay": decay})] if matrices else [adam]
