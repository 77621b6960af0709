"""The exactness tests can fail: an engine broken on purpose emits other tokens, and the comparison fails.

Every test first shows that the intact engine emits the tokens of plain decoding, then breaks one thing and
shows that at least one prompt of the same traffic has another output.  The controls at the end break what
must not matter.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from helpers import answer, token_prompts
from scene import DEPTH, GREEDY, PROMPTS, SAMPLED, Setup, outcome

from outrider import LLM, SamplingParams
from outrider.backends.cpu import backend as cpu
from outrider.backends.cpu.rules import TreeQueries
from outrider.cache.pool import Pool
from outrider.core.block_table import PAGE, BlockTable
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.step_input import StepInput
from outrider.core.tree import ROOT, Draft, DraftTree
from outrider.engine.runner import ForwardOutput, Runner
from outrider.engine.scheduler import Scheduler
from outrider.verify.base import Picker

# ---- masks and positions


def edit_nodes(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[StepInput, int, array[int], int, list[int]], None]
) -> None:
    """After draft nodes are added to the step, `edit(step_input, row, table, seen, path)` may spoil each."""
    nodes = StepInput.nodes

    def spoilt(
        self: StepInput, table: array[int], seen: int, paths: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> None:
        first = self.length
        nodes(self, table, seen, paths, tokens)
        for row, path in enumerate(paths, first):
            edit(self, row, table, seen, list(path))

    monkeypatch.setattr(StepInput, "nodes", spoilt)


def test_a_node_that_sees_a_sibling(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node attends to the tree's first node, which is not among its ancestors."""
    broken = scene()

    def edit(step_input: StepInput, row: int, table: array[int], seen: int, path: list[int]) -> None:
        if int(table[seen]) not in path:
            step_input._paths[row] = [int(table[seen]), *path]

    edit_nodes(monkeypatch, edit)
    assert broken.differences() > 0


def test_a_node_that_does_not_see_its_parent(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask gives it the last known token once more instead."""
    broken = scene()

    def edit(step_input: StepInput, row: int, table: array[int], seen: int, path: list[int]) -> None:
        if len(path) > 1:
            step_input._paths[row] = [*path[:-2], int(table[seen - 1]), path[-1]]

    edit_nodes(monkeypatch, edit)
    assert broken.differences() > 0


def test_a_node_that_misses_a_known_token(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees one token less of what is certain."""
    broken = scene()

    def edit(step_input: StepInput, row: int, table: array[int], seen: int, path: list[int]) -> None:
        step_input.context_lens[row] -= 1

    edit_nodes(monkeypatch, edit)
    assert broken.differences() > 0


def test_a_node_at_the_next_position_is_detected(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rotation is that of the next position."""
    broken = scene()

    def edit(step_input: StepInput, row: int, table: array[int], seen: int, path: list[int]) -> None:
        step_input.positions[row] += 1

    edit_nodes(monkeypatch, edit)
    assert broken.differences() > 0


# ---- sampling


def ask(
    monkeypatch: pytest.MonkeyPatch, pick: Callable[[ForwardOutput, int, int, Sequence[int]], int]
) -> None:
    """The verifier asks pick by pick."""
    monkeypatch.setattr(ForwardOutput, "pick", pick)
    monkeypatch.setattr(Runner, "_set_verified", lambda self, batch, queries: None)


def ask_with(monkeypatch: pytest.MonkeyPatch, edit: Callable[[int, int], tuple[int, int]]) -> None:
    """The kernel that follows a tree gets another root, or another position."""
    add = TreeQueries.add

    def edited(self: TreeQueries, key: int, row: Row, tree: DraftTree, root: int) -> None:
        if tree.tokens:
            root, position = edit(root, len(row.tokens))
            row = copy.copy(row)
            row.tokens = [0] * position
        add(self, key, row, tree, root)

    monkeypatch.setattr(TreeQueries, "add", edited)


def forget_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node is sampled as if it hung from nothing: noise and processors of the root's position."""

    def pick(self: ForwardOutput, row: int, node: int, path: Sequence[int]) -> int:
        return self.sampler.pick(self.batch[row].row, (), self.logits, self.roots[row] + 1 + node)

    ask(monkeypatch, pick)


@pytest.mark.parametrize("script", ["right", "hidden"])
def test_noise_of_the_wrong_position(script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = scene(SAMPLED, script)
    forget_paths(monkeypatch)
    assert broken.differences() > 0


def test_noise_alone_does_not_matter_to_a_greedy_request(
    scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of its neighbours: without noise and processors nothing can go wrong."""
    unbroken = scene(GREEDY, "right")
    forget_paths(monkeypatch)
    assert unbroken.differences() == 0


def test_min_tokens_state_shared_by_all_nodes_is_detected(
    scene: Setup, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that may end from its ninth token on, and ends there inside a path."""
    params = []
    for prompt in PROMPTS:
        tokens = answer(plain, prompt, GREEDY).outputs[0].token_ids
        at = next(i for i in range(DEPTH + 2, 2 * DEPTH) if tokens[i] not in tokens[:i])
        params.append(SamplingParams(**{**vars(GREEDY), "min_tokens": at, "stop_token_ids": [tokens[at]]}))
    broken = scene(params, "right")
    forget_paths(monkeypatch)
    assert broken.differences() > 0


def test_logits_of_the_wrong_node(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution after the first node is read from the root."""
    broken = scene()

    def pick(self: ForwardOutput, row: int, node: int, path: Sequence[int]) -> int:
        return self.sampler.pick(self.batch[row].row, path, self.logits, self.roots[row] + max(node, 0))

    ask(monkeypatch, pick)
    assert broken.differences() > 0


@pytest.mark.skipif(cpu.library() is None, reason="no C compiler here")
@pytest.mark.parametrize("wrong", ["position", "root", None])
def test_walking_with_other_noise_or_rows_changes_texts(
    wrong: str | None, scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of the next position, or the distribution of the row before; or nothing is changed."""
    broken = scene(SAMPLED, "right")
    ask_with(
        monkeypatch,
        lambda root, position: (max(0, root - (wrong == "root")), position + (wrong == "position")),
    )
    assert (broken.differences() > 0) == (wrong is not None)


# ---- verifying and committing


def test_accepting_an_unchosen_token_changes_texts(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier walks one node too far: to a child that the target did not choose."""
    broken = scene(GREEDY, "deep")
    verify = broken.llm.engine.verify

    def greedy_walk(batch: Batch, picker: Picker) -> None:
        verify(batch, picker)
        for r, step in enumerate(batch):
            last = step.accepted[-1] if step.accepted else ROOT
            child = next((i for i, parent in enumerate(step.tree.parents) if parent == last), None)
            if child is not None and step.emitted:
                step.accepted = [*step.accepted, child]
                step.emitted = [*step.emitted[:-1], step.tree.tokens[child]]
                step.emitted = [*step.emitted, picker.pick(r, child, step.emitted)]

    monkeypatch.setattr(broken.llm.engine, "verify", greedy_walk)
    assert broken.differences() > 0


def test_accepting_a_child_of_another_node_is_detected(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule accepts a node with the right token under any parent."""
    broken = scene()

    def anywhere(batch: Batch, picker: Picker) -> None:
        for r, step in enumerate(batch):
            if not step.emits:
                continue
            accepted, emitted = list[int](), list[int]()
            step.accepted, step.emitted = accepted, emitted
            node: int | None = ROOT
            while node is not None:
                emitted.append(picker.pick(r, node, emitted))
                same = (i for i, token in enumerate(step.tree.tokens) if token == step.emitted[-1])
                node = next((i for i in same if i not in step.accepted), None)
                if node is not None:
                    accepted.append(node)

    monkeypatch.setattr(broken.llm.engine, "verify", anywhere)
    assert broken.differences() > 0


def test_an_accepted_path_left_where_it_was(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its K/V stays in the slots of the tree instead of moving to those of its positions."""
    broken = scene()
    monkeypatch.setattr(Pool, "move", lambda self, sources, targets: None)
    assert broken.differences() > 0


def test_an_accepted_path_moved_one_slot_too_far_is_detected(
    scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = scene()
    move = Pool.move
    monkeypatch.setattr(
        Pool, "move", lambda self, sources, targets: move(self, sources, [t + 1 for t in targets])
    )
    assert broken.differences() > 0


def test_a_path_moved_while_it_is_read(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots copied one by one from the last to the first: a slot may be overwritten before it is read."""
    broken = scene()
    move = Pool.move

    def backwards(self: Pool, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in reversed(list(zip(sources, targets))):
            move(self, [source], [target])

    monkeypatch.setattr(Pool, "move", backwards)
    assert broken.differences() > 0


def test_a_token_committed_past_the_end(scene: Setup, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler looks at the last token of a step only: a stop token inside a path goes unnoticed."""
    params = []
    for prompt in PROMPTS:
        tokens = answer(plain, prompt, GREEDY).outputs[0].token_ids
        params.append(SamplingParams(**{**vars(GREEDY), "stop_token_ids": [tokens[DEPTH + 2]]}))
    free = scene(GREEDY, "right")  # a drafter that knows what comes after the stop
    free.params = [SamplingParams(**{**vars(p), "seed": 5}) for p in params]
    free.expected = [outcome(answer(plain, prompt, p)) for prompt, p in zip(PROMPTS, params)]
    free.healthy()

    def blind(self: Scheduler, batch: Batch) -> None:
        for step in batch:
            step.row.tokens.extend(step.emitted)
            if step.emitted:
                self._ends(step.row, step.emitted[-1])

    monkeypatch.setattr(Scheduler, "clip", blind)
    assert free.differences() > 0


# ---- sharing


def test_a_prefix_hit_on_the_wrong_page(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index looks at how many pages came before, not at their tokens."""
    broken = scene()
    monkeypatch.setattr(BlockTable, "key_after", lambda self, nodes, tokens: (len(nodes), ()))
    assert max(len(prompt) for prompt in PROMPTS) > PAGE
    broken.differences()
    assert broken.differences() > 0


def test_a_fork_without_its_last_page(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further sample gets an empty page where the prompt's last tokens should have been copied."""
    broken = scene(SamplingParams(**{**vars(SAMPLED), "n": 2}), "right")  # a chain: nothing else is moved
    monkeypatch.setattr(Pool, "move", lambda self, sources, targets: None)
    assert broken.differences() > 0


# ---- controls: what must not matter


def test_nonsense_in_the_drafts_cache_changes_no_token(
    plain: LLM, fast: LLM, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise in the K/V of a draft model: fewer drafts are accepted, every token stays."""
    expected = [answer(plain, prompt, SAMPLED).outputs[0].token_ids for prompt in PROMPTS]
    fast.use({"method": "draft_model", "model": llama, "siblings": 2, "num_speculative_tokens": 4})
    before = fast.generate(token_prompts(PROMPTS), SAMPLED)
    drafter: Any = fast.engine.drafter
    propose = drafter.propose

    def spoilt(*given: Any) -> Draft:
        draft: Draft = propose(*given)
        drafter.pool.data.normal_()
        return draft

    monkeypatch.setattr(drafter, "propose", spoilt)
    after = fast.generate(token_prompts(PROMPTS), SAMPLED)
    assert [o.outputs[0].token_ids for o in before] == expected
    assert [o.outputs[0].token_ids for o in after] == expected
    accepted = [sum(o.speculation.accepted for o in outputs) for outputs in (before, after)]
    assert accepted[1] < accepted[0], "the mutation should have hurt the draft"


@pytest.mark.parametrize("script", ["right", "hidden"])
def test_uncommitted_slots_are_never_read(script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in every uncommitted slot of the target's cache after every step: the tokens stay."""
    unbroken = scene(SAMPLED, script)
    engine = unbroken.llm.engine
    commit = engine.scheduler.commit

    def poison(batch: Batch) -> None:
        commit(batch)
        committed = {
            slot
            for row in engine.scheduler.running
            if row.table is not None
            for slot in row.table.slots[: row.computed].tolist()
        }
        committed |= {page * PAGE + i for page in engine.cache.entry for i in range(PAGE)}
        data = engine.cache.pools[0].data
        data[:, :, [slot for slot in range(data.shape[2]) if slot not in committed]] = float("nan")

    monkeypatch.setattr(engine.scheduler, "commit", poison)
    assert unbroken.differences() == 0
    assert unbroken.differences() == 0  # and once more, from the prefix cache
