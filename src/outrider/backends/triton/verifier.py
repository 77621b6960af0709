"""Verification of draft trees on the device.  Match: all nodes are picked, then one program walks each tree.

Other rules: `rules.py`.  Answers come back in one transfer: the only one of a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.rules import Answer, keys_of
from outrider.backends.triton.besides import Asked, Besides
from outrider.backends.triton.rules import WALKS, RuleQueries
from outrider.backends.triton.sampling import LATEST, PARAMS, Rows, best_of_parts, cuts_of, param_bytes
from outrider.backends.triton.values import Picks, values_of
from outrider.core.device import to_device
from outrider.core.noise import MASK
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree

WORDS = 2 + PARAMS + 2 + 3  # of 8 bytes for each row of logits: owner, parameters, node, tree
NO_OWNER, NO_TREE = MASK, (-1, 0, 0)  # MASK is -1 as int64


class TreeQueries(Asked):
    """Trees for `_walk`, which writes for a tree of n nodes, one tree after another:

    accepted nodes [n] | tokens to emit [n + 1] | how many, -1 if a token could not be picked
    """

    rule, words_each = "match", WORDS

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}  # key -> nodes
        self.distributions: list[DistributionParams] = []
        self.owners, self.keys = list[int](), list[int]()  # `Rows.owners` of the rows so far, as columns
        self.trees = list[int]()  # root, first node and nodes of each
        self.tokens, self.parents = list[int](), list[int]()  # of the nodes

    def add(self, key: int, row: Row, tree: DraftTree, root: int) -> None:
        """Add a tree behind those that were added, in the order of rows, if its row can be verified here."""
        owners, number, n = self.owners, len(self.sizes), len(tree.tokens) - tree.probes
        if not self.takes(row, number, tree, root):
            return
        self.asked.add(key, row, root, n)
        between = root - len(owners)
        assert between >= 0, "trees are added in the order of their rows"
        if between:
            owners += [NO_OWNER] * between
            self.keys += [0] * between
        owners += [number] * (n + 1)
        if row.distribution.temperature == 0:  # without noise
            self.keys += [0] * (n + 1)
        else:
            self.keys += keys_of(row.stream, len(row.tokens), tree)
        self.trees += root, len(self.tokens), n
        if n:
            self.tokens += tree.tokens[:n]
            self.parents += tree.parents[:n]
        self.distributions.append(row.distribution)
        self.sizes[key] = n

    @property
    def most(self) -> int:
        """Nodes of the largest tree."""
        return max(self.sizes.values(), default=0)

    def words(self, rows: int, vocabulary: int) -> array[int]:
        """What `answers_to` reads for so many rows of logits: owners, parameters, nodes and trees."""
        owners, nodes = array("Q", [NO_OWNER, 0]) * rows, array("q", bytes(16 * rows))
        owners[: 2 * len(self.owners) : 2] = array("Q", self.owners)
        owners[1 : 2 * len(self.keys) : 2] = array("Q", self.keys)
        nodes[: 2 * len(self.tokens) : 2] = array("q", self.tokens)
        nodes[1 : 2 * len(self.parents) : 2] = array("q", self.parents)
        params = b"".join([param_bytes(distribution, vocabulary) for distribution in self.distributions])
        params = params.ljust(8 * PARAMS * rows, b"\0")
        trees = array("q", self.trees) + array("q", NO_TREE) * (rows - len(self.sizes))
        return array("q", owners.tobytes() + params + nodes.tobytes() + trees.tobytes())

    def answers_to(
        self, logits: Tensor, words: Tensor, padded: bool, besides: Besides | None
    ) -> tuple[Tensor, ...]:
        """`answers_to`.  padded: the words may be those of other trees, too."""
        return answers_to(logits, words, len(logits) if padded else self.most, besides)

    def read(self) -> Iterator[tuple[int, Answer | None]]:
        data, at = self.read_numbers(), 0
        for key, n in self.sizes.items():
            emitted, count = at + n, data[at + 2 * n + 1]
            answer = data[at : at + count - 1], data[emitted : emitted + count]
            yield key, answer if count > 0 else None
            at += 2 * n + 2


@triton.jit
def _walk(
    highest, scores, tokens, trees, nodes, answers, num_parts, PARTS: tl.constexpr, NODES: tl.constexpr
):
    """`verify.match` of one tree, from the best score and token of every part of its rows."""
    tree = tl.program_id(0)
    root, first, n = tl.load(trees + tree * 3), tl.load(trees + tree * 3 + 1), tl.load(trees + tree * 3 + 2)
    if root < 0:
        return
    accepted = answers + 2 * first + 2 * tree
    part, node = tl.arange(0, PARTS), tl.arange(0, NODES)
    node_tokens = tl.load(nodes + (first + node) * 2, mask=node < n, other=-1)
    parents = tl.load(nodes + (first + node) * 2 + 1, mask=node < n, other=-2)
    at, count = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    going = at < 0
    while going:
        row = root + 1 + at
        score = tl.load(scores + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
        token = tl.load(tokens + row * num_parts + part, mask=part < num_parts, other=LATEST)
        pick = tl.min(tl.where(score == tl.max(score, 0), token, LATEST), 0)
        finite = tl.abs(tl.load(highest + row)) < float("inf")
        tl.store(accepted + n + count, pick)
        child = tl.max(tl.where((parents == at) & (node_tokens == pick), node, -1), 0)
        going = finite & (child >= 0)
        tl.store(accepted + count, child, mask=going)
        count = tl.where(finite, count + 1, -1)
        at = child
    tl.store(accepted + 2 * n + 1, count)


def answers_to(
    logits: Tensor, words: Tensor, most: int, besides: Besides | None = None
) -> tuple[Tensor, ...]:
    """int32 [2 M], the answers to the trees of rows of logits [M, V]; and what `values_of` finds, if asked.

    words: int64, as `TreeQueries.words` for M rows.  most: nodes of a tree at most.
    """
    m, raw = len(logits), logits
    if besides is not None:
        logits = besides.edited(raw)
    owners, params, nodes, trees = words.split([2 * m, PARAMS * m, 2 * m, 3 * m])
    rows = Rows(logits, logits.amax(-1), owners, params.view(torch.float64))
    cuts = cuts_of(rows)
    scores, tokens = best_of_parts(rows, cuts)
    parts = scores.shape[1]
    answers = torch.empty(2 * m, dtype=torch.int32, device=logits.device)
    _walk[(m,)](
        rows.highest, scores, tokens, trees, nodes, answers, parts, PARTS=triton.next_power_of_2(parts),
        NODES=triton.next_power_of_2(max(1, most)),
    )  # fmt: skip
    if besides is None or not besides.more.values:
        return (answers,)
    found = values_of(besides.mode, raw, rows, cuts, Picks(scores, tokens), besides.asked, besides.more.best)
    return answers, found


class TreeVerifier:
    """Verification by all rules that have kernels."""

    rules: Collection[str] = ("match", *WALKS)
    processes = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def queries(self, rule: str) -> TreeQueries | RuleQueries:
        return TreeQueries() if rule == "match" else RuleQueries(rule, self.device)

    def verify(self, logits: Tensor, queries: TreeQueries | RuleQueries) -> None:
        if queries.distributions:
            words = torch.frombuffer(queries.words(*logits.shape), dtype=torch.int64)
            besides = queries.besides(len(logits), logits.device)
            queries.answered(*queries.answers_to(logits, to_device(words, logits.device), False, besides))
