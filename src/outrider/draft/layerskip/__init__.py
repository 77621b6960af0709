"""The target drafts with some of its own sublayers left out.  No weights and no K/V beyond the target's.

Draft & Verify (arXiv 2309.08168): a set of attentions and a set of MLPs is skipped.  LayerSkip (arXiv
2404.16710): the first layers, then the model's own norm and head.  SWIFT (arXiv 2410.06916): the set is found
while serving.

Draft passes compute in the target's own pool, in the slots of this step's nodes, which verification
overwrites:

    position             … e-2   e-1   │ e      e+1        e = step.end: the pending token is at e-1
    pass 1 computes              token │                   in its own slot; gives the draft token for e
    pass 2 computes                    │ draft token       in the slot of node 0; gives the one for e+1

Verified K/V before e-1 is the target's, so there is nothing to catch up with.  A row that still computes its
prompt is not drafted for.  After an early exit the first layers have computed these tokens already:
verification resumes after them (`Resume`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain, Chains
from outrider.cache.pool import Pool
from outrider.core.row import Row
from outrider.core.step import Batch, Commit, RowStep
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import StopRule
from outrider.core.tree import EMPTY_TREE, ROOT, Draft, DraftTree, Resume
from outrider.draft.layerskip.chain import AUTO, SIBLINGS, ExitThreshold, SiblingChain, siblings_at
from outrider.draft.layerskip.exit_head import ExitHead
from outrider.draft.layerskip.options import LayerSkipOptions
from outrider.draft.layerskip.search import Search
from outrider.draft.layerskip.sets import Skip, read_set, set_name
from outrider.drafting.base import Drafter, Storage, Target
from outrider.drafting.options import check_exit
from outrider.drafting.trees.builder import SAMPLE_CONFIDENCE
from outrider.errors import ConfigError

# Acceptance of a token that was picked with the noise of the target's own pick: more than its probability.
SHARED_NOISE = 0.7


class RowDraft(NamedTuple):
    """The draft of one row.  states [m, hidden]: of `nodes`, ROOT included, which the passes computed."""

    draft_tree: DraftTree
    nodes: list[int]
    states: Tensor


class LayerSkip(Drafter):
    depth = 8
    demo: ClassVar = {"layer skipping": {}, "early exit": {"early_exit": 6, "num_speculative_tokens": 1}}
    Options = LayerSkipOptions

    def __init__(self, options: LayerSkipOptions, target: Target) -> None:
        super().__init__(options, target)
        self.decoder, self.sampler = target.decoder, target.sampler
        self.exit_head = None if options.exit_head is None else ExitHead(options.exit_head, target)
        self.early_exit = options.early_exit if self.exit_head is None else self.exit_head.layer
        self.skip = self._initial_skip()
        self.blocks = self._blocks(self.skip)
        self.depth = self.skip.depth or self.depth
        self.thresholds: dict[Row, ExitThreshold] = {}
        if options.search:
            self.memory = self._search()

    @classmethod
    def example(cls, target: Target) -> Drafter:
        """The first half of the layers.  Verification resumes from their states."""
        return cls(cls.Options(early_exit=max(1, target.decoder.spec.layers // 2)), target)

    def _initial_skip(self) -> Skip:
        """The set of the options, or the published one of this model.  Raises ConfigError."""
        options, layers, name = self.options, self.decoder.spec.layers, self.target.checkpoint.name
        model = repr(name)
        if self.early_exit is not None:
            rest = range(check_exit(self.early_exit, layers, name), layers)
            return Skip.of(rest, rest, layers, model)
        if options.skip_attention is not None or options.skip_mlp is not None:
            attention = () if options.skip_attention is None else options.skip_attention
            mlp = () if options.skip_mlp is None else options.skip_mlp
            return Skip.of(attention, mlp, layers, model)
        skip_set = options.layers
        if skip_set is None and not options.search:
            skip_set = set_name(name, layers)
        return read_set(skip_set, layers, model) if skip_set else Skip.alternating(layers)

    def _blocks(self, skip: Skip) -> Any:
        return self.decoder.skip_sublayers(skip.attention, skip.mlp)

    def _search(self) -> Search:
        options, layers = self.options, self.decoder.spec.layers
        size = round(options.skip_ratio * 2 * (layers - 2))
        if size < 1:
            raise ConfigError(
                f"search skips none of the {2 * max(0, layers - 2)} sublayers between first and last layer "
                f"at skip_ratio {options.skip_ratio}: {self.target.checkpoint.name!r} is too shallow, or the "
                "ratio too small."
            )
        return Search(layers, size, self.skip, options)

    def allocate(self, slots: int, pool: Pool) -> Storage:
        self.pool = pool
        return Storage()

    def size(self, depth: int) -> int:
        siblings: int | str = self.options.siblings
        if isinstance(siblings, str):
            siblings = max(max(counts) for counts in SIBLINGS.values())
        return depth * siblings

    def propose(self, batch: Batch) -> Draft:
        trees = [EMPTY_TREE] * len(batch)
        places = [r for r, step in enumerate(batch) if step.budget.nodes and step.decodes]
        steps = [batch[r] for r in places]
        if not steps:
            return Draft(trees)
        if self.memory is not None:
            self._advance_search(steps)
        for step in steps:
            self._threshold(step.row).depth = step.budget.depth
        drafts = self._chains(steps) if self._in_one_call(steps) else self._by_depth(steps)
        nodes: list[list[int]] = [[] for _ in trees]
        for r, draft in zip(places, drafts):
            trees[r], nodes[r] = draft.draft_tree, draft.nodes
        if not self.early_exit:
            return Draft(trees)
        states = torch.cat([draft.states for draft in drafts])
        return Draft(trees, Resume(self.early_exit, states, nodes))

    def _in_one_call(self, steps: Sequence[RowStep]) -> bool:
        """Whether the backend can draft all of these rows in one call."""
        chains = self.decoder.fuses_chains and self.options.siblings == 1 and self.exit_head is None
        return chains and not any(self._pauses(step.row) for step in steps)

    def _pauses(self, row: Row) -> bool:
        """Whether Python has work to do between the passes of a row."""
        return bool(row.processors) or row.adapter is not None or self.samples(row)

    def _threshold(self, row: Row) -> ExitThreshold:
        initial = self.options.exit_threshold
        if row not in self.thresholds:
            value = AUTO[row.distribution.temperature == 0] if initial == "auto" else initial or 0.0
            adapts = initial is not None and self.options.adapt_threshold
            self.thresholds[row] = ExitThreshold(value, adapts)
        return self.thresholds[row]

    def _chains(self, steps: Sequence[RowStep]) -> list[RowDraft]:
        """Draft chains for all rows in one call of the backend."""
        spec, backend = self.decoder.spec, self.decoder.backend
        step_input, chains = StepInput(), list[Chain]()
        for i, step in enumerate(steps):
            row, floor = step.row, self._threshold(step.row).value
            step_input.chain(row.slots, step.end - 1, row.tokens[-1:])
            chains.append(Chain(i, step.budget.depth, row.distribution, row.stream, floor))
        states = None
        if self.early_exit:
            shape = len(chains), max(chain.levels for chain in chains), spec.hidden
            states = torch.empty(shape, dtype=backend.activations, device=backend.device)
        measured = self.target.adaptive or any(chain.floor for chain in chains)
        stop_rule = StopRule() if measured else None
        wanted = Chains(chains, self.target.vocabulary, stop_rule, states)
        tokens_of, features_of = self.decoder.draft_chain(step_input.build(), self.pool, wanted, self.blocks)
        drafts = []
        for i, tokens in enumerate(tokens_of):
            confidence = [SHARED_NOISE] * len(tokens)
            if self.target.adaptive:
                confidence = [features[0] for features in features_of[i]]
            nodes = list(range(ROOT, max(1, len(tokens)) - 1))  # no pass computed the last draft token
            own_states = torch.empty(0) if states is None else states[i, : len(nodes)]
            drafts.append(RowDraft(DraftTree.chain(tokens, confidence), nodes, own_states))
        return drafts

    def _by_depth(self, steps: Sequence[RowStep]) -> list[RowDraft]:
        """Draft with one pass for each depth."""
        chains = [
            SiblingChain(step.row, step.end, step.budget, self._threshold(step.row).value) for step in steps
        ]
        while growing := [chain for chain in chains if chain.growing]:
            step_input = StepInput()
            for chain in growing:
                chain.add_to(step_input)
            x = self.decoder.forward(step_input.build(), self.pool, self.blocks)
            if self.exit_head is None:
                logits = self.decoder.logits(x, list(range(len(growing))))
            else:
                logits = self.exit_head.logits(x)
            for i, chain in enumerate(growing):
                chain.states.append(x[i])
                if self.samples(chain.row):
                    self._sample(chain, logits, i)
                else:
                    self._choose(chain, logits, i)
        drafts = []
        for chain in chains:
            nodes = [ROOT, *chain.trunk][: len(chain.states)]
            drafts.append(RowDraft(chain.draft_tree, nodes, torch.stack(chain.states)))
        return drafts

    def _num_siblings(self, chain: SiblingChain, confidence: float) -> int:
        siblings: int | str = self.options.siblings
        if isinstance(siblings, str):
            siblings = siblings_at(confidence, chain.row.distribution.temperature == 0)
        return min(chain.room, siblings)

    def _sample(self, chain: SiblingChain, logits: Tensor, at: int) -> None:
        """Add a depth of siblings sampled from q, without replacement."""
        row = chain.row
        if (distribution := self.sampler.q(row, chain.path, logits, at)) is None:
            chain.frontier = []
            return
        first = self.target.stream_id + len(chain.tokens)
        count = self._num_siblings(chain, float(distribution.max()))
        tokens = self.sampler.children(row, distribution, range(first, first + count))
        # a controller may cut by confidence, so it must not depend on the sampled tokens
        confidence = SAMPLE_CONFIDENCE[: len(tokens)]
        chain.extend(tokens, confidence, float(distribution[tokens[0]]) if tokens else 0.0, distribution)

    def _choose(self, chain: SiblingChain, logits: Tensor, at: int) -> None:
        """Add a depth of the tokens that rank highest under the noise of the target's own pick."""
        row, by_confidence = chain.row, self.options.siblings == "confidence"
        greedy = row.distribution.temperature == 0
        k = max(SIBLINGS[greedy]) if by_confidence else self.options.siblings
        tokens, probs = self.sampler.top(row, chain.path, logits, k, True, at)
        confidence = 0.0
        if tokens and (chain.floor or by_confidence):  # as in the backend's loop
            confidence = self.sampler.should_stop(row, chain.path, logits, tokens[0], StopRule(), at)[1][0]
        count = self._num_siblings(chain, confidence)
        acceptance = probs if greedy else [SHARED_NOISE * 0.3**i for i in range(len(tokens))]
        chain.extend(tokens[:count], acceptance[:count], confidence)

    def _advance_search(self, steps: Sequence[RowStep]) -> None:
        """Use the best set so far, and try the next candidate on a row with enough output."""
        search: Search = self.memory
        if search.best is not self.skip:
            self.skip, self.blocks = search.best, self._blocks(search.best)
        window = self.options.context_window
        step = next((step for step in steps if step.end - step.row.prompt >= window), None)
        if search.done or step is None:
            return
        search.steps += 1
        if search.steps % self.options.opt_interval == 0:
            skip = search.suggest()
            search.learn(skip, self._score(step.row, step.end, step.budget.nodes, self._blocks(skip)))

    def _score(self, row: Row, end: int, nodes: int, blocks: Any) -> float:
        """Share of the last context_window tokens that the skipped model predicts, `nodes` at a time."""
        slots, right = row.slots, 0
        window: int = self.options.context_window
        scratch, begin = list(slots[end : end + nodes]), end - 1 - window
        for first in range(begin, end - 1, nodes):
            tokens, step_input = row.tokens[first : min(first + nodes, end - 1)], StepInput()
            for i, token in enumerate(tokens):
                step_input.node(slots, first, scratch[: i + 1], token)
            if row.adapter is not None:
                step_input.adapt(0, row.adapter)
            x = self.decoder.forward(step_input.build(), self.pool, blocks)
            predicted = self.sampler.best(self.decoder.logits(x, list(range(len(tokens)))), 1)
            right += sum(ids[:1] == [token] for ids, token in zip(predicted, row.tokens[first + 1 :]))
        return right / window

    def observe(self, commit: Commit) -> None:
        for step in commit.batch:
            if step.tree.tokens and step.row in self.thresholds:
                self.thresholds[step.row].learn(len(set(step.tree.parents)), len(step.accepted))

    def forget(self, row: Row, reason: str) -> None:
        self.thresholds.pop(row, None)
