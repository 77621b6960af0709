"""EAGLE's network as it is trained: names and config are those of the reference's files."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.types import FINAL
from outrider.drafting.base import Target
from outrider.heads.sample import Sample, TargetWeights

NOISE = 0.2  # uniform, on the states that it reads while training: its own guesses will not be exact, either
TOKENS = 0.1  # weight of the cross entropy beside the states'


class Network(nn.Module):
    def __init__(
        self, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, eps: float = 1e-6, theta: float = 10000.0,
        bias: bool = True, qkv_bias: bool = False,
    ) -> None:  # fmt: skip
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.settings = LlamaConfig(
            hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
            vocab_size=vocabulary, rms_norm_eps=eps, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": theta},
        )  # fmt: skip
        self.settings._attn_implementation = "eager"  # which takes a mask
        self.theta = theta
        self.fc = nn.Linear(2 * hidden, hidden, bias=bias)
        layer = LlamaDecoderLayer(self.settings, 0)
        layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        for name in ("q_proj", "k_proj", "v_proj") if qkv_bias else ():
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, nn.Linear(old.in_features, old.out_features))
        self.layers = nn.ModuleList([layer])
        self.rotary = LlamaRotaryEmbedding(self.settings)

    @classmethod
    def like(cls, target: Target, **given: Any) -> Network:
        """Of a size that suits the target, with random weights."""
        spec = target.decoder.spec
        width = min(spec.head_dim, 128)
        return cls(
            spec.hidden, 2 * spec.hidden, max(1, spec.hidden // width), 1, width, spec.vocabulary, **given
        )

    def config(self) -> dict[str, Any]:
        s = self.settings
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": s.hidden_size, "num_hidden_layers": 1,
            "intermediate_size": s.intermediate_size, "num_attention_heads": s.num_attention_heads, "head_dim": s.head_dim,
            "num_key_value_heads": s.num_key_value_heads, "vocab_size": s.vocab_size, "rms_norm_eps": s.rms_norm_eps,
            "rope_theta": self.theta, "bias": self.fc.bias is not None,
        }  # fmt: skip

    def forward(self, tokens: Tensor, states: Tensor) -> Tensor:
        """[T, hidden] of the embeddings e(x_1) … e(x_T) and the states f_0 … f_T-1, each [T, hidden]: what stands for f_1 … f_T."""
        x, count = self.fc(torch.cat([tokens, states], dim=-1))[None], len(tokens)
        at = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=at, position_embeddings=self.rotary(x, at))
        out: Tensor = x[0]
        return out

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Smooth L1 of the states and, at a tenth, the cross entropy of the tokens that the target's head reads off them.

        tokens    x_0   x_1   x_2 … x_T            pair t is (f_t, x_t+1); o_t should be f_t+1, and say p_t+1
        states    f_0   f_1   f_2 … f_T
        pair            0     1   … T-1
        """
        states, count = sample.states[FINAL], len(sample.tokens) - 1
        noisy = states[:count] + (torch.rand_like(states[:count]) - 0.5) * 2 * NOISE * self.training
        out = self(outer.embedding[sample.tokens[1:]], noisy)
        said = F.log_softmax(out @ outer.lm_head.T, dim=-1)
        tokens = -(sample.logits[1:].softmax(-1) * said).sum(-1).mean()
        return F.smooth_l1_loss(out, states[1:]) + TOKENS * tokens
