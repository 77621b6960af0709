"""The interface of a trainable method: a file in train/methods, which is the registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from outrider.checkpoints.heads import Head
from outrider.checkpoints.quantize import bits_of
from outrider.checkpoints.spec import largest
from outrider.checkpoints.weights import write_tensors
from outrider.core.row import LoRARequest
from outrider.core.step import FINAL
from outrider.drafting.base import Target
from outrider.errors import ConfigError, ModelError, writing
from outrider.heads.base import FINGERPRINT
from outrider.heads.layer import Sizes
from outrider.heads.sample import Sample, TargetWeights
from outrider.models.export import packed, scheme
from outrider.train.options import MOST_DEPTH, TrainOptions

Files = tuple[dict[str, Any], dict[str, Tensor]]  # config and tensors
WIDTH = 4096  # hidden size of most published heads; the rate is inversely proportional to it
HIGHEST_RATE = 3e-3


class Method:
    """A network to be trained for a target.

    wanted: the target's states that it reads.  logits: whether the loss reads the target's logits.
    most: draft tokens of the network in one step, at most.
    joins: whether the loss may take several texts at once, one behind the other; its random numbers, if any,
        are then of `Sample.seeds`.
    base_rate: peak learning rate for a hidden size of `WIDTH`, that of the publication if it names one.
    drafts: speculative_config of evaluations, besides the model and its depth.
    variants: other method that drafts with such a network -> the option that makes one for it.
    """

    Options: ClassVar[type[TrainOptions]] = TrainOptions
    base_rate: ClassVar[float] = 1e-4
    logits: bool = True
    drafts: ClassVar[Mapping[str, Any]] = {"tree": "chain"}
    variants: ClassVar[Mapping[str, str]] = {}
    wanted: tuple[int, ...] = (FINAL,)
    most: int = MOST_DEPTH
    joins: bool = False

    def logit_rows(self, tokens: int) -> int:
        """Rows of logits at most that the loss of a text of so many tokens computes."""
        return tokens

    def __init__(self, options: Any, target: Target, counts: Tensor) -> None:
        """counts: int64 [V], how often the answers have each token."""
        self.options, self.target, self.counts = options, target, counts
        self.outer = TargetWeights.of(target.decoder)
        self.network = self.build()
        if options.init is not None:
            self.start_from(Path(options.init).expanduser())
        self.network.to(target.decoder.device)

    def build(self) -> Any:
        """The network, with its initial weights."""
        raise NotImplementedError

    @property
    def head(self) -> Any:
        """The part of the network that is written as the head."""
        return self.network

    def loss(self, sample: Sample) -> Tensor:
        loss: Tensor = self.network.loss(sample, self.outer)
        return loss

    @classmethod
    def export(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: str) -> Files:
        """A network's `files` in another published layout.  Raises ConfigError as `convert`."""
        return cls.convert(Head.of("the trained network", config, tensors), layout)

    @classmethod
    def convert(cls, head: Head, layout: str) -> Files:
        """A head in another layout.  Raises ConfigError for an unknown one, or what readers would misread."""
        raise ConfigError(f"format {layout!r}: heads of this method have one published layout.")

    def files(self) -> Files:
        """Config and tensors in the reference's layout; tied tensors are there once."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.head.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors[name] = tensor.detach().cpu()
        return self.head.config(), tensors

    def published(self) -> Files:
        """Config and tensors in the layout of the options.  Raises ConfigError as `convert`."""
        config, tensors = self.files()
        if self.options.format is None:
            return config, tensors
        return self.export(config, tensors, self.options.format)

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, each in one step."""
        config, tensors = self.published()
        config = {**config, FINGERPRINT: self.target.checkpoint.fingerprint}
        write_head(folder, config, tensors, bits_of(self.options.quantization))

    def speculation(self, folder: Path, depth: int) -> dict[str, Any]:
        """speculative_config that drafts chains with the saved weights."""
        return {"model": str(folder), "num_speculative_tokens": min(depth, self.most), **self.drafts}

    def adapter(self, folder: Path) -> LoRARequest | None:
        """The saved adapter of the target; None if the target stays as it is."""
        return None

    @property
    def rate(self) -> float:
        """The learning rate: given, or `base_rate` scaled to the width of the target."""
        scaled = self.base_rate * WIDTH / self.target.decoder.spec.hidden
        return float(self.options.rate or min(HIGHEST_RATE, scaled))

    @property
    def sizes(self) -> Sizes:
        """Sizes of a block: the target's own, with the option `inner` if there is one."""
        spec, config = self.target.decoder.spec, self.target.checkpoint.config
        heads = largest(config, "num_attention_heads") or max(1, spec.hidden // spec.head_dim)
        asked = getattr(self.options, "inner", None)
        inner = asked or largest(config, "intermediate_size") or 2 * spec.hidden
        eps = getattr(config, "rms_norm_eps", None) or 1e-6
        return Sizes(spec.hidden, inner, heads, spec.kv_heads, spec.head_dim, eps)

    def start_from(self, folder: Path) -> None:
        """Load an earlier head, quantized or not.  Raises ConfigError for that of another network."""
        own = self.head.state_dict()
        try:
            head = Head.open(str(folder))
            found = {
                name: head.get(name, *tensor.shape) if tensor.is_floating_point() else head.raw(name)
                for name, tensor in own.items()
                if name in head
            }
            self.head.load_state_dict({**own, **found})
        except (ModelError, RuntimeError) as error:
            raise ConfigError(f"init: {str(folder)!r} is no head of this shape: {error}") from error
        known = {own[name].data_ptr() for name in found}  # tied tensors are stored once
        if missing := [name for name in own if name not in found and own[name].data_ptr() not in known]:
            raise ConfigError(f"init: {str(folder)!r} is no head of this shape: no {', '.join(missing)}.")


def write_head(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], bits: int | None = None
) -> None:
    """Write config.json and model.safetensors, each in one step: in bfloat16, or quantized to `bits` bits."""
    config = {**config, "torch_dtype": "bfloat16"}
    stored = stored_tensors(tensors, bits)
    if bits is not None:
        whole = [name for name, tensor in tensors.items() if tensor.dim() == 2 and name in stored]
        config["quantization_config"] = scheme(bits, whole)
    folder.mkdir(parents=True, exist_ok=True)
    replace_tensors(folder / "model.safetensors", stored)
    replace_text(folder / "config.json", json.dumps(config, indent=1) + "\n")


def stored_tensors(tensors: Mapping[str, Tensor], bits: int | None) -> dict[str, Tensor]:
    """Tensors as the file of a head holds them: in bfloat16, or quantized to `bits` bits."""
    halves = {name: _half(tensor) for name, tensor in tensors.items()}
    return halves if bits is None else packed(halves.items(), bits)


def _half(tensor: Tensor) -> Tensor:
    return (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous().clone()


def replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of safetensors beside the old one, then replace it."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_tensors(tensors, temporary)
    temporary.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Write a file beside the old one, then replace it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad)
