"""Multi-token prediction layers (DeepSeek-V3, arXiv 2412.19437; FastMTP): cross entropy with the target."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
        prenorm = bool(ours.config["prenorm"])
        if dict(wanted.defaults)["prenorm"] != prenorm:
            trained, given = ("before", "after") if prenorm else ("after", "before")
            raise ConfigError(
                f"layers trained on states {trained} the target's last norm cannot be written as {layout!r}, "
                f"whose readers give those {given} it."
            )
        tensors = {name: tensor for name, tensor in dense(ours).items() if name.startswith("layers.")}
        if layout == "mimo":  # a Qwen2 block, which always has biases
            for name in filter(QKV.search, list(tensors)):
                zeros = tensors[name].new_zeros(len(tensors[name]))
                tensors.setdefault(f"{name.removesuffix('weight')}bias", zeros)
        else:
            biases = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.bias")}
            refuse(layout, [name for name, bias in biases.items() if bias.any()])
            tensors = {name: tensor for name, tensor in tensors.items() if name not in biases}
        first = int(ours.config.get("num_hidden_layers", 1))
        config = plain(ours.config) | {
            "architectures": ["DeepSeekMTPModel"],
            "model_type": "deepseek_mtp",
            "num_hidden_layers": first,
            "num_nextn_predict_layers": len({name.split(".")[1] for name in tensors}),
        }
        if layout == "mimo":  # its layers read [state; embedding]
            for name in (name for name in tensors if name.endswith("eh_proj.weight")):
                tensors[name] = swap_inputs(tensors[name], config)
        named = tensors.items()
        out = {wanted.published(name, target_layers=first): tensor for name, tensor in named}
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
