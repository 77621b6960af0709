"""Any causal language model that transformers can run, with our cache and our attention under its own modelling code.

All rows of a plan go through the model as one sequence [1, n] with explicit positions.  Its attention layers call `attend`
by way of transformers' attention interface: K and V go to the pool, and every row looks where the plan says.  Everything
else is the family's own code, made steady (`row_invariant.py`), so that a row's numbers do not depend on the rows beside it.

While loading, one forward is listened to: it tells the shapes, windows and peculiarities of the layers; then a few tokens
are computed both by transformers alone and through the cache, so that a model that we would get wrong is refused.
"""

from __future__ import annotations

import inspect
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import logging as transformers_logging

from outrider.backends.base import Kernels, ScoreModifier, TreeQueries
from outrider.backends.select import kernels_for
from outrider.cache.pool import Pool, kv_dtype
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import FAMILIES
from outrider.core.limits import check_attention
from outrider.core.step_input import StepInput
from outrider.errors import ConfigError, ModelError, first_line
from outrider.models.fallback import row_invariant, tempered, unrouted
from outrider.models.fallback.sizes import check_sizes
from outrider.models.fallback.taps import layers_of, tapping
from outrider.models.rope import fix_ropes
from outrider.models.steps import in_steps

OURS, LISTENING = (
    "outrider",
    "outrider-listening",
)  # attention implementations; the second is told about masks
HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "attention_mask",
    "cos",
    "sin",
}  # tensors that layers pass along
TRIED = 24  # tokens, while loading
ALIKE = 0.1  # root mean square of the difference from transformers' own logits, in units of their spread


@dataclass
class Layer:
    """What the kernels must know of one attention layer."""

    heads: int
    kv_heads: int
    head_dim: int  # of keys and values; the narrower of the two is padded
    out_dim: int
    scale: float
    window: int
    modifier: ScoreModifier | None
    module: nn.Module  # that attends
    query_scales: Tensor | None = None  # [positions]
    wide_keys: bool = (
        False  # a dimension of K is far larger than the others, which int8 would round to nothing
    )
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


@dataclass
class Call:
    """One forward: which plan, over which pool.  Without a pool it listens: layers are noted, and nothing is stored."""

    kernels: Kernels
    step_input: StepInput
    layers: list[Layer]
    turn: Tensor
    pool: Pool | None = None
    at: int = field(default=0)  # the layer that comes next


CALL: ContextVar[Call] = ContextVar("call")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """q [1,H,n,D], k and v [1,kv_heads,n,D] -> [1,n,H,D]."""
    call, (q, k, v) = CALL.get(), (query, key, value)
    if call.pool is None:
        call.layers.append(_layer_of(module, q, k, v, attention_mask, **given))
        return torch.zeros(1, q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype, device=q.device), None
    layer, at = call.layers[call.at], call.at
    call.at += 1
    if layer.query_scales is not None:
        q = q * layer.query_scales[call.step_input.positions.to(q.device), None]
    if repeats := layer.kv_heads // k.shape[1] - 1:  # a layer with fewer K/V heads than the pool holds
        k, v = (x.repeat_interleave(repeats + 1, dim=1) for x in (k, v))
    parts = [
        x[0].transpose(0, 1) if x.shape[3] == layer.head_dim else _widened(x, layer.head_dim)
        for x in (q, k, v)
    ]
    rows = torch.cat(parts, dim=1).flatten(1)
    wide = call.kernels.rope_store(rows, layer, call.turn, call.step_input, call.pool, at)
    out = call.kernels.attend(
        wide, layer, call.step_input, call.pool, at, layer.scale, layer.window, layer.modifier
    )
    return out.view(1, len(rows), layer.heads, layer.head_dim)[..., : layer.out_dim], None


def _widened(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[3]))[0].transpose(0, 1)


def _layer_of(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    softcap: float | None = None, s_aux: Tensor | None = None, slopes: Tensor | None = None, window: int | None = None,
    wide_keys: bool = False, **given: Any,
) -> Layer:  # fmt: skip
    """Windows are read off the mask, as transformers' own attention does.  Raises ModelError naming what the kernels cannot do."""
    who = type(module).__name__
    strange = [name for name, value in given.items() if isinstance(value, Tensor) and name not in HARMLESS]
    if strange:
        raise ModelError(f"{who} gives its attention {', '.join(strange)}, which Outrider does not know.")
    if mask is not None and mask.dtype != torch.int32:
        raise ModelError(f"{who} makes an attention mask of its own, which cannot be walked along a tree.")
    modifier = ScoreModifier(
        softcap or 0.0, *(None if x is None else x.detach().float().contiguous() for x in (slopes, s_aux))
    )
    return Layer(
        heads=q.shape[1], kv_heads=k.shape[1], head_dim=max(k.shape[3], v.shape[3]), out_dim=v.shape[3],
        scale=q.shape[3] ** -0.5 if scaling is None else scaling, window=int(mask) if mask is not None else window or 0,
        modifier=None if modifier == ScoreModifier() else modifier, module=module, query_scales=getattr(module, "query_scales", None),
        wide_keys=wide_keys,
    )  # fmt: skip


def _mask(
    local_size: int | None = None,
    use_vmap: bool = False,
    device: Any = None,
    mask_function: Any = None,
    **_: Any,
) -> Tensor | None:
    """In the place of a mask: nothing, or the window [1,1,1,1] as in `Kernels.attend`."""
    if use_vmap:
        raise ModelError(
            "this model overlays its causal mask with another, which cannot be walked along a tree."
        )
    if local_size is None:
        return None
    row, key = torch.tensor(local_size), torch.tensor(local_size - 1)
    # a window reaches back from this row to the key before it; a chunk begins at the row
    chunked = mask_function is not None and local_size > 1 and not mask_function(0, 0, row, key)
    return torch.full((1, 1, 1, 1), -local_size if chunked else local_size, dtype=torch.int32, device=device)


AttentionInterface.register(OURS, attend)
AttentionInterface.register(LISTENING, attend)
AttentionMaskInterface.register(LISTENING, _mask)


class States(MoeModelOutputWithPast):
    """What the body of any family returns, as far as heads look."""

    cross_attentions = None


class Given(nn.Module):
    """Stands where the body of a model stood, and gives back the hidden states that it is given: the head makes logits of them."""

    def __init__(self) -> None:
        super().__init__()
        self.x = torch.empty(0)

    @property
    def decoder(self) -> Given:  # OPT's head calls model.decoder
        return self

    def forward(self, *_: Any, **__: Any) -> States:
        return States(last_hidden_state=self.x)


class Fallback:
    """A `Model` over transformers' own code."""

    embedding: None = None  # some families scale what they take from it

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_len: int,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.spec, self.kv_cache_dtype = checkpoint.spec, kv_cache_dtype
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.kernels: Kernels = kernels_for(device, dtype)
        self.turn = torch.zeros(max(max_len, TRIED + 8), 0)  # the model's own code turns the heads
        self.head = _load(checkpoint).to(device)
        self.body = _body(self.head, self.spec.architecture)
        self.positioned = "position_ids" in inspect.signature(self.body.forward).parameters
        fix_ropes(self.head, max_len)
        tempered.take_over(self.head, len(self.turn), device, lambda: CALL.get(None) is not None)
        routed = not unrouted.route(self.head, attend)
        row_invariant.enter(self.head, self.kernels, dtype)
        with self._refusing():
            self.layers = self._listen(LISTENING if routed else None)
            self.modules = layers_of(self.body, self.spec.layers, [layer.module for layer in self.layers])
            self.given = Given()
            setattr(self.head, _prefix(self.head), self.given)
            if routed:
                self._compare()
        if kv_cache_dtype == "int8" and any(layer.wide_keys for layer in self.layers):
            raise ConfigError(
                f"kv_cache_dtype 'int8' is too coarse for the keys of {self.spec.architecture}, "
                "which hold its ALiBi biases: use 'auto'."
            )

    def pool(self, slots: int) -> Pool:
        return self._pool(slots, kv_dtype(self.kv_cache_dtype, self.dtype))

    def _pool(self, slots: int, dtype: torch.dtype) -> Pool:
        return Pool(
            len(self.layers), self.layers[0].kv_heads, self.layers[0].head_dim, slots, dtype, self.device
        )

    @property
    def exact(self) -> bool:
        return self.kernels.exact

    @property
    def footprint(self) -> Counter[torch.device]:
        return Counter({self.device: self.slot_bytes})

    @property
    def slot_bytes(self) -> int:
        layer = self.layers[0]
        return Pool.bytes_per_slot(
            len(self.layers), layer.kv_heads, layer.head_dim, kv_dtype(self.kv_cache_dtype, self.dtype)
        )

    def without(self, attention: Collection[int], mlp: Collection[int]) -> None:
        raise ConfigError(
            f"layers can be skipped in {', '.join(FAMILIES)} only: {self.spec.architecture} runs in transformers' own code, which computes "
            "all of them or none."
        )

    def between(self, first: int, last: int) -> None:
        self.without((), ())

    def forward(
        self,
        step_input: StepInput,
        pool: Pool,
        blocks: Any = None,
        x: Tensor | None = None,
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """[n, hidden] after the last norm; K/V of these rows is in the pool."""
        assert blocks is None and x is None, "nothing can be left out"
        before = CALL.set(Call(self.kernels, step_input, self.layers, self.turn, pool))
        try:
            with tapping(self.modules, taps or {}):
                return self._hidden(step_input)
        finally:
            CALL.reset(before)

    def embed(self, ids: Sequence[int]) -> Tensor:
        weight: Tensor = (
            self.body.get_input_embeddings().weight.detach()
        )  # some families scale what they take from it
        return F.embedding(torch.tensor(ids, device=self.device), weight)

    def final(self, x: Tensor) -> Tensor:
        return x

    def head_logits(self, x: Tensor) -> Tensor:
        return self.logits(x, list(range(len(x))))

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        """float32 [len(rows), V] of some rows, in ascending order, of `forward`'s result."""
        self.given.x = (x if len(rows) == x.shape[0] else x[rows])[None]
        ids = torch.zeros(1, len(rows), dtype=torch.int64, device=self.device)
        out: Tensor = self.head(input_ids=ids, use_cache=False).logits[0]
        return out.float()

    def read(
        self,
        step_input: StepInput,
        pool: Pool,
        wanted: list[int],
        kept: dict[int, Tensor],
        trees: TreeQueries,
    ) -> Tensor:
        return in_steps(self, step_input, pool, wanted, kept, trees)

    def chain(self, *_: Any) -> None:
        """A drafter goes level by level."""

    def _hidden(self, step_input: StepInput) -> Tensor:
        out: Tensor = self.body(use_cache=False, **self._inputs(step_input))[0][0]
        return out

    def _inputs(self, step_input: StepInput) -> dict[str, Tensor]:
        given = (
            {"input_ids": step_input.ids, "position_ids": step_input.positions}
            if self.positioned
            else {"input_ids": step_input.ids}
        )
        return {name: tensor.to(self.device)[None] for name, tensor in given.items()}

    def _listen(self, implementation: str | None) -> list[Layer]:
        """Runs a few tokens for what can be seen of the layers on the way; packs the weights and steadies the modules, too."""
        if implementation:
            self.head.config._attn_implementation = implementation
        step_input, layers = self._trial(0, 4), list[Layer]()
        before = CALL.set(Call(self.kernels, step_input, layers, self.turn))
        try:
            logits = row_invariant.row_invariant(
                self.head, lambda: self.head(use_cache=False, **self._inputs(step_input)).logits
            )
        finally:
            CALL.reset(before)
        if not layers:
            raise ModelError("its attention does not go through transformers' attention interface.")
        if implementation and not self.positioned:
            raise ModelError(
                "its code takes no position_ids, so that the nodes of a tree cannot be told where they stand."
            )
        if logits.shape[-1] != self.spec.vocabulary:
            raise ModelError(
                f"it has logits for {logits.shape[-1]} tokens, and the config says {self.spec.vocabulary}."
            )
        return _alike(layers)

    def _compare(self) -> None:
        """Transformers alone against a prompt in two chunks and a token, through the cache."""
        self.head.config._attn_implementation = "eager"
        whole = self._trial(0, TRIED)
        expected = self.logits(self._hidden(whole), list(range(TRIED)))
        self.head.config._attn_implementation = OURS
        pool, got = self._pool(TRIED, torch.float32), []
        for start, end in itertools.pairwise((0, TRIED // 2, TRIED - 1, TRIED)):
            got.append(self.logits(self.forward(self._trial(start, end), pool), list(range(end - start))))
        error = ((torch.cat(got) - expected).pow(2).mean().sqrt() / expected.std()).item()
        if error > ALIKE:
            raise ModelError(
                f"through the cache its logits are not those of transformers (off by {error:.2f} of their spread): its attention does "
                "something that Outrider does not know."
            )

    def _trial(self, start: int, end: int) -> StepInput:
        step_input, tokens = StepInput(), [(i * i * 7 + 3) % self.spec.vocabulary for i in range(end)]
        step_input.chain(array("i", range(TRIED)), start, tokens[start:])
        return step_input.build()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Whatever somebody else's code raises in its first forwards is a reason to refuse the model by name."""
        try:
            yield
        except Exception as error:
            raise ModelError(f"{self.spec.architecture} is not supported: {first_line(error)}") from error


def _load(checkpoint: Checkpoint) -> Any:
    """The model in its own dtype.  Raises ModelError naming the tensors that are missing or of another shape."""
    loader: Any = AutoModelForCausalLM
    with _quiet():
        check_sizes(checkpoint)
        try:
            model, report = loader.from_pretrained(
                checkpoint.folder, config=checkpoint.config, dtype="auto", attn_implementation="eager", experts_implementation="eager",
                trust_remote_code=checkpoint.trust_remote_code, output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
        except Exception as error:
            raise ModelError(
                f"transformers cannot load {checkpoint.name!r} ({checkpoint.spec.architecture}): {first_line(error)}"
            ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the checkpoint lacks {len(missing)} tensors of {checkpoint.spec.architecture}: {', '.join(missing[:8])}."
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, has, wants = wrong[0]
        raise ModelError(f"{name} has shape {tuple(has)}, the config asks for {tuple(wants)}.")
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{checkpoint.spec.architecture} keeps a recurrent state, which cannot be verified as a tree."
        )
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and load reports: what matters is raised."""
    log: Any = transformers_logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _body(model: Any, name: str) -> Any:
    body = getattr(model, _prefix(model), None)
    if body is None:
        raise ModelError(f"{name} is not supported: its body cannot be told from its head.")
    return body


def _prefix(model: Any) -> str:
    """The attribute of the body; Llama 4 without images names one that it does not have."""
    prefix: str = model.base_model_prefix
    return prefix if hasattr(model, prefix) else "model"


def _alike(layers: list[Layer]) -> list[Layer]:
    """One shape for all layers, as a pool has it: heads are padded with zeros, K/V heads repeated."""
    kv_heads, head_dim = max(layer.kv_heads for layer in layers), max(layer.head_dim for layer in layers)
    for layer in layers:
        check_attention(type(layer.module).__name__, layer.heads, layer.kv_heads, head_dim, 0, layer.window)
        if kv_heads % layer.kv_heads or layer.heads % kv_heads:
            raise ModelError(
                f"its layers have {layer.kv_heads} and {kv_heads} K/V heads, which do not fit into one pool."
            )
        layer.kv_heads, layer.head_dim = kv_heads, head_dim
    return layers
