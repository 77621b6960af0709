"""Domino: a block (heads/blocks.py) whose logits a recurrent network over its tokens corrects.

    logits + up silu(down [x; s])      x: state of a position; s: of a GRU over the tokens before

Published files are a block's in SpecForge's format, with prefix_gru, embed_proj, and in dflash_config
projector_type "domino", pure_draft_prefix_len, and shift_label: predict from the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.validate import whole
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.block_layouts import block_format
from outrider.heads.block_parts import BlockNetwork
from outrider.heads.blocks import BlockDrafter, BlockOptions
from outrider.heads.corrections import Correction, CorrectionOutput
from outrider.heads.outer import embed, lm_logits
from outrider.heads.reader import Reader
from outrider.models.rowwise import by_rows

ARCHITECTURE, TYPE = "DominoDraftModel", "domino"
FORMAT = block_format(
    ARCHITECTURE,
    rows=(
        ("prefix_gru.weight_ih_l0", "domino.input.weight"),
        ("prefix_gru.weight_hh_l0", "domino.state.weight"),
        ("embed_proj.0.weight", "domino.down.weight"),
        ("embed_proj.2.weight", "domino.up.weight"),
    ),
    known=r"domino\.(input|state|down|up)\.weight",
    variants=(("gru|domino|embed_proj", "Domino with other layers"),),
    prefixes=("domino_head.",),
)


class Network(BlockNetwork):
    """Network for training, with the names and config of SpecForge's files."""

    def __init__(self, *block: Any, width: int, **options: Any) -> None:
        """block, options: as of `BlockNetwork`.  width: of the recurrent state."""
        super().__init__(*block, **options)
        hidden, narrow = self.sizes.hidden, max(1, width // 4)  # as published: 256 of a width of 1024
        self.width = width
        self.prefix_gru = nn.GRU(hidden, width, batch_first=True, bias=False)
        down = nn.Linear(hidden + width, narrow, bias=False)
        up = nn.Linear(narrow, self.outputs, bias=False)
        nn.init.zeros_(up.weight)
        self.embed_proj = nn.Sequential(down, nn.SiLU(), up)

    def config(self) -> dict[str, Any]:
        own = {
            "projector_type": TYPE,
            "pure_draft_prefix_len": 0,
            "shift_label": False,
            "gru_hidden_dim": self.width,
            "emb_dim": self.embed_proj[0].out_features,
            "mask_token_id": self.mask,
            "target_layer_ids": [tap - 1 for tap in self.taps],
        }
        outer = {"architectures": [ARCHITECTURE], "block_size": self.block, "dflash_config": own}
        return {**self.layer_config(), **outer}

    def correct(
        self, logits: Tensor, x: Tensor, before: Tensor, embedding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        state, _ = self.prefix_gru(embedding[before[:, 1:]])
        more = self.embed_proj(torch.cat([x[:, 1:], state], dim=-1))
        return torch.cat([logits[:, :1], logits[:, 1:] + more], dim=1), None


class Recurrence(Correction):
    """Correction by a GRU over the tokens of the block.  pure: so many first levels are not corrected."""

    def __init__(
        self, reader: Reader, target: Target, hidden: int, outputs: int | None, embedding: object
    ) -> None:
        head, self.model, self.embedding = reader.head, target.decoder, embedding
        self.backend, (_, self.width) = reader.backend, reader.matrix_shape("domino.state.weight")
        narrow, second = (reader.matrix_shape(f"domino.{name}.weight")[0] for name in ("down", "up"))
        self.input = reader.linear("domino.input", 3 * self.width, hidden)
        self.state = reader.linear("domino.state", 3 * self.width, self.width)
        self.down = reader.linear("domino.down", narrow, hidden + self.width)
        outputs = max(target.vocabulary, second) if outputs is None else outputs
        self.up = reader.outer.linear("domino.up", outputs, narrow)
        self.pure = head.config.get("pure_draft_prefix_len", 0)
        whole(0).check(self.pure, f"pure_draft_prefix_len of {head.name!r}", ModelError)

    def begin(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        return torch.zeros(len(tokens), self.width, dtype=before.dtype, device=before.device)

    def __call__(
        self, level: int, tokens: Sequence[int], x: Tensor, state: Tensor, logits: Tensor
    ) -> CorrectionOutput:
        run = self.backend
        embedded = embed(self.model, tokens, self.embedding).to(x.dtype)
        mine = [part.contiguous() for part in run.linear(embedded, self.input).chunk(3, dim=-1)]
        old = [part.contiguous() for part in run.linear(state, self.state).chunk(3, dim=-1)]
        reset, update = (by_rows(torch.sigmoid, mine[i] + old[i]) for i in range(2))
        state = (1 - update) * by_rows(torch.tanh, mine[2] + reset * old[2]) + update * state
        if level < self.pure:
            return CorrectionOutput(None, state)
        narrow = by_rows(F.silu, run.linear(torch.cat([x, state], dim=-1), self.down))
        return CorrectionOutput(lm_logits(self.model, narrow, self.up), state)


class Domino(BlockDrafter):
    FORMAT = FORMAT
    kind, tensors = TYPE, "prefix_gru|embed_proj"
    Options = BlockOptions

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, head)
        if "domino.state.weight" in self.head:
            self.correction = Recurrence(self.reader, target, self.width, self.outputs, self.embedding)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a tree of 8."""
        return cls(cls.Options(nodes=8), target, random_head(Network.like, target, block=5, width=8))
