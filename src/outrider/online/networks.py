"""The training networks of heads that are in use, with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from outrider.checkpoints.heads import Head
from outrider.draft.eagle import Eagle
from outrider.draft.eagle import network as eagle
from outrider.draft.eagle3 import Eagle3
from outrider.draft.eagle3 import network as eagle3
from outrider.draft.hydra import Hydra
from outrider.draft.hydra import network as hydra
from outrider.draft.medusa import Medusa
from outrider.draft.medusa import network as medusa
from outrider.draft.medusa.layouts import REFERENCE, counts
from outrider.errors import ConfigError
from outrider.heads.base import HeadDrafter
from outrider.heads.layer import Sizes
from outrider.heads.parts import THETA

COPIES = {"embed_tokens.weight", "lm_head.weight", "t2d", "d2t"}  # of the target, or by the settings
FLAGS = (
    "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "original_lm_head",
    "hidden_state_offset",
)  # fmt: skip
ROTATIONS = ("rope_scaling", "rope_parameters")  # of heads with attention
CURE = "is not trained while serving: leave online out, or give another head."
N = TypeVar("N", bound=nn.Module)


def trainable(drafter: HeadDrafter) -> nn.Module:
    """The network with the weights of a drafter's head.

    Raises ConfigError for a method or a variant that is not trained while serving.
    """
    head, hidden, vocabulary = drafter.head, drafter.hidden, drafter.target.vocabulary
    if isinstance(drafter, Eagle3):
        sizes, ids = Sizes.of(head, "midlayer", hidden), drafter.net.ids
        drafted = None if ids is None else ids.tolist()
        return loaded(eagle3.Network(sizes, vocabulary, drafter.net.taps, drafted, steps=3, decay=0.8), head)
    if isinstance(drafter, Eagle):
        sizes = Sizes.of(head, "layers.0", hidden)
        return loaded(eagle.Network(sizes, vocabulary, "fc.bias" in head), head)
    if isinstance(drafter, Medusa):
        heads, blocks = counts(head)
        if blocks > 1 and len({head.stored[f"0.{j}.linear.weight"] for j in range(blocks)}) > 1:
            raise ConfigError(f"online: a Medusa head whose blocks differ, as in {head.name!r}, {CURE}")
        own = "0.lm_head.weight" in head
        network = medusa.Network(hidden, vocabulary, heads, blocks, own)
        return loaded(network, head, lambda name: REFERENCE.ours(name, blocks=blocks) or name)
    if isinstance(drafter, Hydra):
        layers, own = int(head.config.get("hydra_num_layers") or 1), "hydra_lm_head.0.weight" in head
        return loaded(hydra.Network(hidden, vocabulary, len(drafter.heads), layers, None, 0.0, own), head)
    raise ConfigError(f"online: a head of the method {drafter.sources[0]!r} {CURE}")


def loaded(network: N, head: Head, ours: Callable[[str], str] = lambda name: name) -> N:
    """The network with the weights of a head, quantised ones in float32.

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
