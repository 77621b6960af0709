"""Multi-token prediction layers on the target's kernels."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.drafting.base import Target
from outrider.heads.layer import Block, Pairs, Sizes, rotary_table
from outrider.heads.reader import Reader
from outrider.models.base import Model


class Layer:
    """x = eh_proj [enorm(e); hnorm(g)], then a transformer block."""

    def __init__(
        self, reader: Reader, model: Model, at: str, sizes: Sizes, turn: Tensor, last: Tensor | None
    ) -> None:
        """last: the norm after it, for a layer without its own."""
        hidden = sizes.hidden
        self.backend, self.eps = reader.backend, sizes.eps
        enorm, hnorm, norm_in = (
            reader.vector(f"{at}.{name}.weight", hidden) for name in ("enorm", "hnorm", "input_layernorm")
        )
        self.pairs = Pairs(model, enorm, hnorm, sizes.eps)
        self.eh_proj = reader.linear(f"{at}.eh_proj", hidden, 2 * hidden)
        self.block = Block(reader, at, sizes, hidden, turn, norm_in=norm_in)
        self.norm = reader.vector(f"{at}.norm.weight", hidden) if last is None else last

    def __call__(self, g: Tensor, step_input: StepInput, pool: Pool, at: int) -> Tensor:
        return self.block(self.backend.linear(self.pairs(step_input, g), self.eh_proj), step_input, pool, at)

    def normed(self, o: Tensor) -> Tensor:
        return self.backend.rms_norm(o, self.norm, self.eps)


class Packed:
    """A `Net` of one or several layers; their outputs are [n, hidden], before the last norm."""

    ids: Tensor | None = None

    def __init__(self, reader: Reader, target: Target, prenorm: bool) -> None:
        """prenorm: states are taken before the last norm, the target's and the layers' own."""
        head, self.model, self.backend, self.prenorm = reader.head, target.decoder, reader.backend, prenorm
        spec = self.model.spec
        self.taps: tuple[int, ...] = (spec.layers,) if prenorm else (FINAL,)
        count = sum(name.endswith(".eh_proj.weight") for name in head)
        self.sizes = Sizes.of(head, "layers.0", spec.hidden)
        rotary_dim = int(self.sizes.head_dim * (head.config.get("partial_rotary_factor") or 1))
        turn = rotary_table(head.config, replace(self.sizes, head_dim=rotary_dim), target.max_len)
        last = None
        if "layers.0.norm.weight" not in head:
            last = target.checkpoint.tensors().get("model.norm.weight", spec.hidden)
            last = last.float().to(self.backend.device).contiguous()
        self.slot_bytes = self.sizes.slot_bytes(count, self.model)
        self.layers = [Layer(reader, self.model, f"layers.{i}", self.sizes, turn, last) for i in range(count)]

    def pool(self, slots: int) -> Pool:
        return self.sizes.pool(len(self.layers), slots, self.model)

    def from_states(self, states: Tensor) -> Tensor:
        return states

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor, layer: int = 0) -> Tensor:
        return self.layers[layer](g, step_input, pool, layer)

    def from_output(self, o: Tensor, layer: int = 0) -> Tensor:
        return o if self.prenorm else self.layers[layer].normed(o)

    def logits(self, o: Tensor, layer: int = 0) -> Tensor:
        return self.model.head_logits(self.layers[layer].normed(o))
