"""Verification of draft trees by the rules that compare p with q, on the device: one program walks each tree.

`verify/` is the reference, and draws from the same random streams.  So the answers are its own, unless a
probability is within rounding of its uniform, or p equals q up to rounding: then acceptance probabilities of
block and traversal verification are quotients of rounding errors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.backends.rules import Answer
from outrider.backends.triton.besides import Asked, Besides
from outrider.backends.triton.distributions import (
    CHILD,
    EARLIER,
    LINKS,
    PARENT,
    SHARE,
    SIBLING,
    TOKEN,
    TOTAL,
    WARPS,
    _draw,
    _link,
    _ratio,
    _record,
    _take,
    _uniform,
    targets_of,
)
from outrider.backends.triton.sampling import PARAMS, Rows, param_bytes
from outrider.core.device import to_device
from outrider.core.noise import ACCEPT, EMIT, uniform_key
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import ROOT, DraftTree

TREE = tl.constexpr(
    3
)  # numbers of a tree: the row of its root, -1 for none; the keys of accepting and emitting
NO_LINKS, NO_TREE = [0, ROOT, 0, -1, -1, -1], array("q", [-1, 0, 0])
NO_OWNER = array("q", [-1, 0])


@triton.jit
def _finite(t, root, node):
    return tl.abs(tl.load(t.highest + root + 1 + node)) < float("inf")


@triton.jit
def _first_child(t, root, node):
    return tl.load(_link(t, root, node) + CHILD)


@triton.jit
def _share_left(mass, share):
    """The acceptance probability of a node after a rejected child."""
    return tl.where(share < 1, mass / (mass + 1 - share), 1.0)


@triton.jit
def _answer(t, tree, answers, finite, node, behind, total):
    """Write the path to `node`, and a token to emit after it that is sampled from its residual.

    At the row of the root: the number of tokens, or 0 if a row is not finite; then the token and the node of
    each accepted one, and the other token.
    """
    root, key = tl.load(tree), tl.load(tree + 2)
    out, depth, at = answers + 2 * root, tl.full((), 0, tl.int32), node
    while at >= 0:
        depth += 1
        at = tl.load(_link(t, root, at) + PARENT)
    if finite:
        tl.store(out + 1 + 2 * depth, _draw(t, root, node, behind, total, _uniform(key, node)))
        at, place = node, depth - 1
        while at >= 0:
            tl.store(out + 1 + 2 * place, tl.load(_link(t, root, at) + TOKEN).to(tl.int32))
            tl.store(out + 2 + 2 * place, at.to(tl.int32))
            at = tl.load(_link(t, root, at) + PARENT)
            place -= 1
    tl.store(out, tl.where(finite, depth + 1, 0))


@triton.jit
def _rejection(t, trees, answers):
    """`verify.rejection` of one tree."""
    tree = trees + tl.program_id(0) * TREE
    root, key = tl.load(tree), tl.load(tree + 1)
    if root < 0:
        return
    node, behind = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    total, finite = tl.load(t.totals + root), _finite(t, root, node)
    child = _first_child(t, root, node)
    while finite & (child >= 0):
        if _uniform(key, child) < _ratio(t, root, node, child, total):
            node, behind = child, tl.zeros_like(behind)
            total, finite = tl.load(t.totals + root + 1 + node), _finite(t, root, node)
            child = _first_child(t, root, node)
        else:
            mass = _take(t, root, node, child, total, 1.0)
            total, behind = tl.where(mass > 0, mass, total), child + 1
            child = tl.load(_link(t, root, child) + SIBLING)
    _answer(t, tree, answers, finite, node, behind, total)


@triton.jit
def _block(t, trees, answers):
    """`verify.block` of one tree, whose links are those of the chain from its root."""
    tree = trees + tl.program_id(0) * TREE
    root, key = tl.load(tree), tl.load(tree + 1)
    if root < 0:
        return
    node, share = tl.full((), -1, tl.int64), tl.full((), 1.0, tl.float64)
    finite, child = _finite(t, root, node), _first_child(t, root, node)
    while finite & (child >= 0):  # the longest prefix that may be accepted
        share *= _ratio(t, root, node, child, tl.load(t.totals + root + 1 + node))
        if share == 0:
            child = tl.full((), -1, tl.int64)
        else:
            node, share = child, tl.where(share < 1, share, 1.0)
            tl.store(_record(t, root, node) + SHARE, share)
            finite, child = _finite(t, root, node), _first_child(t, root, node)
    tl.debug_barrier()  # one thread has written the shares
    behind, total = tl.full((), 0, tl.int64), tl.full((), 0.0, tl.float64)
    searching = finite
    while searching:
        total, child = tl.load(t.totals + root + 1 + node), _first_child(t, root, node)
        share, behind = tl.full((), 1.0, tl.float64), tl.zeros_like(behind)
        if node >= 0:
            share = tl.load(_record(t, root, node) + SHARE)
        if child >= 0:
            mass = _take(t, root, node, child, total, share)
            total, behind = tl.where(mass > 0, mass, total), child + 1
            share = _share_left(mass, share)
        searching = (node >= 0) & (_uniform(key, node) >= share)
        node = tl.where(searching, node - 1, node)  # the parent
    _answer(t, tree, answers, finite, node, behind, total)


@triton.jit
def _traversal(t, trees, answers):
    """`verify.traversal` of one tree.  The record of a node keeps its state while a child is visited."""
    tree = trees + tl.program_id(0) * TREE
    root, key = tl.load(tree), tl.load(tree + 1)
    if root < 0:
        return
    node, behind = tl.full((), -1, tl.int64), tl.full((), 0, tl.int64)
    share, total = tl.full((), 1.0, tl.float64), tl.load(t.totals + root)
    finite, child = _finite(t, root, node), _first_child(t, root, node)
    going = finite
    while going:
        rejected = child
        if child >= 0:
            ratio = share * _ratio(t, root, node, child, total)
            ratio = tl.where(ratio < 1, ratio, 1.0)
            if ratio != 0:
                tl.debug_barrier()  # an earlier record has been read by all threads
                tl.store(_record(t, root, node) + SHARE, share)
                tl.store(_record(t, root, node) + TOTAL, total)
                tl.debug_barrier()
                node, share, behind = child, ratio, tl.zeros_like(behind)
                total, child = tl.load(t.totals + root + 1 + node), _first_child(t, root, node)
                going, rejected = _finite(t, root, node), tl.full((), -1, tl.int64)
                finite = going
        elif node < 0:
            going = node >= 0
        elif _uniform(key, node) < share:
            going = node < 0
        else:
            rejected = node
            node = tl.load(_link(t, root, node) + PARENT)
            share, total = tl.load(_record(t, root, node) + SHARE), tl.load(_record(t, root, node) + TOTAL)
        if rejected >= 0:
            mass = _take(t, root, node, rejected, total, share)
            total, behind = tl.where(mass > 0, mass, total), rejected + 1
            share, child = _share_left(mass, share), tl.load(_link(t, root, rejected) + SIBLING)
    _answer(t, tree, answers, finite, node, behind, total)


WALKS = {"rejection": _rejection, "block": _block, "traversal": _traversal}


class RuleQueries(Asked):
    """Trees for one of `WALKS`, whose answers have the form of `_answer`.

    probs: the distributions of sampled nodes on the device, which kernels read by address
    """

    words_each = 2 + PARAMS + LINKS.value + TREE.value  # of 8 bytes for each row of logits

    def __init__(self, rule: str, device: torch.device) -> None:
        super().__init__()
        self.rule, self.device = rule, device
        self.distributions: list[DistributionParams] = []
        self.owners, self.links, self.trees = array("q"), list[int](), array("q")
        self.roots: dict[int, int] = {}  # key -> row of the root
        self.probs: list[Tensor] = []

    def add(self, key: int, row: Row, tree: DraftTree, root: int) -> None:
        """Add a tree behind those that were added, in the order of rows, if its row can be verified here."""
        if not self.takes(row, len(self.roots), tree, root):
            return
        between, n = root - len(self.owners) // 2, tree.size
        assert between >= 0, "trees are added in the order of their rows"
        self.owners += NO_OWNER * between + array("q", [len(self.roots), 0]) * (n + 1)
        self.links += NO_LINKS * between
        self.links += self._links(tree) if n else NO_LINKS
        keys = array("Q", [uniform_key(row.stream, use, len(row.tokens)) for use in (ACCEPT, EMIT)])
        self.trees += array("q", [root]) + array("q", keys.tobytes())
        self.distributions.append(row.distribution)
        self.roots[key] = root

    def _links(self, tree: DraftTree) -> list[int]:
        """The links of the root and of all nodes, as in `Targets`."""
        addresses = {-1: 0}  # of distributions that nodes name: a tree that was cut has others
        links, ends, drawn = NO_LINKS * (tree.size + 1), dict[int, int](), dict[tuple[int, int], int]()
        for node in range(tree.size):
            parent, which = tree.parents[node], tree.probs_of[node] if tree.probs_of else -1
            if self.rule == "block" and parent != node - 1:
                break  # what is no chain from the root is not verified
            at = (node + 1) * LINKS.value
            if which not in addresses:
                self.probs.append(self._moved(tree.distributions[which]))
                addresses[which] = self.probs[-1].data_ptr()
            links[at : at + 3] = tree.tokens[node], parent, addresses[which]
            if which >= 0 and not tree.repeats:
                links[at + EARLIER.value] = drawn.get((parent, which), -1)
                drawn[parent, which] = node
            last = ends.get(parent)
            place = (parent + 1, CHILD.value) if last is None else (last + 1, SIBLING.value)
            links[place[0] * LINKS.value + place[1]] = ends[parent] = node
        return links

    def _moved(self, q: Tensor) -> Tensor:
        return to_device(q.double().contiguous(), self.device)

    def words(self, rows: int, vocabulary: int) -> array[int]:
        """What `answers_to` reads for so many rows of logits: owners, parameters, links and trees."""
        if wrong := [tuple(q.shape) for q in self.probs if q.shape != (vocabulary,)]:
            raise ValueError(f"a draft's sampling distribution has shape {wrong[0]}, not ({vocabulary},).")
        params = b"".join([param_bytes(distribution, vocabulary) for distribution in self.distributions])
        words = self.owners + NO_OWNER * (rows - len(self.owners) // 2)
        words.frombytes(params.ljust(8 * PARAMS * rows, b"\0"))
        words.extend(self.links)
        words.extend(bytes(LINKS.value * rows - len(self.links)))
        return words + self.trees + NO_TREE * (rows - len(self.roots))

    def answers_to(
        self, logits: Tensor, words: Tensor, padded: bool, besides: Besides | None
    ) -> tuple[Tensor, ...]:
        """int32 [2 M], the answers to the trees of rows of logits [M, V].

        words: int64, as `words` for M rows.  They alone say which trees there are.
        """
        m, logits = len(logits), logits if besides is None else besides.edited(logits)
        owners, params, links, trees = words.split([2 * m, PARAMS * m, LINKS.value * m, TREE.value * m])
        targets = targets_of(Rows(logits, logits.amax(-1), owners, params.view(torch.float64)), links)
        answers = torch.empty(2 * m, dtype=torch.int32, device=logits.device)
        WALKS[self.rule][(m,)](targets, trees, answers, num_warps=WARPS, enable_fp_fusion=False)
        return (answers,)

    def read(self) -> Iterator[tuple[int, Answer | None]]:
        data = self.read_numbers()
        for key, at in self.roots.items():
            end = at * 2 + 2 * data[at * 2]
            found = data[at * 2 + 2 : end : 2], data[at * 2 + 1 : end : 2]
            yield key, found if data[at * 2] > 0 else None
