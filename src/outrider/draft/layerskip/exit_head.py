"""A trained exit: from the states that leave a layer to those that the target's lm_head reads.

z = norm(x + silu(linear(x)))        x [n, hidden]: input of layer `early_exit` of the target

Without one, an early exit uses the target's last norm, and a target that was not trained for it predicts
badly there.  The layers below, and so the K/V of draft tokens, stay the target's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.validate import is_whole
from outrider.drafting.base import Target
from outrider.errors import ModelError
from outrider.heads.layer import residual
from outrider.heads.outer import lm_logits
from outrider.heads.parts import ResidualBlock, soft_cross_entropy
from outrider.heads.reader import Reader
from outrider.heads.sample import Sample, TargetWeights, mean_loss

TYPE = "early_exit"


class Network(nn.Module):
    """Network for training.  layer: the target's, whose input is read.  norm: initial weights of the norm."""

    def __init__(self, hidden: int, layer: int, norm: Tensor, eps: float) -> None:
        super().__init__()
        self.layer = layer
        self.block, self.norm = ResidualBlock(hidden, hidden), nn.RMSNorm(hidden, eps)
        nn.init.zeros_(self.block.linear.weight)
        self.norm.weight.data.copy_(norm)

    def config(self) -> dict[str, Any]:
        return {"model_type": TYPE, TYPE: self.layer, "rms_norm_eps": self.norm.eps}

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution of the same token."""
        rows = sample.places(0, len(sample.tokens))
        x = self.norm(self.block(sample.states[self.layer][rows]))
        return mean_loss(soft_cross_entropy(outer.logits(x), sample.logits[rows]))


class ExitHead:
    """The network on the target's kernels.  layer: number of the target's layers that are run."""

    def __init__(self, name: str, target: Target) -> None:
        """Raise ModelError for a file that is no exit of this target."""
        head, self.model = Head.open(name), target.decoder
        layer, layers = head.config.get(TYPE), self.model.spec.layers
        if not is_whole(layer, 1, layers - 1):
            raise ModelError(
                f"{name!r} is no exit for this target: its {TYPE} is {layer!r}, and a number in "
                f"1 … {layers - 1} is needed."
            )
        self.layer, hidden = int(str(layer)), self.model.spec.hidden
        reader = Reader(head, self.model.backend)
        self.blocks = [reader.linear("block.linear", hidden, hidden)]
        self.norm = reader.vector("norm.weight", hidden)
        self.eps = float(head.config.get("rms_norm_eps") or 1e-6)

    def logits(self, x: Tensor) -> Tensor:
        """float32 [n, V] of the states x [n, hidden] that leave the last layer that is run."""
        run = self.model.backend
        z = residual(run, x.to(run.activations), self.blocks)
        return lm_logits(self.model, run.rms_norm(z.contiguous(), self.norm, self.eps))
