"""The networks that learn: those of heads and draft models in use, with their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.checkpoints.spec import DENSE, Spec
from outrider.draft import eagle, eagle3, hydra, medusa
from outrider.draft.draft_model import DraftModel
from outrider.drafting.base import Drafter
from outrider.errors import ConfigError
from outrider.heads.base import HeadDrafter
from outrider.heads.layer import Sizes
from outrider.heads.parts import THETA
from outrider.heads.sample import Sample, TargetWeights
from outrider.models.differentiable import load_weights, new_module, text_logits

COPIES = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"}  # of the target, or by the settings
FLAGS = (
    "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "original_lm_head",
    "hidden_state_offset",
)  # fmt: skip
ROTATIONS = ("rope_scaling", "rope_parameters")  # of heads with attention
CURE = "is not trained while serving: leave online out, or give another head."
N = TypeVar("N", bound=nn.Module)


@dataclass(frozen=True)
class Trainable:
    """A network with the weights of a drafter.  config: of its file."""

    network: nn.Module
    loss: Callable[[Sample, TargetWeights], Tensor]
    config: Mapping[str, Any]

    @staticmethod
    def of(drafter: Drafter) -> Trainable:
        """Raise ConfigError for a method or a variant that is not trained while serving."""
        if isinstance(drafter, HeadDrafter):
            network = _head(drafter)
            return Trainable(network, network.loss, drafter.head.config)  # type: ignore[arg-type]
        if isinstance(drafter, DraftModel):
            model = _draft_model(drafter)
            config = json.loads(model.config.to_json_string(use_diff=False))
            return Trainable(model, partial(_distilled, model), config)
        raise ConfigError(f"online: a drafter of the method {drafter.sources[0]!r} {CURE}")


def _draft_model(drafter: DraftModel) -> Any:
    options, vocabulary = drafter.options, drafter.target.vocabulary
    if drafter.one_pass is not None:
        raise ConfigError(f"online: the PARD model {options.model!r} {CURE.replace('head', 'draft model')}")
    own = not drafter.itself and drafter.states is None and options.draft_tensor_parallel_size == 1
    checkpoint = drafter.checkpoint if own and options.vocab_mismatch == "refuse" else None
    readable = checkpoint and isinstance(checkpoint.spec, Spec) and checkpoint.gguf is None
    if not checkpoint or not readable or drafter.vocabulary != vocabulary:
        raise ConfigError(
            f"online: the draft {options.model!r} is not trained while serving: leave online out, or give "
            f"one of {', '.join(DENSE)} in safetensors, with the target's vocabulary, in one process."
        )
    spec = checkpoint.spec
    if isinstance(spec, Spec) and spec.experts is not None and any(spec.experts.layers):
        raise ConfigError(
            f"online: the draft {options.model!r} is a mixture of experts, which is not trained while "
            "serving: leave online out, or give a draft without experts."
        )
    network = new_module(checkpoint.config)
    load_weights(network, checkpoint)
    return network


def _distilled(network: Any, sample: Sample, outer: TargetWeights) -> Tensor:
    """Cross entropy with the target's distributions."""
    places = sample.places(0, len(sample.tokens))
    logits = text_logits(network, sample.tokens, places)[:, : sample.logits.shape[1]]
    sample.record(logits, 1 + places)
    return sample.target_loss(logits, places)


def _head(drafter: HeadDrafter) -> nn.Module:
    head, hidden, vocabulary = drafter.head, drafter.hidden, drafter.target.vocabulary
    if drafter.reader.ranks > 1:
        raise ConfigError(f"online: a head with draft_tensor_parallel_size {drafter.reader.ranks} {CURE}")
    if isinstance(drafter, eagle3.Eagle3):
        sizes, ids = Sizes.of(head, "midlayer", hidden), drafter.net.ids
        drafted = None if ids is None else ids.tolist()
        return loaded(eagle3.Network(sizes, vocabulary, drafter.net.taps, drafted, steps=3, decay=0.8), head)
    if isinstance(drafter, eagle.Eagle):
        sizes = Sizes.of(head, "layers.0", hidden)
        return loaded(eagle.Network(sizes, vocabulary, "fc.bias" in head), head)
    if isinstance(drafter, medusa.Medusa):
        heads, blocks = medusa.counts(head)
        if blocks > 1 and len({head.stored[f"0.{j}.linear.weight"] for j in range(blocks)}) > 1:
            raise ConfigError(f"online: a Medusa head whose blocks differ, as in {head.name!r}, {CURE}")
        own = "0.lm_head.weight" in head
        network = medusa.Network(hidden, vocabulary, heads, blocks, own)
        return loaded(network, head, lambda name: medusa.REFERENCE.ours(name, blocks=blocks) or name)
    if isinstance(drafter, hydra.Hydra):
        layers, own = int(head.config.get("hydra_num_layers") or 1), "hydra_lm_head.0.weight" in head
        heads = len(drafter.heads)
        return loaded(hydra.Network(hidden, vocabulary, heads, layers, dropout=0.0, own=own), head)
    raise ConfigError(f"online: a head of the method {drafter.sources[0]!r} {CURE}")


def loaded(network: N, head: Head, ours: Callable[[str], str] = lambda name: name) -> N:
    """The network with the weights of a head, quantized ones in float32.

    ours: our name of one of the network's tensors.  Raises ConfigError for a head with other tensors or
    settings.
    """
    own = network.state_dict()
    extra = sorted({*head} - {ours(name) for name in own} - COPIES)
    attends = any("self_attn" in name for name in own)  # others may carry the target's rotations
    extra += [key for key in FLAGS + ROTATIONS * attends if head.config.get(key)]
    if attends and (theta := head.config.get("rope_theta") or THETA) != THETA:
        extra.append(f"rope_theta {theta}")
    if extra:
        raise ConfigError(f"online: a head with {', '.join(extra[:4])}, as {head.name!r}, {CURE}")
    for name, tensor in own.items():
        if tensor.is_floating_point():  # the rest follows from the settings
            tensor.copy_(head.get(ours(name), *tensor.shape))
    return network
