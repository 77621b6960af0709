"""Match: accept the child that holds the target's own pick.

At each node on the path the target picks a token with the ordinary sampler.  A child with that token is
accepted; without one, the token is emitted and the step ends.

Lossless for any drafter, without draft probabilities.  Every emitted token is the target's own pick given the
tokens before it.  That pick is a function of (logits, request seed, position) alone.
"""

from __future__ import annotations

from outrider.core.tree import ROOT, DraftTree
from outrider.verify.base import RowPicker, Rule


class Match(Rule):
    keeps_tokens = True
    needs_probs = False
    kernel = "match"

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        child = dict(zip(zip(tree.parents, tree.tokens), range(tree.size)))
        accepted: list[int] = []
        emitted: list[int] = []
        node = ROOT
        while True:
            emitted.append(target.pick(node, emitted))
            if (node, emitted[-1]) not in child:
                return accepted, emitted
            node = child[node, emitted[-1]]
            accepted.append(node)
