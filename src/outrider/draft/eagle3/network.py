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
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafting.base import Target
from outrider.heads.layer import Sizes
from outrider.heads.parts import acceptance_loss, small_sizes, soft_cross_entropy
from outrider.heads.sample import Sample, TargetWeights, mean_loss
from outrider.heads.tapped import default_taps
from outrider.heads.tapped_parts import Keys, PathLayer, Rows, TapNetwork, small_vocabulary


class Network(TapNetwork):
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
        """embeds: it has an embedding of its own.  steps: steps in the loss (the reference 7, speculators 3).
        decay: weight of a step relative to the one before it (the reference 0.8).
        acceptance: the loss is `acceptance_loss`, not the cross entropy with the target.
        """
        super().__init__(sizes, vocabulary, taps, drafted, positions)
        self.steps, self.decay = steps, decay
        self.row_loss = acceptance_loss if acceptance else soft_cross_entropy
        self.midlayer = PathLayer(sizes)
        self.embed_tokens = nn.Embedding(vocabulary, sizes.hidden) if embeds else None

    @classmethod
    def like(cls, target: Target) -> Network:
        """A small one for this target, with random weights and two tokens of three."""
        spec, embeds = target.decoder.spec, target.decoder.embed([0]).shape[1] != target.decoder.spec.hidden
        drafted, taps = small_vocabulary(target.vocabulary), default_taps(spec.layers)
        return cls(small_sizes(spec), target.vocabulary, taps, drafted, target.max_len, embeds)

    def config(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], **self.layer_config(1), **self.head_config()}

    def logits(self, o: Tensor) -> Tensor:
        return self.lm_head(self.norm(o))  # type: ignore[no-any-return]

    def outputs(
        self, states: Tensor, tokens: Tensor, embedding: Tensor, steps: int, rows: Rows | None = None
    ) -> Iterator[Tensor]:
        """o [m, hidden] of every step, for the rows; None: for all places.

        Place t of n = len(tokens) - steps reads states[t] and tokens[t + 1 + step].
        """
        own, n, keys = self.embed_tokens, len(tokens) - steps, Keys()
        every = torch.arange(n, device=tokens.device)
        rows, o = rows or Rows.of(every, [n]), self.fc(states[:n])
        for step in range(steps):
            ids = tokens[1 + step + (rows.places if step else every)]
            o = self.midlayer.step(o, embedding[ids] if own is None else own(ids), keys, rows)
            yield o

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution over the head's tokens.

        Counts the places where the target's likeliest token is one of them.  The last places of a text have
        fewer steps, and its first ones are predicted by fewer.
        """
        states, tokens = torch.cat([sample.states[tap] for tap in self.taps], -1), sample.tokens
        counted = sample.places(0, len(states))
        theirs = sample.logits[counted, : self.vocabulary]
        known = self.known(theirs)
        counted, theirs = counted[known], theirs[known][:, self.ids]
        within = [sample.offsets[counted] > step for step in range(self.steps)]
        used = torch.zeros_like(tokens, dtype=torch.bool)
        for step, found in enumerate(within):
            used[counted[found] - step - 1] = True
        rows = Rows.of(used.nonzero().flatten(), sample.lengths or [len(states)])
        total, number = states.new_zeros(()), used.cumsum(0) - 1
        outputs = self.outputs(states, F.pad(tokens, (0, self.steps)), outer.embedding, self.steps, rows)
        for step, (o, found) in enumerate(zip(outputs, within)):
            losses = self.row_loss(self.logits(o[number[counted[found] - step - 1]]), theirs[found])
            total = total + self.decay**step * mean_loss(losses)
        return total
