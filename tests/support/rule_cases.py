"""Random trees of sampled and chosen nodes, and what the rules of `verify` make of them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from outrider import verify
from outrider.backends.torch import sampling as reference
from outrider.backends.torch.backend import TorchBackend
from outrider.core.params import DistributionParams
from outrider.core.row import Row
from outrider.core.tree import DraftTree
from outrider.errors import ModelError
from outrider.sampling import random_streams
from outrider.sampling.sampler import Sampler
from outrider.verify.base import RowPicker

NEVER = float("-inf")
PARAMS = st.builds(
    DistributionParams,
    temperature=st.sampled_from([0.0, 0.1, 0.8, 1.0, 1.7]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4]),
    top_k=st.sampled_from([0, 0, 1, 5, 70, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
)


def random_logits(
    generator: torch.Generator, rows: int, vocabulary: int, masked: float = 0.0
) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    holes = torch.rand(rows, vocabulary, generator=generator) < masked
    holes[:, 0] = False
    return logits.masked_fill(holes, NEVER)


class Asked:
    """The target as the reference asks for it, node by node."""

    def __init__(self, row: Row, logits: torch.Tensor, root: int) -> None:
        self.row, self.logits, self.root = row, logits, root
        self.sampler = Sampler(TorchBackend(torch.device("cpu"), torch.float32))

    def pick(self, row: int, node: int, path: Any) -> int:
        return self.sampler.pick(self.row, path, self.logits, self.root + 1 + node)

    def p(self, row: int, node: int, path: Any) -> torch.Tensor:
        return self.sampler.distribution(self.row, path, self.logits, self.root + 1 + node)

    def accept(self, row: int, node: int, probability: float) -> bool:
        return random_streams.accept(self.row, node, probability)

    def draw(self, row: int, node: int, distribution: torch.Tensor) -> int:
        return random_streams.emit(self.row, node, distribution)


def drafted(
    row: Row, logits: torch.Tensor, above: list[int], kinds: list[int], repeats: bool, near: bool
) -> DraftTree:
    """A tree of sampled and chosen nodes.  kinds: 0 chosen, 1 or 2 sampled from that q of the parent."""
    generator = torch.Generator().manual_seed(7)
    parents, tokens = [place % (i + 1) - 1 for i, place in enumerate(above)], list[int]()
    probs: list[torch.Tensor] = []
    left: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
    probs_of: list[int] = []
    for node, (parent, kind) in enumerate(zip(parents, kinds)):
        if kind == 0:
            same = {tokens[i] for i in range(node) if parents[i] == parent and probs_of[i] < 0}
            free = [token for token in range(logits.shape[1]) if token not in same]
            assume(free)
            tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
            probs_of.append(-1)
            continue
        if (parent, kind) not in left:
            own = logits[1 + parent] + torch.randn(logits.shape[1], generator=generator) * (
                0.3 if near else 3
            )
            q = reference.probabilities(own, row.distribution)
            assert q is not None
            left[parent, kind] = len(probs), q
            probs.append(q)
        which, q = left[parent, kind]
        drawn = random_streams.children(row, q, range(node, node + 1))
        if not drawn:  # q has run out of tokens
            tokens.append(0)
            probs_of.append(-1)
            continue
        if not repeats:
            left[parent, kind] = which, random_streams.without(q, drawn[0])
        tokens += drawn
        probs_of.append(which)
    return DraftTree(tokens, parents, [0.5] * len(tokens), probs, probs_of, repeats)


def of_reference(name: str, row: Row, logits: torch.Tensor, root: int, tree: DraftTree) -> Any:
    """Accepted nodes and tokens to emit; None if a node has no distribution."""
    picker, expected = RowPicker(Asked(row, logits, root), 0), None
    with contextlib.suppress(ModelError):
        expected = verify.rule(name)().walk(tree, picker)
    return None if picker.unknown else expected
