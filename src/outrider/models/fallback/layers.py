"""Further decoder layers of a model, in transformers' own code of its family: those of a trained head.

They are made by the family's own class (with experts, compressed attention, gates …), read the weights of the
head's file, and run on our cache, attention and linears as the model does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.backends.base import Backend
from outrider.cache.pool import Pool
from outrider.core.step_input import StepInput
from outrider.errors import ModelError, first_line
from outrider.models.fallback import row_invariant
from outrider.models.fallback.attention import (
    ATTENTION,
    RECORDING,
    AttentionLayer,
    ForwardCall,
    intercepting,
    unify,
)
from outrider.models.fallback.loading import SLACK, body_attribute, quiet
from outrider.models.placement import Precision
from outrider.models.rope import fix_ropes

VOCABULARY = 32  # of the embedding and lm_head that the family's class makes, and nothing reads
EXPERTS = re.compile(r"\.experts\.")
RECORDED = 4  # rows of the dry run


class FamilyLayers:
    """Some layers, with K/V in a pool of their own.  eps: of their norms.

    unit_norms: a norm of the family multiplies with 1 + weight.
    """

    divided = None

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, Tensor],
        count: int,
        precision: Precision,
        backend: Backend,
        max_len: int,
    ) -> None:
        """model: of transformers, whose family it is.  tensors: "{layer}.{name in it}" -> weight.

        Raises ModelError for tensors that are not those of such layers.
        """
        self.backend, self.precision = backend, precision
        self.rope = torch.zeros(max_len, 0)  # the modelling code applies RoPE itself
        self.eps: float = model.config.rms_norm_eps
        try:
            small = self._load(model, _config(model.config, count, tensors), tensors)
            self.config = small.config
            fix_ropes(small, max_len)
            body = getattr(small, body_attribute(small))
            self.rotary, self.blocks = body.rotary_emb, body.layers
            self.rotary_kinds = self._rotary_kinds()
            self.unit_norms = _adds_one(body.norm)
            row_invariant.convert(self.blocks, backend, precision.dtype)
            self.blocks.to(backend.device)
            self.rotary.to(backend.device)
            self.layers = self._record()
        except ModelError:
            raise
        except Exception as error:  # the modelling code raises errors of all kinds
            raise ModelError(
                f"layers of {type(model).__name__} cannot be made from this file: {first_line(error)}"
            ) from error

    def pool(self, slots: int) -> Pool:
        layer, dtype = self.layers[0], self.precision.kv_dtype
        return Pool(len(self.layers), layer.kv_heads, layer.head_dim, slots, dtype, self.backend.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of K/V of one slot."""
        layer = self.layers[0]
        return Pool.bytes_per_slot(len(self.layers), layer.kv_heads, layer.head_dim, self.precision.kv_dtype)

    def __call__(self, x: Tensor, step_input: StepInput, pool: Pool, only: int) -> Tensor:
        """x [n, hidden] after layer `only`."""
        with intercepting(ForwardCall(self.backend, step_input, self.layers, self.rope, pool, only)):
            return self._run(only, x, step_input)

    def _run(self, layer: int, x: Tensor, step_input: StepInput, mask: Tensor | None = None) -> Tensor:
        positions, x = step_input.on(self.backend.device).positions[None], x[None]
        rotations = self.rotary(x, positions, **self.rotary_kinds[layer])
        out = self.blocks[layer](
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotations
        )
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        return hidden[0]

    def _rotary_kinds(self) -> list[dict[str, str]]:
        """What the rotary module of the family needs to know of each layer: its kind, if each has its own."""
        several = isinstance(getattr(self.rotary, "rope_type", None), dict)
        return [{"layer_type": kind} if several else {} for kind in _kinds(self.config)]

    def _load(self, model: Any, config: Any, tensors: Mapping[str, Tensor]) -> Any:
        """A model of the family with these layers.  Raises ModelError for tensors that do not fit."""
        kind: Any = type(model)
        at = f"{body_attribute(model)}.layers."
        _check(kind, config, tensors, at)
        with quiet():
            small, report = kind.from_pretrained(
                None,
                config=config,
                state_dict={at + name: tensor for name, tensor in tensors.items()},
                dtype=self.precision.dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        found = f"layers of {kind.__name__} cannot be made from this file: it"
        if missing := sorted(name for name in report["missing_keys"] if name.startswith(at)):
            raise ModelError(f"{found} lacks {', '.join(name.removeprefix(at) for name in missing[:4])}.")
        if strange := sorted(report["unexpected_keys"]):
            raise ModelError(f"{found} has {', '.join(name.removeprefix(at) for name in strange[:4])}, too.")
        if wrong := sorted(report["mismatched_keys"]):
            name, stored, expected = wrong[0]
            name = name.removeprefix(at)
            raise ModelError(f"{found} has {name} of shape {tuple(stored)}, not {tuple(expected)}.")
        return small.eval()

    def _record(self) -> list[AttentionLayer]:
        """Dry run over a few rows: record attention layers, pack weights, find batch-dependent functions."""
        layers, step_input = list[AttentionLayer](), StepInput.of_ids(range(RECORDED))
        device, dtype = self.backend.device, self.backend.activations
        x = torch.zeros(RECORDED, self.config.hidden_size, device=device, dtype=dtype)

        def run() -> None:
            for i, kind in enumerate(_kinds(self.config)):
                window = self.config.sliding_window if kind == "sliding_attention" else 0
                mask = torch.full((1, 1, 1, 1), window, dtype=torch.int32, device=device)
                self._run(i, x, step_input, mask)

        self.config._attn_implementation = RECORDING
        with intercepting(ForwardCall(self.backend, step_input, layers, self.rope)):
            row_invariant.row_invariant(self.blocks, run)
        self.config._attn_implementation = ATTENTION
        if len(layers) != len(self.blocks):
            raise ModelError("each prediction layer needs one attention, through transformers' interface.")
        unify(layers)
        return layers


def _config(config: Any, count: int, tensors: Mapping[str, Tensor]) -> Any:
    """The config of a model of `count` such layers, and next to no vocabulary."""
    own = copy.deepcopy(config)
    sparse = any(EXPERTS.search(name) for name in tensors)
    for key, value in {
        "num_hidden_layers": count,
        "vocab_size": VOCABULARY,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "mlp_layer_types": ["sparse" if sparse else "dense"] * count,
        "first_k_dense_replace": 0 if sparse else count,
        "mlp_only_layers": [] if sparse else [*range(count)],
        "decoder_sparse_step": 1,
    }.items():
        if getattr(own, key, None) is not None:
            setattr(own, key, value)
    if kinds := getattr(own, "layer_types", None):
        attends = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
        own.layer_types = getattr(own, "mtp_layer_types", None) or attends[-1:] * count
        if len(own.layer_types) != count:
            raise ModelError(
                f"there are {count} prediction layers, and mtp_layer_types, or layer_types, of the config "
                f"give {len(own.layer_types)} kinds of attention for them."
            )
    return own


def _check(kind: Any, config: Any, tensors: Mapping[str, Tensor], at: str) -> None:
    """Raise ModelError for layers with more weights than the file holds, before they are allocated, and for
    weights of other types.

    at: where the layers are in a model of this class
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(f"{name} is {tensor.dtype}, without scales that the config names.")
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    wanted = sum(weight.numel() for name, weight in model.named_parameters() if name.startswith(at))
    if wanted > (held := sum(tensor.numel() for tensor in tensors.values())) + SLACK:
        raise ModelError(
            f"layers of {kind.__name__} have {wanted:,} weights by the config, and the file has {held:,}: "
            "one of its sizes is wrong."
        )


def _kinds(config: Any) -> list[str]:
    """The kind of attention of each layer."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    return kinds or ["full_attention"] * config.num_hidden_layers


def _adds_one(norm: nn.Module) -> bool:
    """Whether a norm multiplies with 1 + weight."""
    zero = copy.deepcopy(norm)
    for parameter in zero.parameters():
        nn.init.zeros_(parameter)
    width = next(zero.parameters()).shape[0]
    return bool(zero(torch.ones(1, width)).any())
