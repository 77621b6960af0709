"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437; FastMTP): cross entropy with the target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from outrider.checkpoints.heads import Head
from outrider.core.step import FINAL
from outrider.core.validate import Count, Flag
from outrider.draft.mtp import FORMAT, LAYOUTS, Network, swap_inputs
from outrider.errors import ConfigError
from outrider.train.base import Files, Method
from outrider.train.conversions import check_layout, dense, plain, refuse
from outrider.train.options import TrainOptions

QKV = re.compile(r"self_attn\.[qkv]_proj\.weight$")


class Mtp(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers: prediction layers.  test_steps: depths in the loss; the last layer predicts those beyond.
        prenorm: they read states before the target's last norm.  inner: of the MLP; None: the target's.
        """

        layers: Count = 1
        test_steps: Count = 3
        prenorm: Flag = False
        inner: Count | None = None

    base_rate = 1e-4
    joins = True

    def build(self) -> Network:
        options, spec = self.options, self.target.decoder.spec
        self.wanted = (spec.layers if options.prenorm else FINAL,)
        steps = max(options.test_steps, options.layers)
        return Network(self.sizes, spec.vocabulary, spec.layers, options.layers, steps, options.prenorm)

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        """Layouts: "deepseek", "mimo" (vLLM, SGLang; a Qwen2 block) and "speculators".

        Raises ConfigError where readers of that layout would feed the layers other states than they were
        trained on.
        """
        check_layout(layout, ("deepseek", "mimo", "speculators"))
        ours, wanted = FORMAT.translate(head), LAYOUTS[layout]
        _check_states(bool(ours.config["prenorm"]), dict(wanted.defaults)["prenorm"], layout)
        tensors = {name: tensor for name, tensor in dense(ours).items() if name.startswith("layers.")}
        tensors = _with_biases(tensors) if layout == "mimo" else _without_biases(tensors, layout)
        first = int(ours.config.get("num_hidden_layers", 1))
        config = plain(ours.config) | {
            "architectures": ["DeepSeekMTPModel"],
            "model_type": "deepseek_mtp",
            "num_hidden_layers": first,
            "num_nextn_predict_layers": len({name.split(".")[1] for name in tensors}),
        }
        if layout == "mimo":  # its layers read [state; embedding]
            for name, tensor in tensors.items():
                if name.endswith("eh_proj.weight"):
                    tensors[name] = swap_inputs(tensor, config)
        out = {wanted.published(name, target_layers=first): tensors[name] for name in tensors}
        if layout == "mimo":
            return {**config, "architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}, out
        if layout == "deepseek":
            return config, out
        return {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "transformer_layer_config": {**config, "model_type": "qwen3"},
            "num_nextn_predict_layers": config["num_nextn_predict_layers"],
        }, out


def _check_states(prenorm: bool, wanted: bool, layout: str) -> None:
    """Raise ConfigError if readers of a layout give other states to layers than those of their training."""
    if wanted != prenorm:
        trained, given = ("before", "after") if prenorm else ("after", "before")
        raise ConfigError(
            f"layers trained on states {trained} the target's last norm cannot be written as {layout!r}, "
            f"whose readers give those {given} it."
        )


def _with_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add zeros where queries, keys or values have no bias: a Qwen2 block always has them."""
    made = dict(tensors)
    for name, weight in tensors.items():
        if QKV.search(name):
            made.setdefault(f"{name.removesuffix('weight')}bias", weight.new_zeros(len(weight)))
    return made


def _without_biases(tensors: Mapping[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Remove the biases of projections.  Raises ConfigError if one is not zero."""
    biases = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.bias")}
    refuse(layout, [name for name, bias in biases.items() if bias.any()])
    return {name: tensor for name, tensor in tensors.items() if name not in biases}
