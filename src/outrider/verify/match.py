"""Match: at each node on the path the target picks its own token, with the sampler of plain decoding; a child that holds
it is accepted, otherwise the token is emitted and the step ends.

Lossless for any drafter, without draft probabilities: every emitted token is the target's own pick given the tokens
before it, and that pick is a function of (logits, request seed, position) alone.
"""

from __future__ import annotations

from outrider.types import ROOT, Batch, Draft, Guesses, Laws, Verdict


def verify(draft: Draft, laws: Laws, batch: Batch) -> Verdict:
    nodes, tokens = [], []
    for r, guesses in enumerate(draft.trees):
        path, said = _walk(r, guesses, laws) if batch.emits[r] else ([], [])
        nodes.append(path)
        tokens.append(said)
    return Verdict(nodes, tokens)


def _walk(r: int, guesses: Guesses, laws: Laws) -> tuple[list[int], list[int]]:
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(guesses.parents, guesses.tokens))}
    path: list[int] = []
    said: list[int] = []
    node = ROOT
    while True:
        said.append(laws.pick(r, node, said))
        if (node, said[-1]) not in child:
            return path, said
        node = child[node, said[-1]]
        path.append(node)
