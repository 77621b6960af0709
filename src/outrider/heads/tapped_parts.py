"""What the networks of EAGLE-3 and P-EAGLE share, for training and export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.heads.layer import Sizes
from outrider.heads.parts import Layer, RmsNorm, causal_mask, register_vocabulary, rotary_angles, sizes_config
from outrider.heads.tapped import TAPS

Keys = list[tuple[Tensor, Tensor]]  # keys and values of the steps so far


def attend_to_paths(q: Tensor, keys: Keys) -> Tensor:
    """[heads, m, head_dim] of the queries q of the last m of n rows.

    Row i attends to the rows 0 … i of step 0, whose keys are [heads, n, head_dim], and to row i of the later
    steps, which have m.  That is m · n scores once, and m for every later step.
    """
    groups, m, n = len(q) // len(keys[0][0]), q.shape[1], keys[0][0].shape[1]
    (k, v), *later = [
        (k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)) for k, v in keys
    ]
    text = (q @ k.transpose(1, 2)).masked_fill(~causal_mask(n, q.device)[n - m :], float("-inf"))
    path = [(q * k_later).sum(-1, keepdim=True) for k_later, _ in later]
    scores = torch.cat([text, *path], dim=-1) * q.shape[-1] ** -0.5
    weights = scores.float().softmax(-1).to(q.dtype)
    out: Tensor = weights[..., :n] @ v
    for i, (_, v_later) in enumerate(later):
        out = out + weights[..., n + i, None] * v_later
    return out


class PathLayer(Layer):
    """A layer over [norm(embedding); norm(state)], whose rows attend to the text and to their own path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden)
        self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)

    def step(self, g: Tensor, embedded: Tensor, keys: Keys, last: int) -> Tensor:
        """o [last, hidden] of the last rows of g and the embeddings of the tokens that follow, [n, hidden].

        Adds this step's keys and values, of all rows, to `keys`.
        """
        attention, n = self.self_attn, len(g)
        places, rows = keys[0][0].shape[1] if keys else n, slice(n - last, None)
        positions = torch.arange(places - n, places, device=g.device) + len(keys)
        angles = rotary_angles(positions, attention.head_dim)
        u = torch.cat([self.input_layernorm(embedded), self.hidden_norm(g)], dim=-1)
        keys.append((attention.keys(u, angles), attention.values(u)))
        attended = attend_to_paths(attention.queries(u[rows], angles[rows]), keys)
        return self.feed_forward(g[rows] + attention.o_proj(attended.transpose(0, 1).flatten(1)))


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
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        ids = torch.arange(vocabulary) if drafted is None else torch.tensor(drafted)
        self.lm_head = nn.Linear(sizes.hidden, len(ids), bias=False)
        register_vocabulary(self, ids, vocabulary)

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


def small_vocabulary(vocabulary: int) -> list[int]:
    """Two tokens of three, for random heads."""
    return [i for i in range(vocabulary) if i % 3 < 2]
