"""A small model distilled from the target (DistillSpec, arXiv 2310.08461), on the target's own answers.

It begins as some of the target's layers, or as a fresh model of the same family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from outrider.core.quantized import QuantizedWeight
from outrider.core.validate import Kind, optional
from outrider.heads.parts import acceptance_loss, soft_cross_entropy
from outrider.heads.sample import Sample, mean_loss
from outrider.train.base import Files, Method, replace_text
from outrider.train.options import COUNT, TrainOptions

DIVERGENCES = ("forward", "reverse", "tvd", "acceptance")
DIVERGENCE = Kind(" or ".join(DIVERGENCES), lambda value: value in DIVERGENCES)
OF_TARGET = ("quantization_config", "torch_dtype", "dtype", "_name_or_path", "transformers_version")


class DraftModel(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers: of the model.  hidden, inner, heads, kv_heads: None: the target's; then the model begins as
        some of the target's layers, from the first to the last.
        divergence: "forward" Kullback-Leibler, "reverse", "tvd": total variation, 1 minus the expected
        acceptance of rejection sampling, or "acceptance": -log of that (LK losses, arXiv 2602.23881).
        """

        KINDS: ClassVar = {
            **dict.fromkeys(("hidden", "inner", "heads", "kv_heads"), optional(COUNT)),
            "layers": COUNT,
            "divergence": DIVERGENCE,
        }

        layers: int = 2
        hidden: int | None = None
        inner: int | None = None
        heads: int | None = None
        kv_heads: int | None = None
        divergence: str = "forward"

        @property
        def cut(self) -> bool:
            """Whether it begins as a part of the target."""
            return not any((self.hidden, self.inner, self.heads, self.kv_heads))

    base_rate = 3e-4
    drafts: ClassVar = {"method": "draft_model"}

    def build(self) -> Any:
        import transformers

        options, theirs = self.options, self.target.checkpoint.config
        given = {key: value for key, value in theirs.to_dict().items() if key not in OF_TARGET}
        sizes = {
            "num_hidden_layers": min(options.layers, self.target.decoder.spec.layers),
            "hidden_size": options.hidden,
            "intermediate_size": options.inner,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
        }
        given |= {key: value for key, value in sizes.items() if value is not None}
        if given.get("layer_types"):
            given["layer_types"] = [given["layer_types"][i] for i in self._chosen()]
        kind = given.pop("model_type")
        auto: Any = transformers.AutoModelForCausalLM
        network = auto.from_config(transformers.AutoConfig.for_model(kind, **given)).float()
        if options.cut:
            self._copy_target(network)
        return network

    def _chosen(self) -> list[int]:
        """The target's layers that the model begins with: spread evenly, with the first and the last."""
        theirs = self.target.decoder.spec.layers
        count = min(self.options.layers, theirs)
        return [round(i * (theirs - 1) / max(1, count - 1)) for i in range(count)]

    def _copy_target(self, network: Any) -> None:
        """Copy the target's weights into a network that has some of its layers."""
        source, chosen = self.target.checkpoint.tensors(), self._chosen()
        for name, own in network.named_parameters():
            theirs, parts = name, name.split(".")
            if parts[:2] == ["model", "layers"]:
                theirs = ".".join(["model.layers", str(chosen[int(parts[2])]), *parts[3:]])
            if theirs == "model.embed_tokens.weight":
                own.data.copy_(self.outer.embedding)
            elif theirs == "lm_head.weight":
                own.data.copy_(self.outer.lm_head)
            elif own.dim() == 2:
                weight = source.linear(theirs.removesuffix(".weight"), *own.shape)
                own.data.copy_(weight.dense() if isinstance(weight, QuantizedWeight) else weight)
            else:
                own.data.copy_(source.get(theirs, *own.shape))

    def loss(self, sample: Sample) -> Tensor:
        rows = sample.places(0, len(sample.tokens))
        output = self.network(sample.tokens[None], use_cache=False, logits_to_keep=rows)
        logits, theirs = output.logits[0].float(), sample.logits[rows]
        if self.options.divergence == "forward":
            return mean_loss(soft_cross_entropy(logits, theirs))
        if self.options.divergence == "acceptance":
            return mean_loss(acceptance_loss(logits, theirs))
        p, q = theirs.log_softmax(-1), logits.log_softmax(-1)
        if self.options.divergence == "reverse":
            return mean_loss((q.exp() * (q - p)).sum(-1))
        return mean_loss((p.exp() - q.exp()).abs().sum(-1) / 2)

    def files(self) -> Files:
        config = json.loads(self.network.config.to_json_string(use_diff=False))
        tied = config.get("tie_word_embeddings", False)
        named = self.network.state_dict().items()
        return config, {
            name: tensor.detach().cpu() for name, tensor in named if not (tied and name == "lm_head.weight")
        }

    def save(self, folder: Path) -> None:
        super().save(folder)
        checkpoint = self.target.checkpoint
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save_pretrained(folder)
        ending = {"eos_token_id": sorted(checkpoint.ending)}
        replace_text(folder / "generation_config.json", json.dumps(ending) + "\n")
