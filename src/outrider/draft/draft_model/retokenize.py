"""Drafts as text, for a draft model with any tokenizer ("vocab_mismatch": "retokenize"): universal assisted
decoding.

    row's tokens ──bytes──▶ text ──draft's tokenizer──▶ draft's tokens
                                                             │ chain
    draft tokens ◀──target's tokenizer── text ◀──bytes── draft's tokens

The draft model computes a shadow of every row: a row of its own tokens, with K/V in pages of its own.  When
the target's text grows, the shadow's last tokens may change; K/V of those that did not is kept.  A step
tokenizes only the end of a text: `assistant_lookbehind` draft tokens (twice as many at most) for the shadow,
`target_lookbehind` target tokens for its draft.

The draft is greedy at any temperature.  Its tokens are not the target's, so both cannot share noise, and
without shared noise the most probable token is accepted more often than a sampled one.  The request's logits
processors do not apply, because they are about target ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.cache.pages import Cache
from outrider.cache.pool import Pool
from outrider.core.block_table import PAGE, ROOT
from outrider.core.params import SamplingParams
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import EMPTY_TREE, NO_BUDGET, Budget, Draft, DraftTree
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.drafting.base import Storage, Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.drafting.vocab.incremental import NEUTRAL, IncrementalTokens, TextCodec
from outrider.sampling.sampler import GREEDY

CHUNK = 512  # tokens of a shadow that one step computes at most


@dataclass
class Shadow:
    """A row in the draft model's tokens, and the text that they are made from."""

    row: Row
    text: IncrementalTokens


class Retokenized(ModelDrafter):
    max_expansion = 2  # a text may have more tokens in the draft's vocabulary than in the target's

    def __init__(self, options: Any, target: Target) -> None:
        self.target_codec = TextCodec(target.checkpoint, "target")
        super().__init__(options, target)
        self.heeds_floors = False
        self.draft_codec = TextCodec(self.checkpoint, "draft")
        self.vocabulary = self.checkpoint.spec.vocabulary
        self.shadows: dict[Row, Shadow] = {}

    def allocate(self, slots: int, pool: Pool) -> Storage:
        """Allocate as many slots as the target has.  A row that needs more is not drafted for."""
        super().allocate(slots, pool)
        self.cache = Cache(slots // PAGE, self.context + PAGE)
        return Storage(caches=[self.cache])

    def propose(self, batch: Batch) -> Draft:
        places, shadows = self._shadow_batch(batch)
        drafted = super().propose(shadows)
        trees = [EMPTY_TREE] * len(batch)
        for r, step, tree in zip(places, shadows, drafted.trees):
            row, end = batch[r].row, batch[r].end
            self._register(self.shadows[row])
            trees[r] = self._translate(row, end, tree.tokens, step.budget.depth)
        return Draft(trees)

    def _shadow_batch(self, batch: Batch) -> tuple[list[int], Batch]:
        """Bring the shadows up to date.  Returns the batch of those that compute tokens, and the rows that
        they shadow.

        A row that is not drafted for, and computes no prompt, waits until it is.
        """
        places, shadows = [], Batch()
        for r, step in enumerate(batch):
            row, budget = step.row, step.budget
            reads = not step.emits and not row.left_out.issuperset(self.sources)
            if not (budget.nodes or (row.params.speculate and reads)):
                continue
            known = self._update(row, step.end, budget.depth)
            if known:
                shadow = self.shadows[row]
                reached_end = shadow.row.computed + known == len(shadow.text.ids)
                ready = reached_end and not shadow.text.within_character
                shadows.add(shadow.row, known, Budget(budget.depth, budget.depth) if ready else NO_BUDGET)
                places.append(r)
        return places, shadows

    def _update(self, row: Row, end: int, depth: int) -> int:
        """Extend a row's shadow to its first `end` tokens; how many to compute now, 0 without room."""
        shadow = self.shadows.get(row) or self._open(row)
        own, text = shadow.row, shadow.text
        unchanged = self._extend_text(text, row.tokens, end)
        if own.table is None:
            own.table = self.cache.open(row.cache_salt or ROOT)
            done = self.cache.match(own.table, text.ids, text.fixed)
        else:
            done = min(self.catch_up.cursor(own, own.computed).filled, unchanged)
        # The last token is always computed, for its logits.
        own.computed = max(0, min(done, len(text.ids) - 1))
        self.catch_up.cursor(own, own.computed).filled = own.computed
        known = min(len(text.ids) - own.computed, CHUNK)
        reach = own.computed + known
        fits = reach <= self.context and self.cache.reserve(own.table, min(reach + depth, self.context))
        return known if fits else 0

    def _extend_text(self, text: IncrementalTokens, tokens: list[int], end: int) -> int:
        """Append the row's tokens up to `end` to the shadow's text; how many of its tokens stayed."""
        fresh = self.target_codec.bytes(tokens[text.consumed : end])
        if text.empty and self.target_codec.adds_space:
            fresh = fresh.removeprefix(b" ")
        return text.extend(fresh, end - text.consumed)

    def _open(self, row: Row) -> Shadow:
        text = IncrementalTokens(self.draft_codec, self.options.assistant_lookbehind)
        own = Row(
            id=row.id,
            index=row.index,
            tokens=text.ids,
            prompt=0,
            params=SamplingParams(temperature=0),
            distribution=GREEDY,
            seed=row.seed,
            processors=(),
            limit=self.context,
            ending=frozenset(),
        )
        self.shadows[row] = Shadow(own, text)
        return self.shadows[row]

    def _register(self, shadow: Shadow) -> None:
        """Enter full pages into the prefix index, up to the first token that may still change."""
        own, text = shadow.row, shadow.text
        assert own.table is not None
        self.cache.register(own.table, text.ids, min(self.catch_up.cursors[own].filled, text.fixed))

    def _translate(self, row: Row, end: int, ids: list[int], depth: int) -> DraftTree:
        """Translate a shadow's draft into draft tokens for its row, after the row's last tokens."""
        draft_codec, target_codec = self.draft_codec, self.target_codec
        stop = next((i for i, token in enumerate(ids) if token in draft_codec.ending), len(ids))
        text = draft_codec.text(ids[:stop])
        before = target_codec.bytes(row.tokens[max(0, end - self.options.target_lookbehind) : end])
        context = before.decode("utf-8", "replace")
        tokens = target_codec.tokens(text, context, NEUTRAL)[0] if text else []
        if stop < len(ids) and target_codec.eos is not None:
            tokens.append(target_codec.eos)
        tokens = tokens[:depth]
        return DraftTree.chain(tokens, RANK_CONFIDENCE[:1] * len(tokens))

    def forget(self, row: Row, reason: str) -> None:
        shadow = self.shadows.pop(row, None)
        if shadow is not None:
            super().forget(shadow.row, reason)
            if shadow.row.table is not None:
                self.cache.close(shadow.row.table)

    def behind(self, row: Row) -> int:
        shadow = self.shadows.get(row)
        if shadow is None:  # what a new row shares with others has pages here, too
            new = len(row.tokens) == row.prompt and row.left_out.isdisjoint(self.sources)
            return 0 if new else row.computed
        text, cursor = shadow.text, self.catch_up.cursors.get(shadow.row)
        if len(text.ids) > self.context:
            return 0  # it is not drafted for any more
        lacks = len(text.ids) - (cursor.filled if cursor is not None else 0)
        unread = -(-text.consumed * lacks // max(1, len(text.ids)))  # in the target's tokens, rounded up
        return unread + max(0, row.computed - text.consumed)

    def filled(self, row: Row) -> int:
        """All of the row: the target's pages hold none of this drafter's K/V."""
        return row.computed
