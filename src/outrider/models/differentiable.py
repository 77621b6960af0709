"""Models as modules of transformers in float32, for training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.weights import Source
from outrider.core.quantized import QuantizedWeight
from outrider.core.ragged import Ragged

EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")  # transformers joins all experts of a layer
# of gpt-oss, whose files have them so, too
INTERLEAVED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")
# Families whose files have the experts one by one, and the names there where they are not ours.
PER_EXPERT: dict[str, dict[str, str]] = {
    "qwen3_moe": {},
    "mixtral": {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
}
OF_FILES = ("quantization_config", "torch_dtype", "dtype", "_name_or_path", "transformers_version")


def new_module(config: Any, **sizes: Any) -> Any:
    """A model of a config's family with random weights.  sizes: settings in place of the config's."""
    import transformers

    given = {key: value for key, value in config.to_dict().items() if key not in OF_FILES} | sizes
    kind, auto = given.pop("model_type"), cast(Any, transformers.AutoModelForCausalLM)
    return auto.from_config(transformers.AutoConfig.for_model(kind, **given)).float()


def load_weights(
    module: Any,
    checkpoint: Checkpoint,
    layers: Sequence[int] | None = None,
    known: Mapping[str, Tensor] | None = None,
) -> None:
    """Give a module the weights of a checkpoint of its family.

    layers: those of the checkpoint that the module has; None: all.  known: weights by the module's name that
    are not looked up, as files may have other names for them.
    """
    source, is_oss = checkpoint.tensors(), module.config.model_type == "gpt_oss"
    for name, own in module.named_parameters():
        parts = name.split(".")
        if layers is not None and parts[:2] == ["model", "layers"]:
            name = ".".join(["model.layers", str(layers[int(parts[2])]), *parts[3:]])
        name = name.replace(".mlp.router.", ".mlp.gate.")
        if known and name in known:
            own.data.copy_(known[name])
        elif is_oss and (found := INTERLEAVED.fullmatch(name)):
            own.data.copy_(_interleaved(source, own, *found.groups()))
        elif EXPERTS.search(name):
            own.data.copy_(_experts(source, name, own))
        elif own.dim() == 2:
            own.data.copy_(_dense(source, name.removesuffix(".weight"), *own.shape))
        else:
            own.data.copy_(source.get(name, *own.shape))


def _dense(source: Source, name: str, outputs: int, inputs: int) -> Tensor:
    weight = source.linear(name, outputs, inputs)
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def _interleaved(source: Source, own: Tensor, prefix: str, joined: str, bias: str | None) -> Tensor:
    """The joined experts of gpt-oss: weights [E, K, O] or biases [E, O]; outputs of gate and up alternate."""
    parts = ("gate_proj", "up_proj") if joined == "gate_up" else ("down_proj",)
    outputs, experts = own.shape[-1] // len(parts), []
    for e in range(own.shape[0]):
        names = [f"{prefix}.{e}.{part}" for part in parts]
        if bias:
            read = [source.get(f"{name}.bias", outputs) for name in names]
        else:
            read = [_dense(source, name, outputs, own.shape[1]) for name in names]
        experts.append(torch.stack(read, dim=1).flatten(0, 1))
    whole = torch.stack(experts)
    return whole if bias else whole.transpose(1, 2)


def _experts(source: Source, name: str, own: Tensor) -> Tensor:
    """The joined experts [E, O, K] of a layer, from the files' experts."""
    prefix, _, joined = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if joined == "gate_up_proj" else (joined,)
    count, outputs, inputs = own.shape
    return torch.stack(
        [
            torch.cat(
                [_dense(source, f"{prefix}.{e}.{part}", outputs // len(parts), inputs) for part in parts]
            )
            for e in range(count)
        ]
    )


def has_experts(module: Any) -> bool:
    """Whether a module's files have other tensors than the module: `file_tensors`."""
    joined = any(EXPERTS.search(name) for name in module.state_dict())
    return joined and module.config.model_type in PER_EXPERT


def file_tensors(module: Any) -> dict[str, Tensor]:
    """The weights of a module as its family's files have them, with every expert by itself."""
    own = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    if not has_experts(module):
        return own
    theirs, tensors = PER_EXPERT[module.config.model_type], dict[str, Tensor]()
    for name, tensor in own.items():
        for split, part in _split(name, tensor):
            words = split.split(".")
            sparse = "experts" in words or words[-2:] == ["gate", "weight"]  # the router
            tensors[".".join(theirs.get(word, word) for word in words) if sparse else split] = part
    return tensors


def _split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `_experts`: one weight after the other.  Any other tensor is left as it is."""
    if not EXPERTS.search(name):
        yield name, tensor
        return
    prefix, _, joined = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if joined == "gate_up_proj" else (joined,)
    for e, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts))):
            yield f"{prefix}.{e}.{part}.weight", weight


def text_logits(module: Any, tokens: Tensor, places: Tensor, texts: Ragged | None = None) -> Tensor:
    """float32 [n, V]: after the tokens at `places` [n] of one text [T], or of several."""
    if texts is None or texts.count == 1:
        logits: Tensor = module(tokens[None], use_cache=False, logits_to_keep=places).logits
        return logits[0].float()
    every = texts.rows(module(texts.entries(tokens), use_cache=False).logits)
    return every.index_select(0, places).float()


def row_logits(module: Any, tokens: Tensor, positions: Tensor, visible: Tensor, rows: Tensor) -> Tensor:
    """float32 [n, V]: after the tokens of `rows` [n] among N rows with positions of their own.

    tokens, positions: int64 [N].  visible: bool [N, N], whether a row attends to another.
    """
    masked = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, torch.finfo().min)
    given = {"position_ids": positions[None], "attention_mask": masked[None, None], "use_cache": False}
    logits: Tensor = module(tokens[None], **given, logits_to_keep=rows).logits
    return logits[0].float()
