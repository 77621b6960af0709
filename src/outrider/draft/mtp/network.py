"""Prediction layers as they are trained; names are DeepSeek's, the block is Llama's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.types import FINAL
from outrider.drafting.base import Target
from outrider.heads.sample import Sample, TargetWeights

DECAY = 0.6  # FastMTP's: of the loss of each further level that the last layer does again


class Network(nn.Module):
    """first: how many layers the target has.  steps: levels that the loss looks at (None: as many as layers)."""

    def __init__(
        self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, first: int, layers: int = 1,
        steps: int | None = None, prenorm: bool = False, eps: float = 1e-6, theta: float = 10000.0,
    ) -> None:  # fmt: skip
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import (
            LlamaDecoderLayer,
            LlamaRMSNorm,
            LlamaRotaryEmbedding,
        )

        super().__init__()
        make: Any = LlamaConfig
        self.settings = make(
            hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
            vocab_size=vocabulary, rms_norm_eps=eps, num_hidden_layers=first,
            rope_parameters={"rope_type": "default", "rope_theta": theta}, attn_implementation="eager",
        )  # fmt: skip
        self.steps, self.prenorm, self.taps = steps or layers, prenorm, (first if prenorm else FINAL,)
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict(
            {str(first + i): LlamaDecoderLayer(self.settings, i) for i in range(layers)}
        )
        for layer in self.layers:
            layer.enorm, layer.hnorm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
            layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            layer.eh_proj.weight.data = torch.eye(
                hidden, 2 * hidden
            )  # it begins with what the token itself says
            layer.shared_head = nn.Module()
            layer.shared_head.norm = LlamaRMSNorm(hidden, eps)
        self.rotary = LlamaRotaryEmbedding(self.settings)

    @property
    def layers(self) -> list[Any]:
        layers: Any = self.model.layers
        return list(layers.values())

    @classmethod
    def like(cls, target: Target, **given: Any) -> Network:
        """Of a size that suits the target, with random weights."""
        spec = target.decoder.spec
        width = min(spec.head_dim, 128)
        return cls(
            spec.hidden,
            2 * spec.hidden,
            max(1, spec.hidden // width),
            1,
            width,
            spec.vocabulary,
            spec.layers,
            **given,
        )

    def config(self) -> dict[str, Any]:
        s = self.settings
        return {
            "architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp", "hidden_size": s.hidden_size,
            "vocab_size": s.vocab_size, "num_hidden_layers": s.num_hidden_layers, "num_nextn_predict_layers": len(self.layers),
            "intermediate_size": s.intermediate_size, "num_attention_heads": s.num_attention_heads, "head_dim": s.head_dim,
            "num_key_value_heads": s.num_key_value_heads, "rms_norm_eps": s.rms_norm_eps, "prenorm": self.prenorm,
            "rope_theta": s.rope_parameters["rope_theta"],
        }  # fmt: skip

    def forward(self, tokens: Tensor, states: Tensor, level: int = 0) -> tuple[Tensor, Tensor]:
        """Of embeddings and states of one level, [T, hidden] each: what the next reads in the states' place, and what the head reads."""
        layer, count = self.layers[min(level, len(self.layers) - 1)], len(tokens)
        x = layer.eh_proj(torch.cat([layer.enorm(tokens), layer.hnorm(states)], dim=-1))[None]
        at = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        x = layer(x, attention_mask=mask, position_ids=at, position_embeddings=self.rotary(x, at))[0]
        normed = layer.shared_head.norm(x)
        return (x if self.prenorm else normed), normed

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's law, tokens as they were said, the mean of all levels.

        tokens      x_0   x_1   x_2   x_3 … x_T         pair t of level k is (state t, x_t+k+1), and says p_t+k+1
        states      f_0   f_1   f_2   f_3 … f_T
        level 0   (f_0    x_1)→ p_1
        level 1   (h_0          x_2)→ p_2               h_t: what level 0 said at t
        """
        states, total, weights = sample.states[self.taps[0]], outer.embedding.new_zeros(()), 0.0
        for level in range(self.steps):
            tokens = outer.embedding[sample.tokens[level + 1 :]]
            states, out = self(tokens, states[: len(tokens)], level)
            said = F.log_softmax(out @ outer.lm_head.T, dim=-1)
            weight = DECAY ** max(0, level - len(self.layers) + 1)
            total = total - weight * (sample.logits[level + 1 :].softmax(-1) * said).sum(-1).mean()
            weights += weight
        return total / weights
