"""Match: at each node on the path the target picks its own token, with the sampler of plain decoding; a child that holds
it is accepted, otherwise the token is emitted and the step ends.

Lossless for any drafter, without draft probabilities: every emitted token is the target's own pick given the tokens
before it, and that pick is a function of (logits, request seed, position) alone.
"""

from __future__ import annotations

from outrider.core.tree import ROOT, DraftTree
from outrider.verify.base import RowPicker, Rule


class Match(Rule):
    same = True
    drawn = False

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        if (found := target.follow()) is not None:
            return found
        child = dict(zip(zip(tree.parents, tree.tokens), range(tree.size)))
        path: list[int] = []
        said: list[int] = []
        node = ROOT
        while True:
            said.append(target.pick(node, said))
            if (node, said[-1]) not in child:
                return path, said
            node = child[node, said[-1]]
            path.append(node)
