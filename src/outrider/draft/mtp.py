"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608): layers trained and
shipped with a target, one for each level (heads/layered.py).

The only layer of a file with one recurs (FastMTP, arXiv 2509.18362), as the last of several does after its
level.

Other engines zero the embedding at position 0, because they place pairs at their tokens and no state
precedes token 0. Here no pair has token 0, so nothing is zeroed.

Published files.

    layout        names                                              the layer reads       state
    deepseek      model.layers.{L+i}.{enorm,hnorm,eh_proj,…}         [embedding; state]    after the last norm
    mimo          model.mtp_layers.{i}.{token_layernorm,…}           [state; embedding]    before it
    ernie         model.mtp_{emb_norm,hidden_norm,…}.{i}, mtp_block  [embedding; state]    before it; (*)
    speculators   mtp_layers.{i}.{token_layernorm,…}                 [embedding; state]    after it
    qwen          mtp.{fc,pre_fc_norm_embedding,…}, mtp.layers.0     [embedding; state]    after it

The last norm is the target's.  (*): the target's norm follows, and queries and keys rotate the pairs
(2i, 2i + 1).

Ours: layers.{i}.{enorm,hnorm,eh_proj,norm} and those of a block; eh_proj reads [embedding; state].  A block
that is not Llama's, Qwen2's or Qwen3's (with experts, compressed attention or gates) is one of the target's
family, and runs as the target does: in transformers' own code, or on the lean decoder.
Embedding and lm_head are the target's; copies of them in the file are not read.  The output of a layer is
before or after its last norm, as the states that it reads are.  Engines disagree which: our config states it
("prenorm").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.core.ragged import Ragged
from outrider.core.step import FINAL
from outrider.core.validate import Flag
from outrider.drafting.base import Drafter, Target
from outrider.errors import ModelError
from outrider.heads.base import random_head
from outrider.heads.layer import Sizes
from outrider.heads.layered import FOREIGN, LayeredNet, LayerForwards
from outrider.heads.layouts import HeadFormat, Layout, Rows, numbers, unchanged
from outrider.heads.parts import Layer, sizes_config, small_sizes
from outrider.heads.recurrent import Forwards, Reading, Recurrent, RecurrentOptions
from outrider.heads.sample import Sample, TargetWeights


def _rows(at: str, names: Mapping[str, str], published: str = "{at}.{name}") -> Rows:
    """at: beginning of a layer's names.  names: published module -> ours.  published: a module's name."""
    named = {published.format(at=at, name=theirs): ours for theirs, ours in names.items()}
    copies = ("embed_tokens", "shared_head.head", "rotary_emb", "self_attn.rotary_emb")
    return (
        *((f"{at}.{copy}.{{rest}}", None) for copy in copies),
        *((f"{theirs}.{{kind}}", f"layers.{{i}}.{ours}.{{kind}}") for theirs, ours in named.items()),
        (f"{at}.{{rest}}", "layers.{i}.{rest}"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        *unchanged("lm_head.weight"),
    )


MIMO = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "norm",
}
QWEN: Rows = (
    ("mtp.fc.weight", "layers.0.eh_proj.weight"),
    ("mtp.pre_fc_norm_embedding.weight", "layers.0.enorm.weight"),
    ("mtp.pre_fc_norm_hidden.weight", "layers.0.hnorm.weight"),
    ("mtp.norm.weight", "layers.0.norm.weight"),
    ("mtp.layers.{i}.{rest}", "layers.{i}.{rest}"),
    ("model.embed_tokens.weight", "embed_tokens.weight"),
    *unchanged("lm_head.weight"),
)
ERNIE = {"emb_norm": "enorm", "hidden_norm": "hnorm", "linear_proj": "eh_proj"}


def _first_layer(head: Head) -> dict[str, int]:
    """The number of the first prediction layer, which is the number of layers of the target."""
    return {"target_layers": min(numbers(head, "model.layers.{i}.eh_proj.weight"))}


def swap_inputs(weight: Tensor, config: Mapping[str, Any]) -> Tensor:
    """[h, 2h] for [state; embedding] as one for [embedding; state], and back."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _unpair(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Outputs that rotate in pairs (2i, 2i + 1), reordered to rotate in pairs (i, i + half)."""
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    pairs = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


BEFORE, AFTER = (("prenorm", True),), (("prenorm", False),)
SWAPPED = ((r"eh_proj\.weight$", swap_inputs),)
LAYOUTS = {
    "deepseek": Layout(
        "DeepSeek",
        ("model.layers.{i}.eh_proj.weight",),
        _rows("model.layers.{i+target_layers}", {"shared_head.norm": "norm"}),
        numbers=_first_layer,
        defaults=AFTER,
    ),
    "mimo": Layout(
        "MiMo",
        ("model.mtp_layers.{i}.input_proj.weight",),
        _rows("model.mtp_layers.{i}", MIMO),
        changes=SWAPPED,
        defaults=BEFORE,
    ),
    "ernie": Layout(
        "Ernie",
        ("model.mtp_linear_proj.{i}.weight",),
        _rows("model.mtp_block.{i}", ERNIE, "model.mtp_{name}.{{i}}"),
        changes=((r"self_attn\.[qk]_proj\.", _unpair),),
        defaults=BEFORE,
    ),
    "speculators": Layout(
        "speculators", ("mtp_layers.{i}.input_proj.weight",), _rows("mtp_layers.{i}", MIMO), defaults=AFTER
    ),
    "qwen": Layout("Qwen3-Next", ("mtp.fc.weight",), QWEN, defaults=(*AFTER, (FOREIGN, True))),
}


def _refused(head: Head) -> str:
    if any(layout.found_in(head) for layout in LAYOUTS.values()):
        return ""
    return (
        "it has no multi-token prediction layers: give as 'model' a folder that has them in the layout of "
        f"{', '.join(LAYOUTS)}, or choose another method"
    )


FORMAT = HeadFormat(
    tuple(LAYOUTS.values()),
    hidden=(("layers.{i}.eh_proj.weight", 0),),
    vocabulary=("embed_tokens.weight", "lm_head.weight"),
    known=r"(embed_tokens|lm_head)\.weight|layers\.\d+\.(?!.*(scale|qweight|packed|zeros)).+",
    variants=(("", "quantized weights"),),
    kinds="(.*_)?mtp",
    refused=_refused,
)


DECAY = 0.6  # FastMTP's weight of each further depth that the last layer predicts


class PredictionLayer(Layer):
    """A block over eh_proj [enorm(embedding); hnorm(state)], and the norm of its output."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        hidden = sizes.hidden
        self.enorm, self.hnorm = nn.RMSNorm(hidden, sizes.eps), nn.RMSNorm(hidden, sizes.eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.eh_proj.weight.data = torch.eye(hidden, 2 * hidden)  # passes the embedding on at first
        self.shared_head = nn.ModuleDict({"norm": nn.RMSNorm(hidden, sizes.eps)})


class Network(nn.Module):
    """Network for training, with DeepSeek's names and Llama's block.

    first: layers of the target.  layers: prediction layers.  steps: depths in the loss, by default one per
    layer.  prenorm: the layers read states before the target's last norm.
    """

    def __init__(
        self,
        sizes: Sizes,
        vocabulary: int,
        first: int,
        layers: int = 1,
        steps: int | None = None,
        prenorm: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.vocabulary, self.first = sizes, vocabulary, first
        self.steps, self.prenorm = steps or layers, prenorm
        self.taps = (first if prenorm else FINAL,)
        by_number = nn.ModuleDict({str(first + i): PredictionLayer(sizes) for i in range(layers)})
        self.model = nn.ModuleDict({"layers": by_number})
        self.layers: list[Any] = list(by_number.values())

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """Small ones for this target, with random weights."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, spec.layers, **options)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepSeekMTPModel"],
            "model_type": "deepseek_mtp",
            **sizes_config(self.sizes),
            "vocab_size": self.vocabulary,
            "num_hidden_layers": self.first,
            "num_nextn_predict_layers": len(self.layers),
            "prenorm": self.prenorm,
        }

    def forward(
        self, tokens: Tensor, states: Tensor, depth: int = 0, texts: Ragged | None = None
    ) -> tuple[Tensor, Tensor]:
        """(states for the next depth, input of the lm_head) of the embeddings and states of one depth, [T,
        hidden] each.  texts: where there are several."""
        layer = self.layers[min(depth, len(self.layers) - 1)]
        x = layer.eh_proj(torch.cat([layer.enorm(tokens), layer.hnorm(states)], dim=-1))
        x = layer.over_texts(x, texts)
        normed = layer.shared_head["norm"](x)
        return (x if self.prenorm else normed), normed

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Cross entropy with the target's distribution, on the text's tokens: weighted mean of all depths.

        tokens      x_0   x_1   x_2   x_3 … x_T         pair t of depth k: (state t, x_t+k+1) → p_t+k+1
        states      f_0   f_1   f_2   f_3 … f_T
        depth 0   (f_0    x_1)→ p_1
        depth 1   (h_0          x_2)→ p_2               h_t: output of depth 0 at t

        Pairs of a text's last places have tokens of the next text, or 0: none of them counts, and only such
        pairs attend to them.
        """
        states, total, weights = sample.states[self.taps[0]], outer.embedding.new_zeros(()), 0.0
        count, tokens = len(sample.tokens), F.pad(sample.tokens, (0, self.steps))
        for depth in range(self.steps):
            embedded = outer.embedding[tokens[depth + 1 : depth + 1 + count]]
            states, out = self(embedded, states, depth, sample.texts)
            weight = DECAY ** max(0, depth - len(self.layers) + 1)
            rows = sample.places(depth + 1, count - depth - 1)
            loss = sample.target_loss(outer.logits(out.index_select(0, rows)), depth + 1 + rows)
            total, weights = total + weight * loss, weights + weight
        return total / weights


RECURRENT_DEPTH = 3  # levels that a single layer drafts


class Mtp(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"MTP layer": {"model": "builtin-mtp", "tree": "chain", "num_speculative_tokens": 3}}
    net: LayeredNet

    @dataclass(frozen=True)
    class Options(RecurrentOptions):
        """model: the target's own layers unless given.  prenorm: whether the layers read states before the
        last norm (None: as the file's producer does)."""

        prenorm: Flag | None = None

    def __init__(self, options: Any, target: Target, head: Head | None = None) -> None:
        super().__init__(options, target, _own(target) if head is None and not options.model else head)
        count = self.net.count
        self.depth, self.overlap = RECURRENT_DEPTH if count == 1 else count, count - 1
        self.needs = self.needs._replace(lookbehind=count)

    def forwards(self, readings: Sequence[Reading]) -> Forwards:
        return LayerForwards(self, readings)

    @classmethod
    def claims(cls, head: Head) -> int:
        """0 for a whole language model."""
        return 0 if "model.norm.weight" in head else super().claims(head)

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """Two random layers, and a wide tree that is deeper than their number."""
        drafter = cls(cls.Options(nodes=24, top_k=3), target, random_head(Network.like, target, layers=2))
        drafter.depth = 4
        return drafter

    def network(self) -> LayeredNet:
        given, in_file = self.options.prenorm, self.head.config["prenorm"]
        return LayeredNet(self.reader, self.target, in_file if given is None else given)


def _own(target: Target) -> Head:
    """The target's own checkpoint."""
    checkpoint = target.checkpoint
    if checkpoint.gguf is not None:
        raise ModelError(
            f"{checkpoint.name!r} is a GGUF file, whose prediction layers are not read: give a folder with "
            "them as 'model'."
        )
    return replace(Head.open(str(checkpoint.folder)), name=checkpoint.name)
