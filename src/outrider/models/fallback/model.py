"""Any causal language model of transformers as a `Model`, on our cache, attention and linears.

All rows of a step go through the model as one sequence [1, n] with explicit positions.  Attention is
intercepted (`attention.py`); all other arithmetic is made row-invariant (`row_invariant.py`).

Loading checks the model in two ways:
- a dry run over a few tokens records the shapes, windows and settings of its attention layers;
- the logits of a few tokens, through the cache and by transformers alone, must agree.
"""

from __future__ import annotations

import inspect
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from outrider.backends.base import Backend, Chains
from outrider.backends.select import backend_for
from outrider.cache.pool import Pool
from outrider.cache.states import StatePool
from outrider.checkpoints.hub import Checkpoint
from outrider.checkpoints.spec import ATTENTION_ONLY, listed
from outrider.core.device import take
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained
from outrider.errors import ConfigError, ModelError, first_line
from outrider.models.base import Model, Stream, Taps
from outrider.models.chains import draft_chain
from outrider.models.fallback import mixers, patches, query_scales, row_invariant
from outrider.models.fallback.attention import (
    ATTENTION,
    RECORDING,
    AttentionLayer,
    ForwardCall,
    attend,
    intercepting,
    is_intercepting,
    recurrent_call,
    unify,
)
from outrider.models.fallback.layers import FamilyLayers
from outrider.models.fallback.loading import body_attribute, body_of, load_model, quiet
from outrider.models.fallback.recurrent import Recurrences, RecurrentCall
from outrider.models.fallback.taps import layers_of, tapping
from outrider.models.placement import Precision
from outrider.models.rope import fix_ropes

CHECK_TOKENS = 24
# Largest root mean square of the difference from transformers' logits, in units of their standard deviation.
MAX_LOGIT_ERROR = 0.1


class BodyOutput(MoeModelOutputWithPast):
    """Output of the body of any family, as far as heads read it."""

    cross_attentions = None
    shared_kv_states = None  # of Gemma 4, for its draft model


class BodyStub(nn.Module):
    """Replacement of the body below the head: returns `hidden`, so that the head can be run alone.

    It has the numbers among the body's attributes: Falcon-H1's head reads a factor there.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.hidden = torch.empty(0)
        for name, value in vars(body).items():
            if isinstance(value, (int, float)) and not hasattr(self, name):
                setattr(self, name, value)

    @property
    def decoder(self) -> BodyStub:  # OPT's head calls model.decoder
        return self

    def forward(self, *_: Any, **__: Any) -> BodyOutput:
        return BodyOutput(last_hidden_state=self.hidden)


class Fallback(Model):
    """A `Model` over transformers' own code.  It packs no embedding: some families scale its rows."""

    def __init__(
        self, checkpoint: Checkpoint, precision: Precision, device: torch.device, max_len: int
    ) -> None:
        self.spec, self.precision, dtype = checkpoint.spec, precision, precision.dtype
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.backend: Backend = backend_for(device, dtype, precision.activations)
        self.rope = torch.zeros(max(max_len, CHECK_TOKENS + 8), 0)  # the modelling code applies RoPE itself
        self.head = load_model(checkpoint).to(device)
        self.body = body_of(self.head, self.spec.architecture)
        self.takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        fix_ropes(self.head, max_len)
        query_scales.take_over(self.head, len(self.rope), device, is_intercepting)
        uses_interface = not patches.route(self.head, attend)
        self.recurrences = Recurrences()
        if not mixers.route(self.head, recurrent_call) and mixers.is_stateful(self.head):
            name = self.spec.architecture
            raise ModelError(f"{name} keeps a recurrent state of an unknown kind, which is not supported.")
        row_invariant.convert(self.head, self.backend, dtype)
        with self._refusing(), quiet():
            self._record_layers(uses_interface)
            self.modules = layers_of(self.body, self.spec.layers, self.mixers)
            self.body_stub = BodyStub(self.body)
            setattr(self.head, body_attribute(self.head), self.body_stub)
            if uses_interface:
                self._check_logits()
        if precision.kv_cache_dtype == "int8" and any(layer.wide_keys for layer in self.layers):
            raise ConfigError(
                f"kv_cache_dtype 'int8' is too coarse for the keys of {self.spec.architecture}, "
                "which hold its ALiBi biases: use 'auto'."
            )

    def pool(self, slots: int) -> Pool:
        return self._pool(slots, self.precision.kv_dtype)

    def _pool(self, slots: int, dtype: torch.dtype) -> Pool:
        layer = self.layers[0]
        pool = Pool(len(self.layers), layer.kv_heads, layer.head_dim, slots, dtype, self.device)
        if self.recurrences.shapes:
            pool.states = StatePool(self.recurrences.shapes, self.device)
        return pool

    @property
    def footprint(self) -> Counter[torch.device]:
        layer, dtype = self.layers[0], self.precision.kv_dtype
        size = Pool.bytes_per_slot(len(self.layers), layer.kv_heads, layer.head_dim, dtype)
        return Counter({self.device: size})

    def more_layers(self, tensors: Mapping[str, Tensor], count: int) -> FamilyLayers:
        return FamilyLayers(self.head, tensors, count, self.precision, self.backend, self.max_len)

    def state_bytes(self, nodes: int) -> Counter[torch.device]:
        shapes = self.recurrences.shapes
        return Counter({self.device: sum(each.bytes(nodes) for each in shapes)} if shapes else {})

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> None:
        name = self.spec.architecture
        raise ConfigError(
            f"layers can be skipped in {listed(ATTENTION_ONLY, name)} only: {name} runs "
            "in transformers' own code, which computes all layers."
        )

    def forward(
        self, step_input: StepInput, pool: Pool, blocks: Any = None, x: Stream = None, taps: Taps = None
    ) -> Tensor:
        """[n, hidden] after the last norm; K/V of these rows is in the pool."""
        assert blocks is None and x is None, "all layers run"
        with intercepting(self._call(step_input, pool)), tapping(self.modules, taps or {}):
            return self._hidden(step_input)

    def _call(self, step_input: StepInput, pool: Pool | None) -> ForwardCall:
        states = None if pool is None else pool.states
        recurrent = RecurrentCall(self.backend.recurrence, step_input, self.recurrences, states)
        return ForwardCall(self.backend, step_input, self.layers, self.rope, pool, recurrent=recurrent)

    def embed(self, ids: Sequence[int]) -> Tensor:
        weight: Tensor = self.body.get_input_embeddings().weight.detach()
        return F.embedding(torch.tensor(ids, device=self.device), weight)

    def final(self, x: Tensor) -> Tensor:
        return x

    def head_logits(self, x: Tensor) -> Tensor:
        return self.logits(x, list(range(len(x))))

    def logits(self, x: Tensor, rows: list[int]) -> Tensor:
        self.body_stub.hidden = take(x, rows)[None]
        ids = torch.zeros(1, len(rows), dtype=torch.int64, device=self.device)
        out: Tensor = self.head(input_ids=ids, use_cache=False).logits[0]
        return out.float()

    @property
    def fuses_chains(self) -> bool:
        return self.backend.pick_next is not None

    def draft_chain(self, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None) -> Chained:
        return draft_chain(self, step_input, pool, chains, blocks)

    def _hidden(self, step_input: StepInput) -> Tensor:
        out: Tensor = self.body(use_cache=False, **self._model_inputs(step_input))[0][0]
        return out

    def _model_inputs(self, step_input: StepInput) -> dict[str, Tensor]:
        step = step_input.on(self.device)
        inputs = {"input_ids": step.input_ids[None]}
        if self.takes_positions:
            inputs["position_ids"] = step.positions[None]
        return inputs

    def _record_layers(self, uses_interface: bool) -> None:
        """Dry run over four tokens: record attention layers, pack weights, find batch-dependent functions."""
        if uses_interface:
            self.head.config._attn_implementation = RECORDING
        self.layers = layers = list[AttentionLayer]()
        step_input = self._check_input(0, 4)
        call = self._call(step_input, None)

        def run() -> Tensor:
            logits: Tensor = self.head(use_cache=False, **self._model_inputs(step_input)).logits
            return logits

        with intercepting(call):
            logits = row_invariant.row_invariant(self.head, run)
        if not layers and self.recurrences.shapes:
            raise ModelError(
                "all of its layers are recurrent, and Outrider needs at least one with attention."
            )
        if not layers:
            raise ModelError("its attention does not go through transformers' attention interface.")
        if uses_interface and not self.takes_positions:
            raise ModelError("its code takes no position_ids, which the nodes of a tree need.")
        if logits.shape[-1] != self.spec.vocabulary:
            raise ModelError(
                f"it has logits for {logits.shape[-1]} tokens, and the config says {self.spec.vocabulary}."
            )
        unify(layers)
        self.mixers = call.mixers

    def _check_logits(self) -> None:
        """Compare transformers' own logits with those of two prompt chunks and a token through the cache."""
        self.head.config._attn_implementation = "eager"
        rows = list(range(CHECK_TOKENS))
        expected = self.logits(self._hidden(self._check_input(0, CHECK_TOKENS)), rows)
        self.head.config._attn_implementation = ATTENTION
        pool, parts = self._pool(CHECK_TOKENS, torch.float32), []
        for start, end in itertools.pairwise((0, CHECK_TOKENS // 2, CHECK_TOKENS - 1, CHECK_TOKENS)):
            hidden = self.forward(self._check_input(start, end), pool)
            parts.append(self.logits(hidden, list(range(end - start))))
        error = ((torch.cat(parts) - expected).pow(2).mean().sqrt() / expected.std()).item()
        if error > MAX_LOGIT_ERROR:
            raise ModelError(
                f"through the cache its logits are not those of transformers (off by {error:.2f} of their "
                "spread): its attention does something that Outrider does not know."
            )

    def _check_input(self, start: int, end: int) -> StepInput:
        """Rows start … end - 1 of a fixed text."""
        tokens = [(i * i * 7 + 3) % self.spec.vocabulary for i in range(end)]
        return StepInput.of_chain(array("i", range(CHECK_TOKENS)), start, tokens[start:])

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn any error of the modelling code into a ModelError that names the architecture."""
        try:
            yield
        except Exception as error:
            raise ModelError(f"{self.spec.architecture} is not supported: {first_line(error)}") from error
