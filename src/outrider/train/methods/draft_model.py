"""A small model distilled from the target (DistillSpec, arXiv 2310.08461), on the target's own answers.

It begins as some of the target's layers, or as a fresh model of the same family.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import Spec
from outrider.core.validate import Count, one_of
from outrider.errors import ConfigError, ModelError
from outrider.heads.parts import acceptance_loss
from outrider.heads.sample import Sample, mean_loss
from outrider.models.differentiable import (
    file_tensors,
    has_experts,
    load_weights,
    new_module,
    text_logits,
)
from outrider.train.base import Files, Method, replace_text
from outrider.train.options import TrainOptions

DIVERGENCE = one_of("forward", "reverse", "tvd", "acceptance")


class DraftModel(Method):
    @dataclass(frozen=True)
    class Options(TrainOptions):
        """layers: of the model.  hidden, inner, heads, kv_heads: None: the target's; then the model begins as
        some of the target's layers, from the first to the last.
        divergence: "forward" Kullback-Leibler, "reverse", "tvd": total variation, 1 minus the expected
        acceptance of rejection sampling, or "acceptance": -log of that (LK losses, arXiv 2602.23881).
        """

        layers: Count = 2
        hidden: Count | None = None
        inner: Count | None = None
        heads: Count | None = None
        kv_heads: Count | None = None
        divergence: Annotated[str, DIVERGENCE] = "forward"

        @property
        def cut(self) -> bool:
            """Whether it begins as a part of the target."""
            return not any((self.hidden, self.inner, self.heads, self.kv_heads))

    base_rate = 3e-4
    drafts: ClassVar = {"method": "draft_model"}

    def build(self) -> Any:
        options, theirs = self.options, self.target.checkpoint.config
        if self.target.decoder.state_bytes(0):
            raise ConfigError(
                f"{self.target.decoder.spec.architecture} has recurrent layers, and draft models of "
                "such a family are not trained: train a head (eagle3, medusa, …), or take a draft model that "
                "exists."
            )
        self.joins = self.target.decoder.device.type != "cpu"  # logits of padded texts take memory
        sizes = {
            "num_hidden_layers": min(options.layers, self.target.decoder.spec.layers),
            "hidden_size": options.hidden,
            "intermediate_size": options.inner,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
        }
        given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
        if types := getattr(theirs, "layer_types", None):
            given["layer_types"] = [types[i] for i in self._chosen()]
        network = new_module(theirs, **given, **self._sparse())
        if options.cut:
            outer = {"model.embed_tokens.weight": self.outer.embedding, "lm_head.weight": self.outer.lm_head}
            load_weights(network, self.target.checkpoint, self._chosen(), outer)
        return network

    def _sparse(self) -> dict[str, Any]:
        """Which layers have experts, as Qwen3-MoE names it: those whose layer of the target has."""
        spec, config = self.target.decoder.spec, self.target.checkpoint.config
        experts = spec.experts if isinstance(spec, Spec) else None
        if experts is None or not hasattr(config, "mlp_only_layers"):
            return {}
        dense = [own for own, i in enumerate(self._chosen()) if not experts.layers[i]]
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}

    def _chosen(self) -> list[int]:
        """The target's layers that the model begins with: spread evenly, with the first and the last."""
        theirs = self.target.decoder.spec.layers
        count = min(self.options.layers, theirs)
        return [round(i * (theirs - 1) / max(1, count - 1)) for i in range(count)]

    def loss(self, sample: Sample) -> Tensor:
        places = sample.places(0, len(sample.tokens))
        logits = text_logits(self.network, sample.tokens, places, sample.texts)
        return self.distance(sample, logits, places)

    def distance(self, sample: Sample, logits: Tensor, places: Tensor) -> Tensor:
        """The chosen divergence of logits [n, V] from the target's at the places [n]."""
        if self.options.divergence == "forward":
            return sample.target_loss(logits, places)
        theirs = sample.logits[places]
        if self.options.divergence == "acceptance":
            return mean_loss(acceptance_loss(logits, theirs))
        p, q = theirs.log_softmax(-1), logits.log_softmax(-1)
        if self.options.divergence == "reverse":
            return mean_loss((q.exp() * (q - p)).sum(-1))
        return mean_loss((p.exp() - q.exp()).abs().sum(-1) / 2)

    def files(self) -> Files:
        config = json.loads(self.network.config.to_json_string(use_diff=False))
        tensors = {name: tensor.cpu() for name, tensor in file_tensors(self.network).items()}
        if config.get("tie_word_embeddings", False):
            tensors.pop("lm_head.weight", None)
        return config, tensors

    def start_from(self, folder: Path) -> None:
        """Files of a model with experts have other tensors than the network."""
        if not has_experts(self.network):
            super().start_from(folder)
            return
        try:
            load_weights(self.network, Checkpoint.open(str(folder)))
        except ModelError as error:
            raise ConfigError(f"init: {str(folder)!r} is no model of this shape: {error}") from error

    def save(self, folder: Path) -> None:
        super().save(folder)
        checkpoint = self.target.checkpoint
        if checkpoint.tokenizer is not None and not (folder / "tokenizer.json").exists():
            checkpoint.tokenizer.save_pretrained(folder)
        ending = {"eos_token_id": sorted(checkpoint.ending)}
        replace_text(folder / "generation_config.json", json.dumps(ending) + "\n")
