"""`Model.draft_chain` in terms of a model's other methods, for backends without a fused model.

Positions and slots of a chain are known before its tokens are.  So the host prepares level after level while
the device computes, a picked token is the next level's input where it is, and one read returns all of them.
Only a rule that may end chains is asked after every level, with a read of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
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
    """Where a chain goes on.

    number: of the chain.  position: of its next token.  entry: index in `table` of that token's slot.
    joint: product of the probabilities of its tokens, where it is asked for after every level.
    """

    chain: Chain
    number: int
    table: array[int]
    position: int
    entry: int
    joint: float = 1.0

    def add_to(self, step_input: StepInput) -> Tip:
        """Add the next token to a forward.  Returns where the chain goes on after it."""
        step_input.chain(self.table, self.entry, [0], self.position - self.entry)
        return self._replace(position=self.position + 1, entry=self.entry + 1)


class Level(NamedTuple):
    """One token of each of several chains; tokens [n], -1 for none; features [n, NUM_FEATURES] or empty."""

    tips: Sequence[Tip]
    tokens: Tensor
    features: Tensor


def draft_chain(
    model: Model, step_input: StepInput, pool: Pool, chains: Chains, blocks: Any = None
) -> Chained:
    """`Model.draft_chain`."""
    levels, probs, tips = list[Level](), list[tuple[Tensor, Tensor]](), _tips(step_input, chains.chains)
    rule, depth, device = chains.stop_rule, 0, model.backend.device
    judges = rule is not None and (rule.judges or any(c.floor or c.joint_floor for c in chains.chains))
    x = take(model.forward(step_input, pool, blocks), [chain.at for chain in chains.chains])
    while True:
        if chains.states is not None:
            numbers = to_device(torch.tensor([tip.number for tip in tips]), device)
            chains.states[:, depth].index_copy_(0, numbers, x)
        logits = model.head_logits(model.final(x))[:, : chains.vocabulary]
        tokens = _picked(model, logits, tips, probs, depth)
        levels.append(Level(tips, tokens, _features(rule, logits, tips, tokens)))
        kept = [i for i, tip in enumerate(tips) if depth + 1 < tip.chain.levels]
        if judges and rule is not None:
            tips, ends = _judged(rule, levels[-1], depth)
            kept = [i for i in kept if not ends[i]]
        if not kept:
            break
        level = StepInput(step_input.pinned)
        tips, depth = [tips[i].add_to(level) for i in kept], depth + 1
        level.device_ids = take(tokens, kept).clamp_min(0)
        x = model.forward(level.build(), pool, blocks)
    if probs:
        for (to, _), q in zip(probs, torch.stack([q for _, q in probs]).cpu()):
            to.zero_()[: len(q)] = q
    return _read(levels, len(chains.chains))


def _tips(step_input: StepInput, chains: Sequence[Chain]) -> list[Tip]:
    tips, starts = list[Tip](), step_input.query_start
    for number, chain in enumerate(chains):
        request = next(i for i, end in enumerate(starts[1:]) if chain.at < end)
        table, position = step_input.slot_tables[request], step_input.positions[chain.at] + 1
        tips.append(Tip(chain, number, table, position, step_input.context_lens[chain.at]))
    return tips


def _picked(
    model: Model, logits: Tensor, tips: Sequence[Tip], probs: list[tuple[Tensor, Tensor]], depth: int
) -> Tensor:
    """The next token of each chain; adds to `probs` where the distribution of a sampled one goes, and it."""
    assert model.backend.pick_next is not None, "fuses_chains says whether chains are supported"
    keys = [mix(tip.chain.stream + tip.position & MASK) for tip in tips]
    tokens = model.backend.pick_next(logits, [tip.chain.distribution for tip in tips], keys)
    for i, tip in enumerate(tips):
        chain = tip.chain
        if chain.probs is not None:
            q = distribution_of(logits[i], chain.distribution)
            random = uniform(chain.stream, DRAW, tip.position - depth, chain.first_node + depth)
            tokens[i] = torch.where(tokens[i] < 0, -1, index_on_device(q, random))
            probs.append((chain.probs[depth], q))
    return tokens


def _features(rule: StopRule | None, logits: Tensor, tips: Sequence[Tip], tokens: Tensor) -> Tensor:
    if rule is None:
        return logits.new_empty(len(tips), 0)
    temperatures = torch.tensor([tip.chain.distribution.temperature or 1.0 for tip in tips]).double()
    return features_of(logits, to_device(temperatures, logits.device), tokens.clamp_min(0))


def _judged(rule: StopRule, level: Level, depth: int) -> tuple[list[Tip], list[bool]]:
    """The chains with their tokens, and whether each ends with it."""
    tips, ends = list[Tip](), list[bool]()
    for tip, features in zip(level.tips, level.features.tolist()):
        joint, chain = tip.joint * features[0], tip.chain
        tips.append(tip._replace(joint=joint))
        low = features[0] < chain.floor or joint < chain.joint_floor
        ends.append(low or should_stop(rule, features, depth))
    return tips, ends


def _read(levels: Iterable[Level], count: int) -> Chained:
    """Tokens and features of each chain, up to its first token that could not be picked."""
    tokens_of: list[list[int]] = [[] for _ in range(count)]
    features_of: list[list[NodeFeatures]] = [[] for _ in range(count)]
    ended = set[int]()
    numbers = [torch.cat([level.tokens[:, None].double(), level.features], 1) for level in levels]
    rows = iter(torch.cat(numbers).tolist())  # of all levels
    for level in levels:
        for tip, (token, *features) in zip(level.tips, rows):
            if token < 0:
                ended.add(tip.number)
            elif tip.number not in ended:
                tokens_of[tip.number].append(int(token))
                features_of[tip.number].append(features)
    measured = numbers[0].shape[1] > 1
    return tokens_of, features_of if measured else []
