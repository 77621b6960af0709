"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one layer on the inputs of three layers of the target.

It predicts x_t+2 from the states at t and the token x_t+1, over a vocabulary of its own.  For the
next draft token its own output takes the place of the state.  Network: heads/tapped.py; K/V:
heads/recurrent.py; trees: heads/trees.py.

Published files.

ours, as the reference (SafeAILab, SpecForge)       speculators, vLLM       SGLang
fc, norm, lm_head, d2t, t2d, embed_tokens           the same                the same
midlayer.…                                          layers.0.…              the same
layers.1.…, layers.2.… (ordinary layers)            the same                additional_layers.0.…, 1.…
fc_norm.0, …, input_norm (variants)                 the same                not supported
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.device import to_device
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.layouts import UNCHANGED, HeadFormat, Layout
from outrider.heads.parts import acceptance_loss, soft_cross_entropy
from outrider.heads.recurrent import Recurrent, RecurrentOptions
from outrider.heads.sample import Sample, TargetWeights
from outrider.heads.tapped import TAPS, TapNet, TapOptions, is_parallel
from outrider.heads.tapped_parts import Keys, PathLayer, Rows, TapNetwork

FIRST = ("midlayer.{rest}", "midlayer.{rest}")
REST = (
    ("layers.0.{rest}", "midlayer.{rest}"),
    ("d2t", "d2t"),
    ("draft_id_to_target_id", "d2t"),
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("verifier_{rest}", None),
    ("layers.{i}.hidden_norm.weight", None),  # vLLM gives every layer a norm that only the first uses
    *UNCHANGED,
)
VLLM = Layout("speculators, vLLM", ("layers.0.hidden_norm.weight",), REST, ("model.",))
SGLANG = Layout(
    "SGLang",
    ("additional_layers.{i}.{rest}",),
    (
        ("additional_layers.{i}.hidden_norm.{rest}", "layers.{i+1}.input_layernorm.{rest}"),
        ("additional_layers.{i}.{rest}", "layers.{i+1}.{rest}"),
        FIRST,
        *REST,
    ),
    ("model.",),
)
REFERENCE = Layout("reference", ("midlayer.hidden_norm.weight",), (FIRST, *REST), ("model.",))
READ_BY_SGLANG = replace(REFERENCE, publisher="reference, SGLang", applies=lambda head: not _variant(head))


def _variant(head: Head) -> bool:
    """Whether a head has norms that SGLang does not read."""
    return any("fc_norm" in name or "input_norm" in name for name in head)


FORMAT = HeadFormat(
    (SGLANG, VLLM, READ_BY_SGLANG, REFERENCE),
    hidden=(("fc.weight", 1),),
    vocabulary=("lm_head.weight",),
    taps=(TAPS,),
    kinds=".*Eagle3.*|eagle3",
)


class Network(TapNetwork):
    """Network for training, with the reference's names, and its training-time-test loss.

    Step 0 reads the target's states, step s the output of step s - 1, as in drafting; the tokens are the
    text's.

        place t                   0          1          2
        step 0 reads pair      (f_0, x_1) (f_1, x_2) (f_2, x_3)      at position t; predicts x_t+2
        step 1                 (o_0, x_2) (o_1, x_3) (o_2, x_4)      at t + 1, o of step 0; predicts x_t+3
        step s                        (o_t, x_t+s+1)                 at position t + s; predicts x_t+s+2

    Step s at place t attends to step 0 at places 0 … t and to steps 1 … s at place t: the committed text and
    its own path.
    """

    def __init__(
        self,
        *tap: Any,
        embeds: bool = False,
        steps: int = 3,
        decay: float = 1.0,
        acceptance: bool = False,
        **options: Any,
    ) -> None:
        """tap, options: as of `TapNetwork`.  embeds: it has an embedding of its own.  steps: in the loss (the
        reference 7, speculators 3).  decay: weight of a step relative to the one before it (the reference
        0.8).  acceptance: the loss is `acceptance_loss`, not the cross entropy with the target.
        """
        super().__init__(*tap, **options)
        self.steps, self.decay = steps, decay
        self.row_loss = acceptance_loss if acceptance else soft_cross_entropy
        self.midlayer = PathLayer(self.sizes)
        self.embed_tokens = nn.Embedding(self.vocabulary, self.sizes.hidden) if embeds else None

    @classmethod
    def like(cls, target: Target, **options: Any) -> Self:
        embeds = target.decoder.embed([0]).shape[1] != target.decoder.spec.hidden
        return super().like(target, embeds=embeds, **options)

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
        rows, o = rows or Rows.of(torch.arange(n), [n], tokens.device), self.fc(states[:n])
        for step in range(steps):
            ids = tokens[1 + step + rows.places] if step else tokens[1 : 1 + n]
            o = self.midlayer.step(o, embedding[ids] if own is None else own(ids), keys, rows)
            yield o

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution over the head's tokens.

        Counts the places where the target's likeliest token is one of them.  The last places of a text have
        fewer steps, and its first ones are predicted by fewer.
        """
        states, tokens = torch.cat([sample.states[tap] for tap in self.taps], -1), sample.tokens
        counted, device = sample.host_places(0, len(states)), tokens.device
        target_logits = sample.logits[to_device(counted, device), : self.vocabulary]
        known, target_logits = self.known(target_logits), target_logits[:, self.ids]
        predicted = list[Tensor]()  # by step: indices in `counted` of the places that it predicts
        origins = list[Tensor]()  # by step: the places from which it predicts these
        for step in range(self.steps):
            predicted.append((sample.offsets[counted] > step).nonzero().flatten())
            origins.append(counted[predicted[step]] - step - 1)
        used = torch.zeros(len(tokens), dtype=torch.bool)
        used[torch.cat([torch.zeros(1, dtype=torch.int64), *origins])] = True  # one row at least
        rows = Rows.of(used.nonzero().flatten(), sample.lengths or [len(states)], device)
        row_of = used.cumsum(0) - 1
        total, padded = states.new_zeros(()), F.pad(tokens, (0, self.steps))
        for step, o in enumerate(self.outputs(states, padded, outer.embedding, self.steps, rows)):
            own_rows, places = to_device(row_of[origins[step]], device), to_device(predicted[step], device)
            logits = self.logits(o.index_select(0, own_rows))
            if step == 0:
                sample.record(logits, 1 + to_device(counted[predicted[0]], device), self.ids)
            losses = self.row_loss(logits, target_logits[places])
            weights = known[places].to(losses.dtype)
            total = total + self.decay**step * (losses * weights).sum() / weights.sum().clamp_min(1)
        return total


class Eagle3(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"EAGLE-3": {"model": "builtin-eagle3", "tree": "chain", "num_speculative_tokens": 4}}

    @dataclass(frozen=True)
    class Options(TapOptions, RecurrentOptions):
        """Options of all recurrent heads, and the states of the target that the head reads."""

    def network(self) -> TapNet:
        return TapNet(self.reader, self.target, self.options)

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: the first layer has two norms and reads twice the width that it writes."""
        if is_parallel(head) or head.config.get("speculators_model_type", "eagle3") != "eagle3":
            return 0
        ours = FORMAT.renamed(head)
        norm, q, o = (
            f"midlayer.{name}.weight" for name in ("hidden_norm", "self_attn.q_proj", "self_attn.o_proj")
        )
        if norm in ours and q in ours and o in ours and ours.shape(q)[-1] == 2 * ours.shape(o)[0]:
            return 2
        return int(FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random network over two thirds of the tokens."""
        return cls(cls.Options(), target, random_head(Network.like, target))
