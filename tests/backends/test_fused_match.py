"""Fused C calls against the same work in many calls: a forward, `match` over a tree, a pick."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import c_backend, needs_c, sampled_row

from outrider import ModelError
from outrider.backends.torch import sampling as reference
from outrider.checkpoints.hub import Checkpoint
from outrider.core.noise import MASK, gumbel
from outrider.core.params import DistributionParams
from outrider.core.step import FINAL
from outrider.core.step_input import StepInput
from outrider.core.tree import DraftTree
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.sampling.sampler import Sampler
from outrider.verify.match import Match

NEVER = float("-inf")


@needs_c
@settings(max_examples=200, deadline=None)
@given(
    distribution=st.sampled_from(
        [
            DistributionParams(0.0),
            DistributionParams(0.8),
            DistributionParams(1.0, top_k=4),
            DistributionParams(0.7, top_p=0.6),
        ]
    ),
    seed=st.integers(0, MASK),
    index=st.integers(0, 3),
    above=st.lists(st.integers(0, 100), max_size=14),
    probes=st.integers(0, 4),
    length=st.integers(1, 50),
    bad=st.booleans(),
)
def test_following_a_tree_is_picking_node_by_node(
    distribution: DistributionParams,
    seed: int,
    index: int,
    above: list[int],
    probes: int,
    length: int,
    bad: bool,
) -> None:
    """In one call and in many; if no token can be picked, the separate calls raise the error."""
    rng = torch.Generator().manual_seed(seed % (1 << 60))
    parents = [place % (i + 1) - 1 for i, place in enumerate(above)]
    logits = (
        torch.randn(len(above) + 3, 6, generator=rng)[:, :5] * 2
    )  # rows are further apart than they are long
    tokens = torch.randint(5, (len(above),), generator=rng).tolist()
    if bad and above:
        logits[1 + int(torch.randint(len(above), (1,), generator=rng)) + 1] = NEVER
    row = sampled_row([1] * length, distribution, seed, index)
    sampler, tree = (
        Sampler(c_backend()),
        DraftTree(tokens, parents, [0.5] * len(tokens), probes=min(probes, len(tokens))),
    )

    class Asked:
        pick = staticmethod(lambda node, path: sampler.pick(row, path, logits, 2 + node))

    verifier = c_backend().verifier
    assert verifier is not None
    trees = verifier.queries("match")
    for key in (4, 0, 9):
        trees.add(key, row, tree, 1)
    verifier.verify(logits, trees)
    found = dict(trees.read())
    try:
        expected = Match().walk(tree, Asked)  # type: ignore[arg-type]
    except ModelError:
        assert found == {4: None, 0: None, 9: None}
    else:
        assert found == {4: expected, 0: expected, 9: expected}


@needs_c
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kept", [(), (FINAL,), (0, 1, FINAL), (2,)], ids=str)
def test_fused_forward_equals_its_parts(
    kept: tuple[int, ...], quantization: str | None, checkpoint: Any
) -> None:
    """Logits, states and answers, bit for bit; twice in another order, since the logits buffer is reused."""
    folder = checkpoint(
        hidden_size=64, num_hidden_layers=2, vocab_size=200
    )  # the last block of logits is not full
    decoder = Decoder(
        Checkpoint.open(str(folder)), Precision(torch.float32, quantization), torch.device("cpu"), 64
    )
    table = array("i", range(40))
    tree = DraftTree([5, 9, 5, 150], [-1, -1, 0, 2], [0.5] * 4)

    def run(one_call: bool, known: list[int], distribution: DistributionParams) -> tuple[Any, ...]:
        assert decoder.backend.verifier is not None
        step_input, states = StepInput(), dict.fromkeys(kept, torch.empty(0))
        trees = decoder.backend.verifier.queries("match")
        step_input.chain(table, 0, known)
        at = len(known)
        step_input.nodes(table, at, [[at], [at + 1], [at, at + 2], [at, at + 2, at + 3]], tree.tokens)
        trees.add(7, sampled_row(known, distribution), tree, 0)
        step_input.logits_rows = [*range(at - 1, at + 4)]
        forward = decoder.forward_step if one_call else super(Decoder, decoder).forward_step
        logits = forward(step_input.build(), decoder.pool(64), states, trees).clone()
        return logits, states, dict(trees.read())

    for known, distribution in (
        ([3, 1, 4, 1, 5], DistributionParams(0.0)),
        ([2, 7], DistributionParams(0.8, top_p=0.9)),
        ([9] * 12, DistributionParams(0.8)),
    ):
        (logits, states, answers), (expected, others, same) = (
            run(one_call, known, distribution) for one_call in (True, False)
        )
        assert torch.equal(logits, expected) and answers == same and answers[7] is not None
        assert states.keys() == others.keys() and all(
            torch.equal(states[which], others[which]) for which in kept
        )


@needs_c
def test_c_rounds_as_torch_does() -> None:
    """Two tokens of different blocks whose scores (logit and noise) differ by a few roundings."""
    backend, rng, distribution = (c_backend(), torch.Generator().manual_seed(1), DistributionParams(0.7))
    for key in range(400):
        logits, noise = torch.randn(256, generator=rng), gumbel(key, 256)
        first = reference.pick(logits, distribution, key, 1)[0][0]
        score = (logits[first] - logits.max()) / distribution.temperature + noise[first]
        second = int(noise.argmax())
        if second // 64 == first // 64 or noise[second] <= score:
            continue
        near = logits.max() + (score - noise[second]) * distribution.temperature
        for _ in range(8):
            logits[second] = near = near.nextafter(torch.tensor(99.0))
            assert (
                backend.pick(logits, distribution, key, 2, False)[0]
                == reference.pick(logits, distribution, key, 2)[0]
            )
