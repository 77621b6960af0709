"""EAGLE-3 (arXiv 2503.01840): cross entropy with the target on the head's own outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import torch
from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Positive, one_of
from outrider.draft.eagle3 import FORMAT, SGLANG, VLLM, Network
from outrider.errors import ConfigError
from outrider.heads import tapped
from outrider.heads.layouts import speculators
from outrider.heads.tapped import default_taps
from outrider.heads.tapped_parts import SPECULATORS, TapNetwork
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain, refuse
from outrider.train.options import Taps, TrainOptions

T = TypeVar("T", bound=TapNetwork)
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")


class Eagle3(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """draft_vocab_size: the most frequent tokens of the answers; all, if the target has no more.
        test_steps, decay: steps of the training-time test, and the weight of each relative to the one before.
        objective: "kl", or "acceptance": -log of the expected acceptance (LK losses, arXiv 2602.23881).
        taps: the layers whose inputs are read; None: the published three.  inner: of the MLP; None: the
        target's.
        """

        draft_vocab_size: Count = 32000
        test_steps: Count = 7
        decay: Positive = 0.8
        objective: Annotated[str, one_of("kl", "acceptance")] = "kl"
        taps: Taps | None = None
        inner: Count | None = None

    base_rate = 1e-4
    joins = True

    def build(self) -> Network:
        loss = {"steps": self.options.test_steps, "decay": self.options.decay}
        return tap_network(self, Network, **loss, acceptance=self.options.objective == "acceptance")

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("vllm", "sglang"))
        ours, config = FORMAT.translate(head), plain(head.config)
        tensors, listed = dense(ours), config.get(tapped.TAPS)
        if not listed or config.pop("use_aux_hidden_state", True) is False:
            raise ConfigError(f"{head.name!r} does not list its {tapped.TAPS}: add them to its config.")
        taps = tapped.taps_of(ours, 1 + max(listed))
        flags = {flag: True for flag in FLAGS if config.pop(flag, False)}
        config.pop("architectures", None)
        sizes = {
            "draft_vocab_size": config.pop("draft_vocab_size", len(tensors["lm_head.weight"])),
            "target_hidden_size": config.pop(
                "target_hidden_size", tensors["fc.weight"].shape[1] // len(taps)
            ),
        }
        layer = {key: value for key, value in config.items() if key != tapped.TAPS}
        if layout == "vllm":
            own = {**SPECULATORS, **sizes, tapped.TAPS: list(taps), **flags}
            named = {VLLM.published(name): tensor for name, tensor in tensors.items()}
            return speculators("eagle3", "Eagle3DraftModel", 5, layer, own), named
        refuse(layout, [*flags, *(name for name in tensors if name.startswith(("fc_norm", "input_norm")))])
        if 0 in taps:
            raise ConfigError(
                "SGLang cannot run a head that reads the input of layer 0: it counts the outputs of layers."
            )
        outputs = {tapped.TAPS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
        own = {"architectures": [tapped.ARCHITECTURE], "eagle_config": outputs}
        named = {SGLANG.published(name): tensor for name, tensor in tensors.items()}
        return {**layer, **sizes, **own}, named


def tap_network(method: Method, kind: type[T], **own: Any) -> T:
    """A network of EAGLE-3's or P-EAGLE's options, with the target's lm_head.  own: further options of it."""
    options, target = method.options, method.target
    layers, drafted = target.decoder.spec.layers, frequent(method.counts, options.draft_vocab_size)
    method.wanted = within(options.taps or sorted(set(default_taps(layers))), layers)
    context = target.checkpoint.spec.context
    network = kind(method.sizes, target.vocabulary, method.wanted, drafted, context, **own)
    network.lm_head.weight.data.copy_(method.outer.lm_head[network.ids])
    return network


def within(taps: Sequence[int], layers: int) -> tuple[int, ...]:
    """The taps.  Raises ConfigError for one that the target does not have."""
    if not all(0 <= tap <= layers for tap in taps):
        raise ConfigError(f"taps must be in 0 … {layers}, the layers of the target: got {list(taps)}.")
    return tuple(taps)


def frequent(counts: Tensor, most: int) -> tuple[int, ...] | None:
    """The `most` most frequent tokens, ascending; None if that is all of them."""
    if most >= len(counts):
        return None
    order = torch.sort(counts, descending=True, stable=True).indices
    return tuple(sorted(order[:most].tolist()))
