"""Hydra's network as it is trained: names and config are those of the reference's files.

The reference saves two copies of the target's embedding beside it (input_embed_fn and the prefix layer's own, which is not used).  No
reader needs them, and they are left out here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.types import FINAL
from outrider.drafting.base import Target
from outrider.heads.sample import Sample, TargetWeights


class ResBlock(nn.Module):
    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection: nn.Module = nn.Linear(inputs, hidden) if inputs != hidden else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = self.res_connection(x)
        return residual + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """One Llama block and a norm, over a whole text at once."""

    def __init__(self, settings: Any) -> None:
        from transformers.models.llama.modeling_llama import (
            LlamaDecoderLayer,
            LlamaRMSNorm,
            LlamaRotaryEmbedding,
        )

        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(settings, 0)])
        self.norm = LlamaRMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(settings)

    def forward(self, states: Tensor) -> Tensor:
        """P_0 … of f_0 …, [T, hidden] both."""
        x, count = states[None], len(states)
        at = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_ids=at, position_embeddings=self.rotary(x, at))
        out: Tensor = self.norm(x)[0]
        return out


class Network(nn.Module):
    """prefix: the sizes of the prefix layer of a `prefix-mlp` head, as LlamaConfig names them; None for a plain `mlp` head.
    own: an lm head for each; without, all of them use the target's.
    """

    def __init__(
        self,
        hidden: int,
        vocabulary: int,
        heads: int = 4,
        layers: int = 4,
        prefix: dict[str, Any] | None = None,
        dropout: float = 0.2,
        own: bool = True,
    ) -> None:
        super().__init__()
        self.hidden, self.layers, self.prefix, self.own = hidden, layers, prefix, own
        drop = [nn.Dropout(dropout)] if prefix is not None else []
        if prefix is not None:
            from transformers import LlamaConfig

            self.prefix_embeding_layer = PrefixLayer(
                LlamaConfig(**{"hidden_size": hidden, "attn_implementation": "eager", **prefix})
            )
        self.hydra_mlp = nn.ModuleList([
            nn.Sequential(*drop, ResBlock((i + 2) * hidden, hidden), *([*drop, ResBlock(hidden, hidden)] * (layers - 1)))
            for i in range(heads)
        ])  # fmt: skip
        outs = [nn.Linear(hidden, vocabulary) for _ in range(heads if own else 0)]
        self.hydra_lm_head = nn.ModuleList([nn.Sequential(*drop, out) if drop else out for out in outs])

    @classmethod
    def like(cls, target: Target, arch: str = "prefix-mlp", **given: Any) -> Network:
        """Of a size that suits the target, with random weights."""
        spec = target.decoder.spec
        width = min(spec.head_dim, 128)
        prefix = {
            "intermediate_size": 2 * spec.hidden, "num_attention_heads": max(1, spec.hidden // width), "num_key_value_heads": 1,
            "head_dim": width, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        }  # fmt: skip
        return cls(spec.hidden, spec.vocabulary, prefix=prefix if arch == "prefix-mlp" else None, **given)

    def start(self, outer: TargetWeights) -> None:
        """As the reference begins: every head says what the target's own would."""
        for out in self.hydra_lm_head:
            linear: Any = out[-1] if isinstance(out, nn.Sequential) else out
            linear.weight.data.copy_(outer.lm_head)

    def config(self) -> dict[str, Any]:
        """The reference's keys; and what the prefix layer is, which the reference reads off the target."""
        return {
            "hydra_head_arch": "mlp" if self.prefix is None else "prefix-mlp", "hydra_num_heads": len(self.hydra_mlp),
            "hydra_num_layers": self.layers, "grounded_heads": True, "hidden_state_offset": 0, **(self.prefix or {}),
        }  # fmt: skip

    def forward(self, states: Tensor, embedded: Tensor, lm_head: Tensor | None = None) -> list[Tensor]:
        """Of each head the logits [T - 1 - i, V] for t = 0, 1, …; states f_0 … and embeddings e(x_0) …, [T, hidden] both.
        lm_head [V, hidden]: the target's, for heads without one."""
        z: Tensor = states if self.prefix is None else self.prefix_embeding_layer(states)
        logits = []
        for i, mlp in enumerate(self.hydra_mlp):
            z = torch.cat([z[:-1], embedded[i + 1 :]], dim=-1)
            if self.own:
                logits.append(self.hydra_lm_head[i](mlp(z)))
            else:
                assert lm_head is not None
                logits.append(mlp(z) @ lm_head.T)
        return logits

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """The teacher loss: of every head the cross entropy with the target's own law at the token that it guesses.

        position          t          t+1        t+2        t+3
        token             x_t        x_t+1      x_t+2      x_t+3
        state             f_t  ─►  P_t, over f_0 … f_t
        head 0 reads      P_t        e(x_t+1)                       says x_t+2, taught by logits[t+1]
        head 1 reads      P_t        e(x_t+1)   e(x_t+2)            says x_t+3, taught by logits[t+2]
        """
        distributions = sample.logits.softmax(-1)
        said = self(sample.states[FINAL], outer.embedding[sample.tokens], outer.lm_head)
        return torch.stack(
            [F.cross_entropy(logits, distributions[i + 1 :]) for i, logits in enumerate(said) if len(logits)]
        ).sum()
