"""GRIFFIN (Hu et al. 2025, arXiv 2502.11018): an EAGLE head with a fusion network and two outputs.

    position of the target      t         t+1
    state, after the last norm  f_t                     the target emitted x_t+1 from it
    token                                 x_t+1
    x = fc [e(x_t+1); f_t],  x += down(silu(up [n(m(x)); n(e(x_t+1))]))     fusion; m and n are norms
    x += attend(x)
    (a, b) = (x, x) + down(silu(gate(m(x))) * up(m(x)))                     down has twice the outputs
    the target's lm head of a gives x_t+2;  next level (b, draft of x_t+2)

The first output predicts a token, the second one continues the states; one output of EAGLE's does both.
Positions and K/V are as in heads/recurrent.py.

Published files (names of `layers.0` and `fc`, which has parts here; `embed_tokens.weight` is a copy of the
target's, not read) have no config that names the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.device import to_device
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import ONE, random_head
from outrider.heads.layer import Pairs, Sizes, Stack
from outrider.heads.layouts import BLOCK_NAMES, UNCHANGED, HeadFormat, Layout
from outrider.heads.parts import Layer, eagle_config, small_sizes, soft_cross_entropy
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Recurrent, RecurrentOptions
from outrider.heads.recurrent_net import Net
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.tapped_parts import Keys, Rows, along_paths
from outrider.models.rowwise import by_rows

SIGN = "fc.mlp.up_proj.weight"
FORMAT = HeadFormat(
    (
        Layout(
            "reference",
            (SIGN,),
            (("{rest}.rotary_emb.inv_freq", None), ("rotary_emb.inv_freq", None), *UNCHANGED),
        ),
    ),
    hidden=(("fc.fc.weight", 0),),
    vocabulary=("embed_tokens.weight",),
    known=rf"fc\.fc\.(weight|bias)|fc\.mlp\.((up|down)_proj|input_layernorm)\.weight|"
    rf"fc\.post_attention_layernorm\.weight|embed_tokens\.weight|layers\.0\.({BLOCK_NAMES})",
    variants=((r"layers\.[1-9]", "only heads with one layer are supported"),),
)

TOKEN_WEIGHT = 0.1  # of the cross entropy beside the loss of the states
ALIGNED = 3  # a path is trained while its tokens are among so many likeliest ones


class FusionMlp(nn.Module):
    """down(silu(up [norm(x); norm(e)]))."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.up_proj = nn.Linear(2 * sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        norm = self.input_layernorm
        out: Tensor = self.down_proj(F.silu(self.up_proj(torch.cat([norm(x), norm(embedded)], dim=-1))))
        return out


class Fusion(nn.Module):
    """The state and the token as one vector."""

    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=bias)
        self.mlp = FusionMlp(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = self.fc(torch.cat([embedded, states], dim=-1))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x), embedded)
        return out


class ForkedLayer(Layer):
    """A layer without an input norm, whose MLP has two outputs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, norm_in=False)
        assert self.mlp is not None
        self.mlp.down_proj = nn.Linear(sizes.inner, 2 * sizes.hidden, bias=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        """[n, 2 * hidden]."""
        assert self.mlp is not None
        out: Tensor = torch.cat([x, x], dim=-1) + self.mlp(self.post_attention_layernorm(x))
        return out

    def step(self, x: Tensor, keys: Keys, rows: Rows) -> Tensor:
        """Both outputs of the rows, [m, 2 * hidden], from x of `PathLayer`'s rows."""
        attended = along_paths(self.self_attn, x, keys, rows)
        return self.feed_forward(attended + (x if len(keys) > 1 else x.index_select(0, rows.places)))


class Network(nn.Module):
    """Network for training, with the reference's names and token-alignable training.

    Step 0 reads the target's states, step s the second output of step s - 1, as EAGLE-3's network does, and
    the text's tokens.  A path counts in step s while the tokens that it has read were among the `ALIGNED`
    likeliest ones of the step before: others would not be drafted.

    Differences from the reference's training: there is no loss term over the 10 likeliest tokens, and the
    mask of aligned paths is shifted by one place.
    """

    def __init__(self, sizes: Sizes, vocabulary: int, bias: bool = True, steps: int = 3) -> None:
        super().__init__()
        self.sizes, self.vocabulary, self.steps = sizes, vocabulary, steps
        self.fc = Fusion(sizes, bias)
        self.layers = nn.ModuleList([ForkedLayer(sizes)])

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """A small one for this target, with random weights."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, **options)

    def config(self) -> dict[str, Any]:
        return eagle_config(self.sizes, self.vocabulary, self.fc.fc.bias is not None)

    def outputs(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int, rows: Rows
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Both outputs, [m, hidden], of every step, for the rows.

        Place t of n = len(tokens) - steps reads states[t] and tokens[t + 1 + step].
        """
        (layer,) = self.layers
        assert isinstance(layer, ForkedLayer)
        n, keys = len(tokens) - steps, Keys()
        g = states[:n]
        for step in range(steps):
            ids = tokens[1 + step + rows.places] if step else tokens[1 : 1 + n]
            predicted, g = layer.step(self.fc(embedding[ids], g), keys, rows).chunk(2, dim=-1)
            yield predicted, g

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Smooth L1 of the states plus a tenth of the cross entropy with the target's distribution."""
        states, device = sample.states[FINAL], sample.tokens.device
        counted = sample.host_places(0, len(states))
        targets = to_device(counted, device)
        tokens = F.pad(sample.tokens, (0, self.steps))
        predicted = [(sample.offsets[counted] > step).nonzero().flatten() for step in range(self.steps)]
        origins = [counted[own] - step - 1 for step, own in enumerate(predicted)]
        used = torch.zeros(len(states), dtype=torch.bool)
        used[torch.cat([torch.zeros(1, dtype=torch.int64), *origins])] = True  # one row at least
        rows = Rows.of(used.nonzero().flatten(), sample.lengths or [len(states)], device)
        row_of = used.cumsum(0) - 1
        aligned = torch.ones(len(rows.places), dtype=torch.bool, device=device)
        total = states.new_zeros(())
        levels = self.outputs(states, tokens, outer.embedding, self.steps, rows)
        for step, (out, continued) in enumerate(levels):
            own, places = (
                to_device(row_of[origins[step]], device),
                targets[to_device(predicted[step], device)],
            )
            logits = outer.logits(out.index_select(0, own))
            if step == 0:
                sample.record(logits, 1 + places)
            features = F.smooth_l1_loss(continued[own].float(), states[places], reduction="none").mean(-1)
            losses = features + TOKEN_WEIGHT * soft_cross_entropy(logits, sample.logits[places])
            weights = aligned[own].to(losses.dtype)
            total = total + (losses * weights).sum() / weights.sum().clamp_min(1)
            likeliest = logits.detach().topk(min(ALIGNED, logits.shape[-1])).indices
            hit = (likeliest == tokens[1 + places, None]).any(-1)
            aligned = aligned.index_put((own,), aligned[own] & hit)
        return total


class GriffinNet(Net):
    """The network on the target's kernels.  o [n, 2 * hidden]: both outputs."""

    def __init__(self, reader: Reader, target: Target) -> None:
        super().__init__(reader, target)
        hidden = self.hidden = self.model.spec.hidden
        fused, inner = (reader.matrix_shape(f"{at}.mlp.up_proj.weight")[0] for at in ("fc", "layers.0"))
        self.stack = Stack(reader, target, ["layers.0"], hidden, norm_optional=True, mlp=False)
        self.pairs = Pairs(self.model, None, None, self.stack.eps)
        self.fc = reader.linear("fc.fc", hidden, 2 * hidden)
        self.fusion_norm = reader.vector("fc.post_attention_layernorm.weight", hidden)
        self.both_norm = reader.vector("fc.mlp.input_layernorm.weight", hidden)
        self.fusion_up = reader.linear("fc.mlp.up_proj", fused, 2 * hidden)
        self.fusion_down = reader.linear("fc.mlp.down_proj", hidden, fused)
        self.mlp_norm = reader.vector("layers.0.post_attention_layernorm.weight", hidden)
        self.gate_up = reader.fused([(f"layers.0.mlp.{name}_proj", inner) for name in ("gate", "up")], hidden)
        self.down = reader.linear("layers.0.mlp.down_proj", 2 * hidden, inner)

    def from_output(self, o: Tensor) -> Tensor:
        return o[:, self.hidden :].contiguous()

    def logits(self, o: Tensor) -> Tensor:
        return super().logits(o[:, : self.hidden])

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        linear = self.backend.linear
        pairs = self.pairs(step_input, g)
        x = linear(pairs, self.fc)
        both = [self._normed(self._normed(x, self.fusion_norm), self.both_norm)]
        both.append(self._normed(pairs[:, : self.hidden], self.both_norm))
        x = x + linear(by_rows(F.silu, linear(torch.cat(both, dim=-1), self.fusion_up)), self.fusion_down)
        x = self.stack(x, step_input, pool)
        gate, up = linear(self._normed(x, self.mlp_norm), self.gate_up).chunk(2, dim=-1)
        return torch.cat([x, x], dim=-1) + linear(by_rows(F.silu, gate) * up, self.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.backend.rms_norm(x.contiguous(), weight, self.stack.eps)


@dataclass(frozen=True)
class GriffinOptions(RecurrentOptions):
    """Options of all recurrent heads."""

    draft_tensor_parallel_size: Annotated[int, ONE] = 1


class Griffin(Recurrent):
    FORMAT = FORMAT
    Options = GriffinOptions

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random head, and a wide and deep tree."""
        return cls(cls.Options(nodes=24, top_k=4), target, random_head(Network.like, target))

    @classmethod
    def claims(cls, head: Head) -> int:
        return 2 if SIGN in head else 0

    def network(self) -> Net:
        self.check_embedding()
        return GriffinNet(self.reader, self.target)
