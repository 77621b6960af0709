"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): one transformer layer continues the target's states.

    position of the target      t         t+1
    state, after the last norm  f_t                     the target emitted x_t+1 from it
    token                                 x_t+1
    g_t = fc [e(x_t+1); f_t],  o_t = layer(g_t)         o_t stands for f_t+1: the target's lm head gives x_t+2
    next level                            (o_t, draft of x_t+2)

The two differ in the tree only; "dynamic" is EAGLE-2's.  Positions and K/V: see heads/recurrent.py.

Published files.

    layout                         names
    reference, .bin or safetensors fc.*, layers.0.*, embed_tokens.weight (a copy of the target's, not read)
    SGLang                         the same, with LlamaForCausalLMEagle in the config
    vLLM, converted                model.* or model.model.*, lm_head.weight (a copy), enorm, hnorm,
                                   token_map (a smaller vocabulary)
    vLLM, as it reads              embedding_layernorm, hidden_states_layernorm (HASS with add_para_norm)
    speculators v0.1               fusion_fc.*, transformer.*, embedding_layernorm, pre_lm_head_layernorm
    Hydra, eagle-attn              fc.*, attn.* (with an input norm), input_embed_fn and lm_head (copies)

The file, not the config, decides whether fc has a bias.  The reference's has one unless the config says
otherwise, SGLang's always. vLLM reads the reference's files without it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.cache.pool import Pool
from outrider.checkpoints.heads import Head
from outrider.core.device import to_device
from outrider.core.ragged import Ragged
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.heads.layer import Pairs, Sizes, Stack
from outrider.heads.layouts import BLOCK_NAMES, UNCHANGED, HeadFormat, Layout
from outrider.heads.parts import Layer, eagle_config, small_sizes, soft_cross_entropy
from outrider.heads.reader import Reader
from outrider.heads.recurrent import Recurrent, RecurrentOptions
from outrider.heads.recurrent_net import Net
from outrider.heads.sample import Sample, TargetWeights, mean_loss
from outrider.heads.vocabulary import mapped_ids

ROWS = (
    ("{rest}.rotary_emb.inv_freq", None),
    ("rotary_emb.inv_freq", None),
    ("embedding_layernorm.{rest}", "norm_token.{rest}"),
    ("enorm.{rest}", "norm_token.{rest}"),
    ("hidden_states_layernorm.{rest}", "norm_state.{rest}"),
    ("hnorm.{rest}", "norm_state.{rest}"),
    ("pre_lm_head_layernorm.{rest}", "norm_out.{rest}"),
    ("norm.{rest}", "norm_out.{rest}"),
    *UNCHANGED,
)
SGLANG = "LlamaForCausalLMEagle"  # in the configs of its files
SPECULATORS = Layout(
    "speculators",
    ("fusion_fc.weight",),
    (*ROWS[:2], ("fusion_fc.{kind}", "fc.{kind}"), ("transformer.{rest}", "layers.0.{rest}"), *ROWS[2:]),
    ("model.",),
)
VLLM = Layout(
    "vLLM", ("model.{rest}", "embedding_layernorm.weight", "enorm.weight", "token_map"), ROWS, ("model.",)
)
HYDRA = Layout(
    "Hydra, eagle-attn",
    ("attn.self_attn.q_proj.weight",),
    (*ROWS[:2], ("input_embed_fn.weight", None), ("attn.{rest}", "layers.0.{rest}"), *ROWS[2:]),
)


def _refused(head: Head) -> str:
    offset = head.config.get("hidden_state_offset") if "hydra_head_arch" in head.config else None
    return f"it reads states {offset} layers before the last (hidden_state_offset)" if offset else ""


def _of_sglang(head: Head) -> bool:
    return SGLANG in (head.config.get("architectures") or ())


# The reference's names, which others write and read, too.
NAMED_AS_REFERENCE = (
    Layout("SGLang", ("fc.weight",), ROWS, applies=_of_sglang),
    Layout("reference, vLLM", ("fc.weight",), ROWS, applies=lambda head: "fc.bias" not in head),
    Layout("reference", ("fc.weight",), ROWS),
)
FORMAT = HeadFormat(
    (SPECULATORS, VLLM, HYDRA, *NAMED_AS_REFERENCE),
    hidden=(("fc.weight", 0),),
    vocabulary=("lm_head.weight", "embed_tokens.weight"),
    known=rf"fc\.(weight|bias)|token_map|(norm_(token|state|out)|lm_head|embed_tokens)\.weight|"
    rf"layers\.\d+\.({BLOCK_NAMES})",
    variants=(("", "only dense layers as Llama's and Qwen's are supported"),),
    kinds="eagle",
    refused=_refused,
)


# Width of the uniform noise on states in training, at up to NOISE_LENGTH tokens, and less for longer texts:
# recurrent states are inexact, too.
NOISE, NOISE_LENGTH = 0.2, 512
TOKEN_WEIGHT = 0.1  # of the cross entropy beside the loss of the states


class Network(nn.Module):
    """Network for training, with the reference's names and config: fc over [embedding; state], then one
    layer without an input norm.
    """

    def __init__(self, sizes: Sizes, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        self.sizes, self.vocabulary = sizes, vocabulary
        self.fc = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=bias)
        self.layers = nn.ModuleList([Layer(sizes, norm_in=False)])

    @classmethod
    def like(cls, target: Target, **options: Any) -> Network:
        """A small one for this target, with random weights."""
        spec = target.decoder.spec
        return cls(small_sizes(spec), spec.vocabulary, **options)

    def config(self) -> dict[str, Any]:
        return eagle_config(self.sizes, self.vocabulary, self.fc.bias is not None)

    def forward(self, tokens: Tensor, states: Tensor, texts: Ragged | None = None) -> Tensor:
        """Predicted states f_1 … f_T of the embeddings e(x_1) … e(x_T) and the states f_0 … f_T-1, each
        [T, hidden].  texts: where there are several."""
        (layer,) = self.layers
        assert isinstance(layer, Layer)
        return layer.over_texts(self.fc(torch.cat([tokens, states], dim=-1)), texts)

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        """Smooth L1 of the states plus a tenth of the cross entropy with the target's distribution.

        tokens    x_0   x_1   x_2 … x_T            pair t is (f_t, x_t+1); its output o_t approximates f_t+1
        states    f_0   f_1   f_2 … f_T
        pair            0     1   … T-1

        The pair of a text's last place has a token of the next text, or 0, and does not count.
        """
        states, count = sample.states[FINAL], len(sample.tokens) - 1
        given = states + self._noise(sample) if self.training else states
        rows = sample.places(1, count)
        embedded = outer.embedding[F.pad(sample.tokens[1:], (0, 1))]
        out = self(embedded, given, sample.texts).index_select(0, rows)
        logits = outer.logits(out)
        sample.record(logits, 2 + rows)
        tokens = soft_cross_entropy(logits, sample.logits[1 + rows])
        features = F.smooth_l1_loss(out.float(), states[1 + rows], reduction="none").mean(-1)
        return mean_loss(features + TOKEN_WEIGHT * tokens)

    def _noise(self, sample: Sample) -> Tensor:
        """[T, hidden]."""
        lengths = torch.tensor(sample.lengths or [len(sample.tokens)])
        widths = NOISE * (NOISE_LENGTH / (lengths - 1)).clamp(max=1.0).repeat_interleave(lengths)
        centred: Tensor = sample.uniforms(self.sizes.hidden) - 0.5
        return centred * to_device(widths, centred.device)[:, None]


class EagleNet(Net):
    """The network on the target's kernels.  A norm that the file lacks is the identity."""

    def __init__(self, reader: Reader, target: Target) -> None:
        super().__init__(reader, target)
        head, hidden = self.head, self.model.spec.hidden
        self.fc = reader.linear("fc", hidden, 2 * hidden)
        count = sum(name.endswith(".self_attn.q_proj.weight") for name in head)
        self.stack = Stack(reader, target, [f"layers.{i}" for i in range(count)], hidden, norm_optional=True)
        norm_token, norm_state, self.norm = (
            reader.optional(f"{name}.weight", hidden) for name in ("norm_token", "norm_state", "norm_out")
        )
        self.pairs = Pairs(self.model, norm_token, norm_state, self.stack.sizes.eps)
        if "token_map" in head:  # a reduced vocabulary with an lm head of its own
            self.ids = mapped_ids(head, target.vocabulary)
            self.lm_head = reader.lm_head_for("lm_head", self.ids, hidden)

    def forward(self, step_input: StepInput, pool: Pool, g: Tensor) -> Tensor:
        return self.stack(self.backend.linear(self.pairs(step_input, g), self.fc), step_input, pool)


class Eagle(Recurrent):
    FORMAT = FORMAT
    demo: ClassVar = {"EAGLE": {"model": "builtin-eagle", "tree": "chain", "num_speculative_tokens": 4}}
    Options = RecurrentOptions

    @classmethod
    def claims(cls, head: Head) -> int:
        """2: fc has two inputs, and the layer after it reads one state."""
        ours, q = FORMAT.renamed(head), "layers.0.self_attn.q_proj.weight"
        # A norm over the taps belongs to a block-parallel head.
        other = "hidden_norm.weight" in ours or any("mtp." in name for name in head)
        if "fc.weight" in ours and q in ours and not other:
            hidden, inputs = ours.shape("fc.weight")
            if inputs == 2 * hidden and ours.shape(q)[1] == hidden:
                return 2
        return int(FORMAT.named_in(head.config))

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """A random head, and a wide and deep tree."""
        return cls(cls.Options(nodes=24, top_k=4), target, random_head(Network.like, target))

    def network(self) -> Net:
        self.check_embedding()
        if "hydra_head_arch" in self.head.config:
            self.complete_config()
        return EagleNet(self.reader, self.target)
