"""The network of an EAGLE-3 head for training, with the reference's names, and its training-time-test loss.

Step 0 reads the target's states, step s the output of step s - 1, as in drafting; the tokens are the text's.

    place t                   0          1          2
    step 0 reads pair      (f_0, x_1) (f_1, x_2) (f_2, x_3)      at position t; predicts x_t+2
    step 1                 (o_0, x_2) (o_1, x_3) (o_2, x_4)      at t + 1, o of step 0; predicts x_t+3
    step s                        (o_t, x_t+s+1)                 at position t + s; predicts x_t+s+2

Step s at place t attends to step 0 at places 0 … t and to steps 1 … s at place t: the committed text and its
own path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.draft.eagle3.layouts import TAPS, default_taps
from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import (
    Layer,
    RmsNorm,
    acceptance_loss,
    causal_mask,
    register_vocabulary,
    rotary_angles,
    sizes_config,
    small_sizes,
    soft_cross_entropy,
)
from outrider.heads.sample import Sample, TargetWeights, mean_loss

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


class Network(nn.Module):
    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        taps: Sequence[int],
        drafted: Sequence[int] | None = None,
        positions: int = 2048,
        embeds: bool = False,
        steps: int = 3,
        decay: float = 1.0,
        acceptance: bool = False,
    ) -> None:
        """taps: as `Needs.states` counts.  drafted: ids of the head's tokens, ascending; None for all.

        embeds: it has an embedding of its own.  steps: steps in the loss (the reference 7, speculators 3).
        decay: weight of a step relative to the one before it (the reference 0.8).
        acceptance: the loss is `acceptance_loss`, not the cross entropy with the target.
        """
        super().__init__()
        self.sizes, self.vocabulary, self.taps, self.positions = sizes, vocabulary, tuple(taps), positions
        self.steps, self.decay = steps, decay
        self.row_loss = acceptance_loss if acceptance else soft_cross_entropy
        self.fc = nn.Linear(len(taps) * sizes.hidden, sizes.hidden, bias=False)
        self.midlayer = PathLayer(sizes)
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        ids = torch.arange(vocabulary) if drafted is None else torch.tensor(drafted)
        self.lm_head = nn.Linear(sizes.hidden, len(ids), bias=False)
        self.embed_tokens = nn.Embedding(vocabulary, sizes.hidden) if embeds else None
        register_vocabulary(self, ids, vocabulary)

    @classmethod
    def like(cls, target: Target) -> Network:
        """A small one for this target, with random weights and two tokens of three."""
        spec, embeds = target.decoder.spec, target.decoder.embed([0]).shape[1] != target.decoder.spec.hidden
        drafted = [i for i in range(target.vocabulary) if i % 3 < 2]
        taps, sizes = default_taps(spec.layers), small_sizes(spec)
        return cls(sizes, target.vocabulary, taps, drafted, target.max_len, embeds)

    @property
    def ids(self) -> Tensor:
        """int64 [Vd]: the target's tokens in the head's vocabulary."""
        d2t: Any = self.d2t
        return torch.arange(len(d2t), device=d2t.device) + d2t  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            **sizes_config(self.sizes),
            "num_hidden_layers": 1,
            "max_position_embeddings": self.positions,
            "vocab_size": self.vocabulary,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": self.sizes.hidden,
            "tie_word_embeddings": False,
            TAPS: list(self.taps),
        }

    def logits(self, o: Tensor) -> Tensor:
        return self.lm_head(self.norm(o))  # type: ignore[no-any-return]

    def outputs(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int, start: int = 0
    ) -> Iterator[Tensor]:
        """o [n - start, hidden] of every step, for the places start …

        Place t of n = len(tokens) - steps reads states[t] and tokens[t + 1 + step].
        """
        own, n, keys = self.embed_tokens, len(tokens) - steps, Keys()
        o = self.fc(states[:n])
        for step in range(steps):
            ids = tokens[step + 1 + n - len(o) : step + 1 + n]
            o = self.midlayer.step(o, embedding[ids] if own is None else own(ids), keys, n - start)
            yield o

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution over the head's tokens.

        Counts the places where the target's likeliest token is one of them.  The last places of a text have
        fewer steps.
        """
        tokens = torch.cat([sample.tokens, sample.tokens.new_zeros(self.steps - 1)])
        states = torch.cat([sample.states[tap] for tap in self.taps], dim=-1)
        t2d: Any = self.t2d
        total = states.new_zeros(())
        start = max(0, sample.first - self.steps)
        for step, o in enumerate(self.outputs(states, tokens, outer.embedding, self.steps, start)):
            rows = sample.places(step + 1, len(states) - step - 1)
            theirs = sample.logits[step + 1 + rows, : self.vocabulary]
            known = t2d[theirs.argmax(-1)]
            losses = self.row_loss(self.logits(o[rows[known] - start]), theirs[known][:, self.ids])
            total = total + self.decay**step * mean_loss(losses)
        return total
