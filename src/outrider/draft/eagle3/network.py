"""The network of an EAGLE-3 head in torch, under the reference's names, and its loss: the training-time test.

Step 0 reads the target's states, step s what step s - 1 computed, as when it guesses; the tokens are the text's.

    place t                   0          1          2
    step 0 reads pair      (f_0, x_1) (f_1, x_2) (f_2, x_3)      at position t; says x_t+2, judged by the target's law behind x_t+1
    step 1                 (o_0, x_2) (o_1, x_3) (o_2, x_4)      at position t + 1, o of step 0; says x_t+3
    step s                        (o_t, x_t+s+1)                 at position t + s; says x_t+s+2

    step s at place t sees    step 0 at places 0 … t, then steps 1 … s at place t: the committed text, and its own path
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.draft.eagle3.layouts import TAPS
from outrider.drafting.base import Target
from outrider.heads.sample import Sample, TargetWeights


@dataclass(frozen=True)
class Settings:
    """taps: as `Needs.states` counts.  drafted: ids of the tokens that the head knows, ascending; None for all.  embeds: has an
    embedding of its own.  residual_normed, output_normed, tap_normed, input_normed: the variants (see layouts.py).
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

    @staticmethod
    def fitting(target: Target) -> Settings:
        """Small, for this target; it knows two tokens of three."""
        spec, drafted = target.decoder.spec, tuple(i for i in range(target.vocabulary) if i % 3 < 2)
        layers, hidden = spec.layers, spec.hidden
        taps = tuple(sorted(min(max(tap, 0), layers) for tap in (2, layers // 2, layers - 3)))
        embeds = target.decoder.embed([0]).shape[1] != hidden
        return Settings(
            target.vocabulary,
            hidden,
            2 * hidden,
            4,
            2,
            24,
            hidden,
            taps,
            drafted,
            embeds=embeds,
            positions=target.max_len,
        )

    def angles(self, positions: Tensor) -> Tensor:
        """[n, head_dim / 2]."""
        return positions[:, None] * self.theta ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """One row at every place; `seen` are keys and values of the steps so far, and gets those of this one."""

    def __init__(self, s: Settings, inputs: int) -> None:
        super().__init__()
        self.settings = s
        self.q_proj = nn.Linear(inputs, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, u: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        s, n = self.settings, len(u)
        angles = s.angles(torch.arange(n) + len(seen))
        q, k, v = (
            project(u).view(n, -1, s.head_dim).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = s.heads // s.kv_heads
        seen.append((_turned(k, angles).repeat_interleave(group, 0), v.repeat_interleave(group, 0)))
        q, (keys, values) = _turned(q, angles) * s.head_dim**-0.5, seen[0]
        first = (q @ keys.transpose(1, 2)).masked_fill(
            torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf")
        )
        own = [(q * keys).sum(-1, keepdim=True) for keys, _ in seen[1:]]
        weights = torch.cat([first, *own], dim=-1).softmax(-1)
        out = weights[..., :n] @ values
        for i, (_, values) in enumerate(seen[1:]):
            out = out + weights[..., n + i, None] * values
        return self.o_proj(out.transpose(0, 1).reshape(n, -1))  # type: ignore[no-any-return]


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Mlp(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """The first one reads embedding and state side by side."""

    def __init__(self, s: Settings, first: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden, s.eps)
        if first:
            self.hidden_norm = Norm(s.hidden, s.eps)
        self.self_attn = Attention(s, s.hidden * (1 + first))
        self.post_attention_layernorm = Norm(s.hidden, s.eps)
        self.mlp = Mlp(s)

    def forward(self, u: Tensor, residual: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        x = residual + self.self_attn(u, seen)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    """steps: how far the loss unrolls (the reference 7, speculators 3); decay: what each step counts beside the one before it."""

    steps, decay = 3, 1.0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        s = self.settings = settings
        if s.tap_normed:
            self.fc_norm = nn.ModuleList(Norm(s.target_hidden, s.eps) for _ in s.taps)
        if s.input_normed:
            self.input_norm = Norm(len(s.taps) * s.target_hidden, s.eps)
        self.fc = nn.Linear(len(s.taps) * s.target_hidden, s.hidden, bias=False)
        self.midlayer = Layer(s, first=True)
        if s.layers > 1:
            self.layers = nn.ModuleDict({str(i): Layer(s, first=False) for i in range(1, s.layers)})
        self.norm = Norm(s.hidden, s.eps)
        ids = torch.arange(s.vocabulary) if s.drafted is None else torch.tensor(s.drafted)
        self.lm_head = nn.Linear(s.hidden, len(ids), bias=False)
        if s.embeds:
            self.embed_tokens = nn.Embedding(s.vocabulary, s.hidden)
        self.register_buffer("d2t", ids - torch.arange(len(ids)))
        self.register_buffer("t2d", torch.zeros(s.vocabulary, dtype=torch.bool).index_fill(0, ids, True))

    @staticmethod
    def random(settings: Settings, seed: int = 0) -> Network:
        """The same for the same seed, and norms that are not 1."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = Network(settings)
            for name, parameter in network.named_parameters():
                parameter.data.normal_(
                    1.0 if parameter.dim() == 1 else 0.0, 0.2 if "lm_head" not in name else 0.5
                )
        return network

    @property
    def ids(self) -> Tensor:
        """int64 [Vd]: the target's tokens that it knows."""
        d2t: Any = self.d2t
        return torch.arange(len(d2t)) + d2t  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        s = self.settings
        flags: dict[str, bool] = {
            "norm_before_residual": s.residual_normed, "norm_output": s.output_normed, "fc_norm": s.tap_normed,
            "norm_before_fc": s.input_normed,
        }  # fmt: skip
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": s.hidden,
            "intermediate_size": s.inner, "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim, "rms_norm_eps": s.eps, "rope_theta": s.theta, "max_position_embeddings": s.positions,
            "vocab_size": s.vocabulary, "draft_vocab_size": self.lm_head.out_features, "target_hidden_size": s.target_hidden,
            "tie_word_embeddings": False, TAPS: list(s.taps), **{name: True for name, on in flags.items() if on},
        }  # fmt: skip

    def enter(self, states: Tensor) -> Tensor:
        """g [n, hidden] of the states [n, taps * target_hidden]."""
        s = self.settings
        if s.tap_normed:
            states = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, states.chunk(len(s.taps), dim=-1))], dim=-1
            )
        if s.input_normed:
            states = self.input_norm(states)
        return self.fc(states)  # type: ignore[no-any-return]

    def logits(self, o: Tensor) -> Tensor:
        return self.lm_head(self.norm(o))  # type: ignore[no-any-return]

    def step(self, g: Tensor, embedded: Tensor, seen: Sequence[list[tuple[Tensor, Tensor]]]) -> Tensor:
        """o [n, hidden] of g and the embeddings of the tokens that follow; `seen`: of every layer, what its attention saw."""
        normed: Tensor = self.midlayer.hidden_norm(g)  # type: ignore[operator]
        u = torch.cat([self.midlayer.input_layernorm(embedded), normed], dim=-1)
        x: Tensor = self.midlayer(u, normed if self.settings.residual_normed else g, seen[0])
        for layer, own in zip(self.layers.values() if self.settings.layers > 1 else (), seen[1:]):
            x = layer(layer.input_layernorm(x), x, own)  # type: ignore[operator]
        return x

    def forward(self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int = 1) -> list[Tensor]:
        """Of every step the logits [n, Vd]: n = len(tokens) - steps places, of which t reads states[t] and tokens[t + 1 + step]."""
        s, n = self.settings, len(tokens) - steps
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(s.layers)]
        g, said = self.enter(states[:n]), []
        for step in range(steps):
            ids = tokens[step + 1 : step + 1 + n]
            o = self.step(g, self.embed_tokens(ids) if s.embeds else embedding[ids], seen)
            said.append(self.logits(o))
            g = self.norm(o) if s.output_normed else o
        return said

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Soft cross-entropy against the target's law over the tokens that the head knows, where the target's best is one of them."""
        states = torch.cat([sample.states[tap] for tap in self.settings.taps], dim=-1)
        t2d: Any = self.t2d
        total = states.new_zeros(())
        for step, logits in enumerate(self(states, sample.tokens, outer.embedding, self.steps)):
            theirs = sample.logits[step + 1 : step + 1 + len(logits), : self.settings.vocabulary]
            known = t2d[theirs.argmax(-1)]
            each = -(theirs[:, self.ids].softmax(-1) * logits.log_softmax(-1)).sum(-1)
            total = total + self.decay**step * (each * known).sum() / known.sum().clamp_min(1)
        return total
