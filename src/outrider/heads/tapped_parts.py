"""Common parts of the networks of EAGLE-3 and P-EAGLE, for training and export."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.core.device import to_device
from outrider.core.ragged import Ragged
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import (
    Attention,
    Layer,
    register_vocabulary,
    rotary_angles,
    sizes_config,
    small_sizes,
)
from outrider.heads.tapped import TAPS, default_taps

Keys = list[tuple[Tensor, Tensor]]  # keys and values of the steps so far


@dataclass(frozen=True)
class Rows:
    """The places whose paths are computed, of texts that follow one another.

    places: int64 [m], ascending.  offsets: int64 [n], the number of every place within its text.
    rows, texts: the rows and the places of the texts.  seen: bool [B, 1, M, L], what a row attends to.
    """

    places: Tensor
    offsets: Tensor
    rows: Ragged
    texts: Ragged
    seen: Tensor

    @staticmethod
    def of(places: Tensor, lengths: Sequence[int], device: torch.device) -> Rows:
        """places: on the host, one or more.  lengths: places of each text."""
        offsets = torch.cat([torch.arange(length) for length in lengths])
        ends = torch.tensor(lengths).cumsum(0)
        counts = torch.searchsorted(places, ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        rows, texts = Ragged.of(counts.tolist(), device), Ragged.of(lengths, device)
        places, offsets = to_device(places, device), to_device(offsets, device)
        number = rows.entries(offsets[places])[:, None, :, None]
        seen = torch.arange(max(lengths), device=device) <= number
        return Rows(places, offsets, rows, texts, seen)


def attend_to_paths(q: Tensor, keys: Keys, seen: Tensor) -> Tensor:
    """[…, heads, m, head_dim] of the queries q of m rows of a text.

    Row i attends to the rows of step 0 in seen [m, n], whose keys are […, kv_heads, n, head_dim], and to row
    i of the later steps, which have m.  That is m · n scores once, and m for every later step.
    """
    groups, n = q.shape[-3] // keys[0][0].shape[-3], seen.shape[-1]
    (k, v), *later = [
        (k.repeat_interleave(groups, dim=-3), v.repeat_interleave(groups, dim=-3)) for k, v in keys
    ]
    text = (q @ k.transpose(-1, -2)).masked_fill(~seen, float("-inf"))
    path = [(q * k_later).sum(-1, keepdim=True) for k_later, _ in later]
    scores = torch.cat([text, *path], dim=-1) * q.shape[-1] ** -0.5
    weights = scores.float().softmax(-1).to(q.dtype)
    out: Tensor = weights[..., :n] @ v
    for i, (_, v_later) in enumerate(later):
        out = out + weights[..., n + i, None] * v_later
    return out


def along_paths(attention: Attention, u: Tensor, keys: Keys, rows: Rows) -> Tensor:
    """Output [m, hidden] of an attention whose rows attend to the text and to their own path.

    u: its input, [m, inputs], and in step 0 that of all places.  Adds the step's keys and values to `keys`.
    """
    first = not keys
    positions = rows.offsets if first else rows.offsets[rows.places] + len(keys)
    angles = rotary_angles(positions, attention.head_dim)
    keys.append((attention.keys(u, angles), attention.values(u)))
    if first:
        u, angles = u.index_select(0, rows.places), angles.index_select(0, rows.places)
    padded = Keys()
    for step, (k, v) in enumerate(keys):
        of = rows.rows if step else rows.texts  # step 0 has all places
        padded.append((of.pad(k), of.pad(v)))
    out = attend_to_paths(rows.rows.pad(attention.queries(u, angles)), padded, rows.seen)
    projected: Tensor = attention.o_proj(rows.rows.join(out))
    return projected


class PathLayer(Layer):
    """A layer over [norm(embedding); norm(state)], whose rows attend to the text and to their own path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden)
        self.hidden_norm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def step(self, g: Tensor, embedded: Tensor, keys: Keys, rows: Rows) -> Tensor:
        """o [m, hidden] of the rows of g and the embeddings of the tokens that follow, [n, hidden].

        In step 0 these are of all places.  Adds the step's keys and values to `keys`.
        """
        u = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        g = g if keys else g.index_select(0, rows.places)
        return self.feed_forward(g + along_paths(self.self_attn, u, keys, rows))


class TapNetwork(nn.Module):
    """A network on several states of the target, over tokens of its own."""

    d2t: Tensor  # int64 [Vd]
    t2d: Tensor  # bool [V]

    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        taps: Sequence[int],
        drafted: Sequence[int] | None = None,
        positions: int = 2048,
    ) -> None:
        """taps: as `Needs.states` counts.  drafted: ids of the head's tokens, ascending; None for all."""
        super().__init__()
        self.sizes, self.vocabulary, self.taps, self.positions = sizes, vocabulary, tuple(taps), positions
        self.fc = nn.Linear(len(taps) * sizes.hidden, sizes.hidden, bias=False)
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        ids = torch.arange(vocabulary) if drafted is None else torch.tensor(drafted)
        self.lm_head = nn.Linear(sizes.hidden, len(ids), bias=False)
        register_vocabulary(self, ids, vocabulary)

    @classmethod
    def like(cls, target: Target, **options: Any) -> Self:
        """A small one for this target, with random weights and two tokens of three."""
        spec = target.decoder.spec
        drafted = [i for i in range(target.vocabulary) if i % 3 < 2]
        usual = {"drafted": drafted, "positions": target.max_len}
        return cls(small_sizes(spec), target.vocabulary, default_taps(spec.layers), **{**usual, **options})

    @property
    def ids(self) -> Tensor:
        """int64 [Vd]: the target's tokens in the head's vocabulary."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def known(self, target_logits: Tensor) -> Tensor:
        """bool [n]: whether the likeliest token of the target's logits [n, V] is one of the head's."""
        return self.t2d[target_logits.argmax(-1)]

    def layer_config(self, layers: int) -> dict[str, Any]:
        """The keys of a transformers config."""
        return {
            "model_type": "llama",
            "hidden_act": "silu",
            **sizes_config(self.sizes),
            "num_hidden_layers": layers,
            "max_position_embeddings": self.positions,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }

    def head_config(self) -> dict[str, Any]:
        """The keys of speculators about taps and vocabulary."""
        return {
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self.sizes.hidden,
            TAPS: list(self.taps),
        }


# Of configs in the format of speculators; the default of a norm's place depends on the reader.
SPECULATORS = {"speculators_version": "0.3.0", "norm_before_residual": False}
