"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858): smooth L1 of states, cross entropy of tokens.

The two share their weights and differ in the draft tree only.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.checkpoints.heads import Head
from outrider.core.validate import Count, Flag
from outrider.draft.eagle import FORMAT, SGLANG, SPECULATORS, Network
from outrider.errors import ConfigError
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain, refuse
from outrider.train.options import TrainOptions


class Eagle(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """inner: of the MLP; None: the target's.  bias: of fc; vLLM reads none."""

        inner: Count | None = None
        bias: Flag = False

    base_rate = 3e-5
    joins = True

    def build(self) -> Network:
        return Network(self.sizes, self.target.decoder.spec.vocabulary, bias=self.options.bias)

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        check_layout(layout, ("reference", "vllm", "sglang", "speculators"))
        tensors = dense(FORMAT.translate(head))
        normed = (name for name in tensors if name.startswith(("norm_", "token_map", "layers.1.")))
        refuse(layout, sorted(normed))
        for copy in ("embed_tokens.weight", "lm_head.weight"):
            tensors.pop(copy, None)
        if "fc.bias" in tensors and not tensors["fc.bias"].any():  # SGLang's files always have one
            del tensors["fc.bias"]
        biased = "fc.bias" in tensors
        config = {**plain(head.config), "bias": biased}
        if layout == "vllm" and biased:
            raise ConfigError(
                "vLLM does not read the bias of fc: train the head with bias=False, or choose another layout."
            )
        if layout == "sglang":
            bias = {"fc.bias": tensors["fc.weight"].new_zeros(len(tensors["fc.weight"]))}
            return {**config, "architectures": [SGLANG], "bias": True}, {**bias, **tensors}
        if layout != "speculators":
            return config, tensors
        outer = {
            "speculators_model_type": "eagle",
            "speculators_version": "0.1.0",
            "architectures": ["EagleSpeculator"],
            "transformer_layer_architecture": "LlamaDecoderLayer",
            "transformer_layer_config": config,
            "layernorms": False,
            "fusion_bias": biased,
        }
        return outer, {SPECULATORS.published(name): tensor for name, tensor in tensors.items()}
