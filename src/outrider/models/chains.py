"""`Model.draft_chain` in terms of a model's other methods, for backends without a fused model.

Positions and slots of a chain are known before its tokens are.  So the host prepares level after level while
the device computes, a picked token is the next level's input where it is, and one read returns all of them.
Only a rule that may end chains is asked after every level, with a read of its own.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.backends.base import Chain, Chains
from outrider.backends.torch.sampling import distribution_of
from outrider.cache.pool import Pool
from outrider.core.device import take, to_device
from outrider.core.noise import DRAW, MASK, mix, uniform
from outrider.core.step_input import StepInput
from outrider.core.stop_rule import Chained, NodeFeatures, StopRule, features_of, should_stop
from outrider.models.base import Model
from outrider.sampling.random_streams import index_on_device


class Tip(NamedTuple):
    """The end of a chain that grows.

    number: of the chain.  position: of its next token.  entry: index in `table` of that token's slot.
    joint: product of the probabilities of its tokens so far, if a stop rule judges it.
    """

    chain: Chain
    number: int
    table: array[int]
    position: int
    entry: int
    joint: float = 1.0

    def add_to(self, step_input: StepInput) -> Tip:
        """Add the next token to a forward.  Returns the end of the chain after it."""
        step_input.chain(self.table, self.entry, [0], self.position - self.entry)
        return self._replace(position=self.position + 1, entry=self.entry + 1)


class Level(NamedTuple):
    """One token of each of several chains; tokens [n], -1 for none; features [n, NUM_FEATURES] or empty."""

    tips: Sequence[Tip]
    tokens: Tensor
    features: Tensor


class Sample(NamedTuple):
    """The distribution q, float64 [V], of a sampled token, and the row of `Chain.probs` that keeps it."""

    q: Tensor
    kept: Tensor


def draft_chain(
    model: Model, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None
) -> Chained:
    """`Model.draft_chain`."""
    judge = _judge_of(chains)
    levels, samples, tips = list[Level](), list[Sample](), _tips(step_input, chains.chains)
    x = take(model.forward(step_input, pool, blocks), [chain.at for chain in chains.chains])
    for depth in itertools.count():
        if chains.states is not None:
            _store(chains.states[:, depth], tips, x)
        logits = model.head_logits(model.final(x))[:, : chains.vocabulary]
        tokens = _pick(model, logits, tips)
        samples += _sample(logits, tips, tokens, depth)
        levels.append(Level(tips, tokens, _features(chains.stop_rule, logits, tips, tokens)))
        growing = _growing(levels[-1], judge, depth)
        if not growing:
            break
        level_input = StepInput(step_input.pinned)
        tips = [tip.add_to(level_input) for tip in growing.values()]
        level_input.device_ids = take(tokens, [*growing]).clamp_min(0)
        x = model.forward(level_input.build(), pool, blocks)
    _keep(samples)
    return _read(levels, len(chains.chains))


def _judge_of(chains: Chains) -> StopRule | None:
    """The stop rule if it may end one of the chains.  Otherwise it only measures their tokens."""
    rule = chains.stop_rule
    if rule is None or rule.judges:
        return rule
    return rule if any(chain.floor or chain.joint_floor for chain in chains.chains) else None


def _store(states: Tensor, tips: Sequence[Tip], x: Tensor) -> None:
    """Copy the states [n, h] after the chains to their rows of states [chains, h]."""
    numbers = to_device(torch.tensor([tip.number for tip in tips]), x.device)
    states.index_copy_(0, numbers, x)


def _tips(step_input: StepInput, chains: Sequence[Chain]) -> list[Tip]:
    """Where each chain begins: after its row `at` of the step."""
    tips, starts = list[Tip](), step_input.query_start
    for number, chain in enumerate(chains):
        request = next(i for i, end in enumerate(starts[1:]) if chain.at < end)
        table, position = step_input.slot_tables[request], step_input.positions[chain.at] + 1
        tips.append(Tip(chain, number, table, position, step_input.context_lens[chain.at]))
    return tips


def _pick(model: Model, logits: Tensor, tips: Sequence[Tip]) -> Tensor:
    """The best token after each chain, int64 [n] on the device; -1 without a finite logit."""
    assert model.backend.pick_next is not None, "fuses_chains says whether chains are supported"
    keys = [mix(tip.chain.stream + tip.position & MASK) for tip in tips]
    return model.backend.pick_next(logits, [tip.chain.distribution for tip in tips], keys)


def _sample(logits: Tensor, tips: Sequence[Tip], tokens: Tensor, depth: int) -> list[Sample]:
    """Replace the tokens of chains that keep q by samples from it.  Returns these distributions."""
    samples = list[Sample]()
    for i, tip in enumerate(tips):
        chain = tip.chain
        if chain.probs is not None:
            q = distribution_of(logits[i], chain.distribution)
            random = uniform(chain.stream, DRAW, tip.position - depth, chain.first_node + depth)
            tokens[i] = torch.where(tokens[i] < 0, -1, index_on_device(q, random))
            samples.append(Sample(q, chain.probs[depth]))
    return samples


def _keep(samples: Sequence[Sample]) -> None:
    """Copy the distributions of all samples to where they are kept; to the host in one read."""
    if samples:
        found = torch.stack([sample.q for sample in samples])
        for sample, q in zip(samples, found.cpu() if samples[0].kept.device.type == "cpu" else found):
            sample.kept.zero_()[: len(q)] = q


def _features(rule: StopRule | None, logits: Tensor, tips: Sequence[Tip], tokens: Tensor) -> Tensor:
    """Features of the tokens, [n, NUM_FEATURES]; [n, 0] without a rule."""
    if rule is None:
        return logits.new_empty(len(tips), 0)
    temperatures = torch.tensor([tip.chain.distribution.temperature or 1.0 for tip in tips]).double()
    return features_of(logits, to_device(temperatures, logits.device), tokens.clamp_min(0))


def _growing(level: Level, judge: StopRule | None, depth: int) -> dict[int, Tip]:
    """Place in the level -> end of the chain, of those that go on behind it."""
    growing = {i: tip for i, tip in enumerate(level.tips) if depth + 1 < tip.chain.levels}
    if judge is None or not growing:
        return growing
    features_of = level.features.tolist()  # one read
    judged = dict[int, Tip]()
    for i, tip in growing.items():
        features, joint = features_of[i], tip.joint * features_of[i][0]
        low = features[0] < tip.chain.floor or joint < tip.chain.joint_floor
        if not low and not should_stop(judge, features, depth):
            judged[i] = tip._replace(joint=joint)
    return judged


def _read(levels: Sequence[Level], count: int) -> Chained:
    """Tokens and features of each chain, up to its first token that could not be picked; one read."""
    rows = torch.cat([torch.cat([level.tokens[:, None].double(), level.features], 1) for level in levels])
    tips = [tip for level in levels for tip in level.tips]
    tokens_of: list[list[int]] = [[] for _ in range(count)]
    features_of: list[list[NodeFeatures]] = [[] for _ in range(count)]
    ended = set[int]()
    for tip, (token, *features) in zip(tips, rows.tolist()):
        if token < 0:
            ended.add(tip.number)
        elif tip.number not in ended:
            tokens_of[tip.number].append(int(token))
            features_of[tip.number].append(features)
    measured = rows.shape[1] > 1
    return tokens_of, features_of if measured else []
