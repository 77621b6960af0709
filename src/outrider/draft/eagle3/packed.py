"""The network of an EAGLE-3 head on the target's kernels.

g = fc(states of the target), or its own last output
x = g + attend(qkv([norm(e); norm(g)]));  x += mlp(norm(x))      e: embedding of the next token, comes first
logits = lm_head(norm(x)) over the head's own tokens;            output: x, before `norm`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.cache.pool import Pool
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.draft.eagle3.layouts import Facts
from outrider.drafting.base import Target
from outrider.drafting.vocab.mismatch import PADDING
from outrider.errors import ModelError
from outrider.heads.layer import Block, Pairs, Sizes, rotary_table
from outrider.heads.reader import Reader
from outrider.heads.recurrent import config_flag
from outrider.heads.vocabulary import target_ids

CHUNK = 4096  # tokens whose embeddings are compared at once


class Packed:
    def __init__(self, reader: Reader, target: Target, facts: Facts) -> None:
        """reader: of a head with normalized names.  Raises ModelError where a tensor does not fit."""
        head, h = reader.head, facts.hidden
        self.model, self.backend, self.facts, self.reader = target.decoder, reader.backend, facts, reader
        self.taps, self.ids = facts.taps, target_ids(head, target.vocabulary)
        self._read_states(facts.taps, target.decoder.spec.hidden)
        sizes = Sizes.of(head, "midlayer", h)
        turn = rotary_table(head.config, sizes, target.max_len)
        token, state = (
            reader.vector(f"midlayer.{name}.weight", h) for name in ("input_layernorm", "hidden_norm")
        )
        self.first = Block(reader, "midlayer", sizes, 2 * h, turn)
        self.above = [self._layer(f"layers.{i}", sizes, turn) for i in range(1, facts.layers)]
        self.norm = reader.vector("norm.weight", h) if facts.head_normed or facts.output_normed else None
        self.pairs = Pairs(target.decoder, token, state, facts.eps, self._embedding(target))
        self.lm_head = self._lm_head(target)
        self.sizes, self.slot_bytes = sizes, sizes.slot_bytes(facts.layers, target.decoder)

    def pool(self, slots: int) -> Pool:
        return self.sizes.pool(self.facts.layers, slots, self.model)

    def from_states(self, states: Tensor) -> Tensor:
        """g [n, h] of the target's states [n, taps * hidden]."""
        run, eps = self.backend, self.facts.eps
        x = states.contiguous()
        if self.norm_taps is not None:
            each, together = self.norm_taps
            x = (run.rms_norm(x.view(-1, len(each)), each, eps).view(len(x), -1) * together).to(x.dtype)
        if self.norm_fc is not None:
            x = run.rms_norm(x, self.norm_fc, eps)
        return x if self.fc is None else run.linear(x, self.fc)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        """x [n, h]; g may be changed."""
        u = self.pairs(step_input, g)
        x = self.first(
            u[:, self.facts.hidden :].clone() if self.facts.residual_normed else g, step_input, pool, 0, u
        )
        for layer, block in enumerate(self.above, 1):
            x = block(x, step_input, pool, layer)
        return x

    def from_output(self, o: Tensor) -> Tensor:
        return self._normed(o) if self.facts.output_normed else o

    def logits(self, o: Tensor) -> Tensor:
        x = self._normed(o) if self.facts.head_normed else o.contiguous()
        if self.lm_head is None:
            out = self.model.head_logits(x)
        else:
            out = self.backend.linear(x, self.lm_head).float()
        return out if self.facts.scale == 1.0 else out * self.facts.scale

    def _normed(self, x: Tensor) -> Tensor:
        assert self.norm is not None
        return self.backend.rms_norm(x.contiguous(), self.norm, self.facts.eps)

    def _layer(self, at: str, first: Sizes, turn: Tensor) -> Block:
        """A further layer: an ordinary block."""
        sizes = Sizes.of(self.reader.head, at, first.hidden)
        if (sizes.kv_heads, sizes.head_dim) != (first.kv_heads, first.head_dim):
            raise ModelError(
                f"{self.reader.head.name!r}: {at} has other K/V heads than its first layer, which is not "
                "supported."
            )
        norm = self.reader.vector(f"{at}.input_layernorm.weight", first.hidden)
        return Block(self.reader, at, sizes, first.hidden, turn, norm_in=norm)

    def _read_states(self, taps: tuple[int, ...], width: int) -> None:
        reader, head, wide = self.reader, self.reader.head, len(taps) * width
        self.fc = None if taps == (FINAL,) else reader.linear("fc", self.facts.hidden, wide)
        if self.fc is None and width != self.facts.hidden:
            raise ModelError(
                f"{head.name!r} does not fit the target: it has no fc, a width of {self.facts.hidden}, and "
                f"the target {width}."
            )
        asked = bool(head.config.get("fc_norm")) or "fc_norm.0.weight" in head
        self.norm_taps = None
        if asked:
            each = torch.cat([reader.vector(f"fc_norm.{i}.weight", width) for i in range(len(taps))])
            self.norm_taps = torch.ones(width, device=each.device), each
        before = bool(head.config.get("norm_before_fc")) or "input_norm.weight" in head
        self.norm_fc = reader.vector("input_norm.weight", wide) if before else None

    def _embedding(self, target: Target) -> Any:
        """None for the target's own."""
        head, h = self.reader.head, self.facts.hidden
        width = target.decoder.embed([0]).shape[1]
        if "embed_tokens.weight" not in head:
            if width != h:
                raise ModelError(
                    f"{head.name!r} does not fit the target: it has no embed_tokens, a width of {h}, and the "
                    f"target embeds in {width}."
                )
            return None
        rows = head.shape("embed_tokens.weight")[0]
        if rows < target.vocabulary:
            raise ModelError(
                f"{head.name!r} does not fit the target: it embeds {rows} tokens, and the target has "
                f"{target.vocabulary}."
            )
        weight = head.get("embed_tokens.weight", rows, h)
        return None if width == h and _same(weight, target) else self.backend.pack(weight)

    def _lm_head(self, target: Target) -> Any:
        """None for the target's own."""
        head, h = self.reader.head, self.facts.hidden
        if "lm_head.weight" in head or self.ids is not None:
            rows = head.shape("lm_head.weight")[0]
            listed = None if self.ids is None else len(self.ids)
            if rows + PADDING <= target.vocabulary if listed is None else rows != listed:
                tokens = "no d2t" if listed is None else f"a list of {listed}"
                raise ModelError(
                    f"{head.name!r} does not fit the target: an lm_head of {rows} tokens, {tokens}; V is "
                    f"{target.vocabulary}."
                )
            return self.reader.outer.linear("lm_head", rows, h)
        if config_flag(head.config, "tie_word_embeddings", False) and "embed_tokens.weight" in head:
            return self.reader.outer.linear("embed_tokens", head.shape("embed_tokens.weight")[0], h)
        if target.decoder.spec.hidden != h:
            raise ModelError(
                f"{head.name!r} does not fit the target: no lm_head, a width of {h}; the target's "
                f"{target.decoder.spec.hidden}."
            )
        return None


def _same(weight: Tensor, target: Target) -> bool:
    """Whether a head's embedding is a copy of the target's, which need not be kept twice."""
    model = target.decoder
    for first in range(0, target.vocabulary, CHUNK):
        rows = model.embed(range(first, min(first + CHUNK, target.vocabulary)))
        if not torch.equal(rows.float().cpu(), weight[first : first + len(rows)].to(model.dtype).float()):
            return False
    return True
