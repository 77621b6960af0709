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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outrider.draft.eagle3.layouts import TAPS
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
    soft_cross_entropy,
)
from outrider.heads.sample import Sample, TargetWeights, mean_loss

Keys = list[tuple[Tensor, Tensor]]  # keys and values of the steps so far, of one layer


@dataclass(frozen=True)
class Settings:
    """Sizes and variants of a head.

    taps: as `Needs.states` counts.
    drafted: ids of the tokens in the head's vocabulary, ascending; None for all.
    embeds: it has an embedding of its own.
    residual_normed, output_normed, tap_normed, input_normed: see layouts.py.
    """

    vocabulary: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    target_hidden: int
    taps: tuple[int, ...]
    drafted: tuple[int, ...] | None = None
    layers: int = 1
    eps: float = 1e-6
    theta: float = 10000.0
    positions: int = 2048
    embeds: bool = False
    residual_normed: bool = False
    output_normed: bool = False
    tap_normed: bool = False
    input_normed: bool = False

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.hidden, self.inner, self.heads, self.kv_heads, self.head_dim, self.eps)

    @staticmethod
    def fitting(target: Target) -> Settings:
        """Small, for this target; its vocabulary has two tokens of three."""
        spec, drafted = target.decoder.spec, tuple(i for i in range(target.vocabulary) if i % 3 < 2)
        layers, hidden = spec.layers, spec.hidden
        taps = tuple(sorted(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3)))
        embeds = target.decoder.embed([0]).shape[1] != hidden
        shape = (target.vocabulary, hidden, 2 * hidden, 4, 2, 24, hidden)
        return Settings(*shape, taps, drafted, embeds=embeds, positions=target.max_len)


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
    """A layer in which a row attends to the committed text and to its own path.

    first: it reads [embedding; state] and has a second norm.
    """

    def __init__(self, sizes: Sizes, first: bool) -> None:
        super().__init__(sizes, inputs=2 * sizes.hidden if first else None)
        if first:
            self.hidden_norm = RmsNorm(sizes.hidden, sizes.eps)

    def step(self, u: Tensor, residual: Tensor, angles: Tensor, keys: Keys, last: int) -> Tensor:
        """x [last, hidden]: residual + attend(u), through the MLP, of the last rows.

        Adds this step's keys and values, of all rows, to `keys`.
        """
        attention, rows = self.self_attn, slice(len(u) - last, None)
        keys.append((attention.keys(u, angles), attention.values(u)))
        attended = attend_to_paths(attention.queries(u[rows], angles[rows]), keys)
        return self.feed_forward(residual[rows] + attention.o_proj(attended.transpose(0, 1).flatten(1)))


class Network(nn.Module):
    def __init__(
        self, settings: Settings, steps: int = 3, decay: float = 1.0, acceptance: bool = False
    ) -> None:
        """steps: steps in the loss (the reference 7, speculators 3).

        decay: weight of a step relative to the one before it (the reference 0.8).
        acceptance: the loss is `acceptance_loss`, not the cross entropy with the target.
        """
        super().__init__()
        self.steps, self.decay = steps, decay
        self.row_loss = acceptance_loss if acceptance else soft_cross_entropy
        s = self.settings = settings
        if s.tap_normed:
            self.fc_norm = nn.ModuleList(RmsNorm(s.target_hidden, s.eps) for _ in s.taps)
        if s.input_normed:
            self.input_norm = RmsNorm(len(s.taps) * s.target_hidden, s.eps)
        self.fc = nn.Linear(len(s.taps) * s.target_hidden, s.hidden, bias=False)
        self.midlayer = PathLayer(s.sizes, first=True)
        self.layers = nn.ModuleDict({str(i): PathLayer(s.sizes, first=False) for i in range(1, s.layers)})
        self.norm = RmsNorm(s.hidden, s.eps)
        ids = torch.arange(s.vocabulary) if s.drafted is None else torch.tensor(s.drafted)
        self.lm_head = nn.Linear(s.hidden, len(ids), bias=False)
        if s.embeds:
            self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        register_vocabulary(self, ids, s.vocabulary)

    @staticmethod
    def random(settings: Settings, seed: int = 0) -> Network:
        """Reproducible random weights, with norms other than 1."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Network(settings)
            for name, weight in network.named_parameters():
                weight.data.normal_(float(weight.dim() == 1), 0.5 if "lm_head" in name else 0.2)
        return network

    @property
    def ids(self) -> Tensor:
        """int64 [Vd]: the target's tokens in the head's vocabulary."""
        d2t: Any = self.d2t
        return torch.arange(len(d2t), device=d2t.device) + d2t  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        s = self.settings
        sizes = {
            "num_hidden_layers": s.layers,
            "max_position_embeddings": s.positions,
            "vocab_size": s.vocabulary,
        }
        flags = {"norm_before_residual": s.residual_normed, "norm_output": s.output_normed}
        flags |= {"fc_norm": s.tap_normed, "norm_before_fc": s.input_normed}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            **sizes_config(s.sizes),
            **sizes,
            "rope_theta": s.theta,
            "draft_vocab_size": self.lm_head.out_features,
            "target_hidden_size": s.target_hidden,
            "tie_word_embeddings": False,
            TAPS: list(s.taps),
            **{name: True for name, on in flags.items() if on},
        }

    def enter(self, states: Tensor) -> Tensor:
        """g [n, hidden] of the states [n, taps * target_hidden]."""
        s = self.settings
        if s.tap_normed:
            parts = zip(self.fc_norm, states.chunk(len(s.taps), dim=-1))
            states = torch.cat([norm(part) for norm, part in parts], dim=-1)
        if s.input_normed:
            states = self.input_norm(states)
        return self.fc(states)  # type: ignore[no-any-return]

    def logits(self, o: Tensor) -> Tensor:
        return self.lm_head(self.norm(o))  # type: ignore[no-any-return]

    def step(self, g: Tensor, embedded: Tensor, keys: Sequence[Keys], last: int) -> Tensor:
        """o [last, hidden] of the last rows of g and the embeddings of the tokens that follow, [n, hidden].

        keys: of every layer.
        """
        s, first, n = self.settings, self.midlayer, len(g)
        places = keys[0][0][0].shape[1] if keys[0] else n  # of step 0
        positions = torch.arange(places - n, places, device=g.device) + len(keys[0])
        angles = rotary_angles(positions, s.head_dim, s.theta)
        normed: Tensor = first.hidden_norm(g)
        u = torch.cat([first.input_layernorm(embedded), normed], dim=-1)
        residual = normed if s.residual_normed else g
        x = first.step(u, residual, angles, keys[0], n if self.layers else last)
        for layer, own in zip(self.layers.values(), keys[1:]):
            assert isinstance(layer, PathLayer)
            x = layer.step(layer.input_layernorm(x), x, angles, own, n)
        return x[-last:]

    def forward(self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int = 1) -> list[Tensor]:
        """Logits [n, Vd] of every step."""
        return [self.logits(o) for o in self.outputs(states, tokens, embedding, steps, 0)]

    def outputs(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int, start: int
    ) -> Iterator[Tensor]:
        """o [n - start, hidden] of every step, for the places start …

        Place t of n = len(tokens) - steps reads states[t] and tokens[t + 1 + step].
        """
        s, n = self.settings, len(tokens) - steps
        keys: list[Keys] = [[] for _ in range(s.layers)]
        g = self.enter(states[:n])
        for step in range(steps):
            ids = tokens[step + 1 + n - len(g) : step + 1 + n]
            o = self.step(g, self.embed_tokens(ids) if s.embeds else embedding[ids], keys, n - start)
            yield o
            g = self.norm(o) if s.output_normed else o

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution over the head's tokens.

        Counts the places where the target's likeliest token is one of them.  The last places of a text have
        fewer steps.
        """
        tokens = torch.cat([sample.tokens, sample.tokens.new_zeros(self.steps - 1)])
        states = torch.cat([sample.states[tap] for tap in self.settings.taps], dim=-1)
        t2d: Any = self.t2d
        total = states.new_zeros(())
        start = max(0, sample.first - self.steps)
        for step, o in enumerate(self.outputs(states, tokens, outer.embedding, self.steps, start)):
            rows = sample.places(step + 1, len(states) - step - 1)
            theirs = sample.logits[step + 1 + rows, : self.settings.vocabulary]
            known = t2d[theirs.argmax(-1)]
            losses = self.row_loss(self.logits(o[rows[known] - start]), theirs[known][:, self.ids])
            total = total + self.decay**step * mean_loss(losses)
        return total
