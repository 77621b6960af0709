"""Draft chains whose tokens stay on the device, beside a forward and a pick for each token."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE, Rerun, needs_triton
from syncs import Syncs

from outrider.backends.base import Chain, Chains
from outrider.backends.torch.sampling import distribution_of
from outrider.cache.pool import Pool
from outrider.checkpoints.hub import Checkpoint
from outrider.core.noise import DRAW, MASK, mix, uniform
from outrider.core.params import DistributionParams
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import NodeFeatures, StopRule, measure
from outrider.models.decoder import Decoder
from outrider.models.placement import Precision
from outrider.sampling.random_streams import index
from outrider.testing import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of masked lanes
STARTS = ([5, 9, 3], [7], [8, 6])  # the text before each chain
LEVELS, VOCABULARY, WIDTH, STREAM = (4, 1, 3), 40, 60, 11
DISTRIBUTIONS = (
    DistributionParams(0.0),
    DistributionParams(0.9, top_k=7),
    DistributionParams(1.1, 0.01, 0, 0.9),
)


def made(kernels: str, folder: Path) -> Decoder:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 50,
        "num_hidden_layers": 1 if kernels == "triton" else 2,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_KERNELS", kernels)
        checkpoint = Checkpoint.open(tiny_checkpoint(folder / "llama", **sizes))
        return Decoder(checkpoint, Precision(torch.float32), DEVICE, 64)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """On torch operations."""
    return made("torch", tmp_path_factory.mktemp("chains"))


def first_step(texts: tuple[list[int], ...] = STARTS) -> StepInput:
    step = StepInput()
    for i, tokens in enumerate(texts):
        step.chain(array("i", range(20 * i, 20 * i + 20)), 0, tokens)
    return step.build()


def chains_of(probs: list[torch.Tensor | None]) -> list[Chain]:
    ends = [2, 3, 5]
    return [
        Chain(at, levels, distribution, STREAM + i, probs=q, first_node=4)
        for i, (at, levels, distribution, q) in enumerate(zip(ends, LEVELS, DISTRIBUTIONS, probs))
    ]


def no_probs() -> list[torch.Tensor | None]:
    return [None, None, None]


def alone(decoder: Decoder, pool: Pool, i: int, sampled: bool) -> tuple[list[int], list[NodeFeatures]]:
    """Chain i, a forward and a pick for each token."""
    tokens, features, distribution = list[int](), list[NodeFeatures](), DISTRIBUTIONS[i]
    table, start = array("i", range(20 * i, 20 * i + 20)), len(STARTS[i])
    for depth in range(LEVELS[i]):
        step, text = StepInput(), [*STARTS[i], *tokens]
        step.chain(table, 0 if not depth else start + depth - 1, text if not depth else text[-1:])
        x = decoder.forward(step.build(), pool)
        logits = decoder.logits(x, [len(x) - 1])[0, :VOCABULARY].cpu()
        if sampled:
            random = uniform(STREAM + i, DRAW, start, 4 + depth)
            token = index(distribution_of(logits, distribution), random)
        else:
            key = mix(STREAM + i + start + depth & MASK)
            token = decoder.backend.pick(logits.to(DEVICE), distribution, key, 1, False)[0][0]
        tokens.append(token)
        features.append(measure(logits, distribution.temperature, token))
    return tokens, features


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=needs_triton)])
def test_a_chain_reads_once_and_is_that_of_single_picks(
    kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of several lengths and distributions; the tokens and their features."""
    if kernels == "triton":
        monkeypatch.setattr("outrider.backends.triton.attention.BLOCK", 16)
        monkeypatch.setattr("outrider.backends.triton.attention.SPLIT", 16)
    decoder = made(kernels, tmp_path)
    pool, wanted = decoder.pool(80), Chains(chains_of(no_probs()), VOCABULARY, StopRule())
    expected = [alone(decoder, decoder.pool(80), i, False) for i in range(3)]
    step = first_step()
    with Syncs() as seen:
        tokens, features = decoder.draft_chain(step, pool, wanted)
    assert seen.seen == ["tolist"]
    assert tokens == [own for own, _ in expected]
    for found, (_, own) in zip(features, expected):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(own))
    assert decoder.draft_chain(first_step(), decoder.pool(80), wanted._replace(stop_rule=None)) == (
        tokens,
        [],
    )


@needs_triton
@pytest.mark.parametrize("before", [1, 14])
def test_recorded_chains_have_the_tokens_of_launched_ones(
    before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text before them grows, so that one graph serves steps of several lengths; states, too.

    before: tokens of the second text; of many, the graph of the chains has room for the last five.
    """
    from outrider.backends.triton import graphs, jobs

    monkeypatch.setattr("outrider.backends.triton.attention.BLOCK", 16)
    monkeypatch.setattr("outrider.backends.triton.attention.SPLIT", 16)
    monkeypatch.setattr(jobs, "LEAST_KEYS", 32)
    monkeypatch.setattr(jobs, "ROWS", (16,))
    monkeypatch.setattr(graphs, "WORTH", 0.0)
    decoder = made("triton", tmp_path)
    own, pools = graphs.graphs_for(DEVICE) or graphs.Graphs(Rerun()), [decoder.pool(80) for _ in range(2)]
    own_chains = [
        chain._replace(at=chain.at + (before - 1) * (i > 0)) for i, chain in enumerate(chains_of(no_probs()))
    ]
    wanted = Chains(own_chains, VOCABULARY, StopRule())
    for last in range(4):
        step, found = first_step((STARTS[0], [*range(7, 7 + before)], [8, last])), list[Any]()
        for pool, decoder.backend.graphs in zip(pools, (own, None)):  # type: ignore[attr-defined]
            states = torch.zeros(3, max(LEVELS), 32, device=DEVICE)
            found.append((decoder.draft_chain(step, pool, wanted._replace(states=states)), states))
        (ours, our_states), (theirs, their_states) = found
        assert ours == theirs
        for i, levels in enumerate(LEVELS):
            assert torch.equal(our_states[i, :levels], their_states[i, :levels])
    jobs_of_a_step = 1 + (before > 1)  # what comes before the chains is recorded, too
    assert (own.counts.recorded, own.counts.replayed) == (jobs_of_a_step, 4 * jobs_of_a_step)


def some_probs(device: torch.device) -> list[torch.Tensor | None]:
    return [None, *(torch.ones(n, WIDTH, device=device).double() for n in LEVELS[1:])]


def check_samples(
    decoder: Decoder, tokens: list[list[int]], features: list[Any], probs: list[torch.Tensor | None]
) -> None:
    expected = [alone(decoder, decoder.pool(80), i, i > 0) for i in range(3)]
    assert tokens == [own for own, _ in expected]
    for found, (_, own) in zip(features, expected):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(own))
    for own, q in zip(tokens[1:], probs[1:]):
        assert q is not None and not q[:, VOCABULARY:].any()
        torch.testing.assert_close(q.sum(1).cpu(), torch.ones(len(q)).double())
        assert all(q[i, token] > 0 for i, token in enumerate(own))


def test_sampled_chains_return_what_their_tokens_were_sampled_from(decoder: Decoder) -> None:
    probs = some_probs(torch.device("cpu"))
    wanted = Chains(chains_of(probs), VOCABULARY, StopRule(), width=WIDTH)
    check_samples(decoder, *decoder.draft_chain(first_step(), decoder.pool(80), wanted), probs)


@needs_triton
@pytest.mark.parametrize("recorded", [False, True])
def test_distributions_of_samples_stay_on_the_device(
    recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read, of tokens and features; a graph writes to the memory of each step."""
    from outrider.backends.triton import graphs, jobs

    monkeypatch.setattr("outrider.backends.triton.attention.BLOCK", 16)
    monkeypatch.setattr("outrider.backends.triton.attention.SPLIT", 16)
    monkeypatch.setattr(jobs, "LEAST_KEYS", 32)
    monkeypatch.setattr(graphs, "WORTH", 0.0)
    decoder = made("triton", tmp_path)
    own = (graphs.graphs_for(DEVICE) or graphs.Graphs(Rerun())) if recorded else None
    decoder.backend.graphs = own  # type: ignore[attr-defined]
    found = list[Any]()
    for _ in range(2):
        probs, step, pool = some_probs(DEVICE), first_step(), decoder.pool(80)
        with Syncs() as seen:
            answer = decoder.draft_chain(
                step, pool, Chains(chains_of(probs), VOCABULARY, StopRule(), width=WIDTH)
            )
        assert seen.seen == ["tolist"]
        found.append((*answer, probs))
    assert own is None or own.counts.replayed == 2
    for each in found:
        check_samples(decoder, *each)


def test_a_rule_ends_one_chain_and_not_the_others(decoder: Decoder) -> None:
    free, features = decoder.draft_chain(
        first_step(), decoder.pool(80), Chains(chains_of(no_probs()), VOCABULARY, StopRule())
    )
    floors = [features[0][1][0] + 1e-6, 0.0, 0.0]
    chains = [chain._replace(floor=floor) for chain, floor in zip(chains_of(no_probs()), floors)]
    ended, _ = decoder.draft_chain(first_step(), decoder.pool(80), Chains(chains, VOCABULARY, StopRule()))
    assert ended[1:] == free[1:] and ended[0] == free[0][: len(ended[0])] and 0 < len(ended[0]) <= 2


def test_states_are_those_that_the_tokens_were_picked_from(decoder: Decoder) -> None:
    states = torch.zeros(3, max(LEVELS), 32, device=DEVICE)
    chains = [chain._replace(distribution=DistributionParams(0.0)) for chain in chains_of(no_probs())]
    wanted = Chains(chains, VOCABULARY, states=states)
    tokens, _ = decoder.draft_chain(first_step(), decoder.pool(80), wanted)
    for i, own in enumerate(tokens):
        logits = decoder.head_logits(decoder.final(states[i, : len(own)]))
        assert logits[:, :VOCABULARY].argmax(-1).tolist() == own and not states[i, len(own) :].any()


def test_a_chain_ends_where_no_logit_is_finite(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "norm", torch.full_like(decoder.norm, float("nan")))
    wanted = Chains(chains_of(no_probs()), VOCABULARY, StopRule())
    assert decoder.draft_chain(first_step(), decoder.pool(80), wanted) == ([[], [], []], [[], [], []])
