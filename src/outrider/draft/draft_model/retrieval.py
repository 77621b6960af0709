"""The target as its own draft through the pages that its queries prefer (TriForce, arXiv 2404.11912).

Half of the K/V budget behind the first tokens is for pages of the text before the recent ones:

    budget 4 + 4 pages     0 … 3 │ 2 chosen pages │ 2 pages of recent tokens, and the nodes

A page is chosen by the mean of its keys: softmax over the pages of q · mean, summed over the heads of a few
layers.  q are those of the last token that the target has computed, from the states that enter these layers.
TriForce chooses for every layer and head; here a view has the same pages for all.  Pages are chosen again
every `draft_kv_refresh` steps.  Until then, tokens that leave the recent ones are in no view.

Positions of kept keys are true (they were rotated when they were written), but sliding windows and slopes
count those of chosen pages from 0.  That, as all choices here, changes drafts only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Backend, LayerKV
from outrider.backends.layer import DecoderLayer
from outrider.cache.pool import Pool
from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import Commit, Needs
from outrider.core.step_input import StepInput
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.draft.draft_model.options import DraftModelOptions
from outrider.drafting.base import Storage, Target
from outrider.drafting.view import Window
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder

READ = (1 / 3, 2 / 3)  # depths of the layers whose queries choose, as shares of all layers


class Layer(NamedTuple):
    """A layer that is read.  number: in the model.  at: in its pool, which is part `part` of the model's."""

    number: int
    at: int
    part: int
    weights: DecoderLayer
    backend: Backend


class RetrievalDrafter(ModelDrafter):
    """means: of each row, the mean keys of its first full pages by layer, [pages, kv_heads, head_dim]."""

    def __init__(self, options: DraftModelOptions, target: Target) -> None:
        super().__init__(options, target)
        decoder = target.decoder
        if not isinstance(decoder, Decoder):
            raise ConfigError(
                'draft_kv_policy "retrieval" needs the queries of the target, whose layers run in '
                'transformers\' own code or on several ranks: leave it out, or give "recent".'
            )
        assert options.draft_kv_budget is not None
        self.first = options.draft_kv_sink
        self.pages = (options.draft_kv_budget - self.first) // 2 // PAGE
        sink = self.first + self.pages * PAGE
        self.window = Window.of(options.draft_kv_budget, sink)
        self.model, self.layers = decoder, _layers(decoder)
        self.needs = Needs(states=tuple(layer.number for layer in self.layers))
        self.steps: dict[Row, int] = {}  # since the pages of a row were chosen
        self.means: dict[Row, list[Tensor]] = {}

    def allocate(self, slots: int, pool: Pool) -> Storage:
        s, dtype = self.model.spec, self.model.precision.kv_dtype
        # K/V that belongs to queries is written here: the target's own stays untouched
        self.scratch = {
            layer.number: Pool(1, s.kv_heads, s.head_dim, PAGE, dtype, layer.backend.device)
            for layer in self.layers
        }
        return super().allocate(slots, pool)

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        for r, step in enumerate(commit.batch):
            row = step.row
            if not step.emitted or len(row.tokens) <= self.window.sink + self.window.recent:
                continue
            since = self.steps.get(row, self.options.draft_kv_refresh)
            self.steps[row] = since + 1
            if since >= self.options.draft_kv_refresh:
                self.steps[row] = 1
                states = commit.states.last_of(r, self.needs.states)
                self._choose(row, states, step.start + len(commit.states.places[r]) - 1)

    def forget(self, row: Row, reason: str) -> None:
        super().forget(row, reason)
        self.windows.pop(row, None)
        self.steps.pop(row, None)
        self.means.pop(row, None)

    def _choose(self, row: Row, states: Tensor, position: int) -> None:
        """Choose the pages of a row by the states [1, layers * hidden] at a position."""
        first, end = -(-self.first // PAGE), (position + 1 - self.window.recent) // PAGE
        if end - first <= self.pages:
            return
        scores = torch.zeros(end - first)
        self._extend_means(row, end)
        for layer, state, means in zip(self.layers, states.chunk(len(self.layers), -1), self.means[row]):
            q = self._queries(layer, state, row.tokens[position], position)
            groups = q.view(means.shape[1], -1, means.shape[2])
            by_page = torch.einsum("kgd,pkd->kgp", groups, means[first:end])
            scores += by_page.softmax(-1).sum((0, 1)).cpu()
        best = scores.topk(self.pages).indices.sort().values + first
        self.windows[row] = replace(self.window, parts=self._parts_of(best.tolist()))

    def _parts_of(self, pages: Sequence[int]) -> tuple[range, ...]:
        chosen = [range(page * PAGE, (page + 1) * PAGE) for page in pages]
        return range(self.first), *chosen

    def _extend_means(self, row: Row, pages: int) -> None:
        """Add the mean keys of full pages that are not known yet."""
        known = self.means.setdefault(row, [])
        done = len(known[0]) if known else 0
        if done >= pages:
            return
        slots = torch.tensor(row.slots[done * PAGE : pages * PAGE])
        for i, layer in enumerate(self.layers):
            keys = self.pool.parts[layer.part].read(layer.at, slots.to(layer.backend.device), torch.float32)[
                0
            ]
            added = keys.view(pages - done, PAGE, *keys.shape[1:]).mean(1)
            if done:
                known[i] = torch.cat([known[i], added])
            else:
                known.append(added)

    def _queries(self, layer: Layer, state: Tensor, token: int, position: int) -> Tensor:
        """Scaled queries of a token at a position, float32 [heads, head_dim], from the state that enters."""
        weights, backend = layer.weights, layer.backend
        step_input = StepInput()
        step_input.chain(array("i", [0]), 0, [token], position)
        x = state.to(backend.device, backend.activations).contiguous()
        if weights.norm_in is not None:
            x = backend.rms_norm(x, weights.norm_in, weights.eps)
        table = weights.rotations
        if table is None:
            table = self.model.rotations
        kv = LayerKV(step_input.build(), self.scratch[layer.number], 0)
        q = backend.rope_store(backend.linear(x, weights.qkv), weights, table.to(backend.device), kv)
        return q.view(weights.heads, -1)[:, : weights.head_dim].float() * weights.scale


def _layers(decoder: Decoder) -> list[Layer]:
    """The layers whose queries choose pages."""
    wanted = sorted(
        {min(decoder.spec.layers - 1, max(1, int(share * decoder.spec.layers))) for share in READ}
    )
    found = []
    for number in wanted:
        for i, part in enumerate(decoder.parts):
            if part.first <= number < part.first + part.layers:
                own = decoder.layers[number]
                found.append(Layer(number, number - part.first, i, own, part.backend))
    return found
