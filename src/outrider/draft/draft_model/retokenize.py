"""Guesses as text, for a draft with any tokenizer ("vocab_mismatch": "retokenize"): transformers' universal assisted decoding.

    the row's tokens ──bytes──▶ text ──draft's tokenizer──▶ draft tokens ──chain──▶ text ──target's tokenizer──▶ guesses

To the draft every row has a shadow: a row of its own tokens, whose K/V lies in pages of its own.  When the target's text grows, the
shadow's last tokens may come out differently; K/V of those that stayed is kept.  A step tokenises the end of a text only:
`assistant_lookbehind` draft tokens (twice as many at most) on the way in, `target_lookbehind` target tokens on the way out.

The draft is greedy at any temperature: its tokens are not the target's, so there is no noise that both could share, and
without it the likeliest guess is right more often than a drawn one.  Nor do the request's processors apply: they speak of target ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.cache.pages import Cache
from outrider.cache.pool import Pool
from outrider.core.block_table import PAGE
from outrider.core.params import SamplingParams
from outrider.core.types import EMPTY_TREE, NO_BUDGET, Batch, Budget, Draft, DraftTree, Row
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.drafting.base import Target
from outrider.drafting.trees.builder import RANK_CONFIDENCE
from outrider.drafting.vocab.incremental import NEUTRAL, Language, Reading
from outrider.sampling.sampler import GREEDY

CHUNK = 512  # tokens that a shadow catches up in one step


@dataclass
class Shadow:
    row: Row
    reading: Reading


class Retokenized(ModelDrafter):
    stretch = 2  # a text may have more tokens in the draft's vocabulary than in the target's

    def __init__(self, options: Any, target: Target) -> None:
        self.theirs = Language(target.checkpoint, "target")
        super().__init__(options, target)
        self.ours = Language(self.checkpoint, "draft")
        self.vocabulary = self.checkpoint.spec.vocabulary
        self.shadows: dict[Row, Shadow] = {}

    def allocate(self, slots: int, pool: Pool) -> list[Pool]:
        """As many slots as the target has.  A row for which they do not suffice is not drafted for."""
        super().allocate(slots, pool)
        self.cache = Cache(slots // PAGE, self.context + PAGE)
        self.caches = [self.cache]
        return []

    def propose(self, batch: Batch) -> Draft:
        shadows, places = Batch(), list[int]()
        for r, step in enumerate(batch):
            row, budget = step.row, step.budget
            if not (budget.nodes or (row.params.speculate and not step.emits)):
                continue  # a row that does not guess catches up when it does
            known = self._follow(row, step.end, budget.depth)
            if known:
                shadow = self.shadows[row]
                ready = shadow.row.computed + known == len(shadow.reading.ids) and not shadow.reading.pending
                shadows.add(shadow.row, known, Budget(budget.depth, budget.depth) if ready else NO_BUDGET)
                places.append(r)
        guessed = super().propose(shadows)
        trees = [EMPTY_TREE] * len(batch)
        for r, mine, draft_tree in zip(places, shadows, guessed.trees):
            row = batch[r].row
            shadow = self.shadows[row]
            assert shadow.row.table is not None
            self.cache.register(
                shadow.row.table, shadow.reading.ids, min(self.synced[shadow.row], shadow.reading.fixed)
            )
            trees[r] = self._told(row, batch[r].end, draft_tree.tokens, mine.budget.depth)
        return Draft(trees)

    def _follow(self, row: Row, end: int, depth: int) -> int:
        """Brings a row's shadow up to `end` of its tokens; how many of the shadow's are to be computed now, 0 where there is no room."""
        shadow = self.shadows.get(row) or self._open(row)
        mine, reading = shadow.row, shadow.reading
        said = self.theirs.bytes(row.tokens[reading.read : end])
        if reading.empty and self.theirs.spaced:
            said = said.removeprefix(b" ")
        same = reading.extend(said, end - reading.read)
        if mine.table is None:
            mine.table = self.cache.open()
            done = self.cache.match(mine.table, reading.ids, reading.fixed)
        else:
            done = min(self.synced.get(mine, mine.computed), same)
        mine.computed = self.synced[mine] = max(
            0, min(done, len(reading.ids) - 1)
        )  # the last one says what follows
        known = min(len(reading.ids) - mine.computed, CHUNK)
        reach = mine.computed + known
        fits = reach <= self.context and self.cache.reserve(mine.table, min(reach + depth, self.context))
        return known if fits else 0

    def _open(self, row: Row) -> Shadow:
        reading = Reading(self.ours, self.options.assistant_lookbehind)
        own = Row(
            row.id, row.index, reading.ids, 0, SamplingParams(temperature=0), GREEDY, row.seed, (), self.context, frozenset()
        )  # fmt: skip
        self.shadows[row] = Shadow(own, reading)
        return self.shadows[row]

    def _told(self, row: Row, end: int, ids: list[int], depth: int) -> DraftTree:
        """The guesses of a shadow as guesses for its row."""
        ends = next((i for i, token in enumerate(ids) if token in self.ours.ending), len(ids))
        text = self.ours.text(ids[:ends])
        before = self.theirs.bytes(row.tokens[max(0, end - self.options.target_lookbehind) : end]).decode(
            "utf-8", "replace"
        )
        tokens = self.theirs.tokens(text, before, NEUTRAL)[0] if text else []
        if ends < len(ids) and self.theirs.eos is not None:
            tokens.append(self.theirs.eos)
        return DraftTree.chain(tokens[:depth], RANK_CONFIDENCE[:1] * len(tokens[:depth]))

    def forget(self, row: Row, reason: str) -> None:
        shadow = self.shadows.pop(row, None)
        if shadow is not None:
            self.synced.pop(shadow.row, None)
            if shadow.row.table is not None:
                self.cache.close(shadow.row.table)

    def filled(self, row: Row) -> int:
        """The target's pages hold nothing of ours."""
        return row.computed
