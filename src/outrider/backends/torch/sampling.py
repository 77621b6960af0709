"""Sampling distribution of a request and the choice of tokens from it, in torch.

`sample.c` is tested equal to this.  Order as in vLLM: temperature, min_p, top_k, top_p.  Tokens with equal
logits are kept or removed together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from outrider.core.noise import gumbel, gumbel_of
from outrider.core.params import DistributionParams

# Numbers of best logits to try before the whole vocabulary, which takes by far the longest to sort on a CPU.
# None on a device: checking whether they suffice would make the host wait for it.
FIRST_LOOKS = {"cpu": (256, 4096)}


def below(logits: Tensor, distribution: DistributionParams) -> Tensor:
    """Distance of each of the logits [V] from the best, at temperature; -inf where a filter removes a token.

    Filters compare these numbers and samples are drawn from them.  In float32 they depend on the rounding,
    so the C kernels compute the same numbers.
    """
    logits = logits.float()
    low = (logits - logits.max()) * torch.tensor(distribution.temperature).reciprocal()
    if distribution.min_p > 0:
        low = low.masked_fill(low < math.log(distribution.min_p), float("-inf"))
    if 0 < distribution.top_k < low.numel():
        low = low.masked_fill(low < low.topk(distribution.top_k).values[-1], float("-inf"))
    if distribution.top_p < 1:
        low = low.masked_fill(low < _last_of_nucleus(low, distribution.top_p), float("-inf"))
    return low


def _last_of_nucleus(low: Tensor, top_p: float) -> Tensor:
    """The smallest of the numbers that top_p keeps."""
    whole = low.exp().double().sum()
    for most in (*FIRST_LOOKS.get(low.device.type, ()), low.numel()):
        best = low.topk(min(most, low.numel())).values
        mass = best.exp().double()
        if most >= low.numel() or mass.sum() >= top_p * whole:
            break
    return best.masked_fill(mass.cumsum(0) - mass >= top_p * whole, float("inf")).min()


def filtered(logits: Tensor, distribution: DistributionParams) -> Tensor:
    """Logits [V] at temperature, -inf where a filter removes a token.  Greedy decoding removes none."""
    if distribution.temperature == 0:
        return logits.float()
    logits = logits.float()
    # as a tensor: a device multiplies by the reciprocal of a number
    warmed = logits / logits.new_full((), distribution.temperature)
    if distribution == DistributionParams(distribution.temperature):
        return warmed
    return warmed.masked_fill(below(logits, distribution) == float("-inf"), float("-inf"))


def probabilities(logits: Tensor, distribution: DistributionParams) -> Tensor | None:
    """Sampling distribution, float64 [V] on the CPU; the one-hot of the argmax if greedy.

    None if no logit is finite.
    """
    if not logits.amax().isfinite():
        return None
    return distribution_of(logits.cpu(), distribution)


def distribution_of(logits: Tensor, distribution: DistributionParams) -> Tensor:
    """`probabilities` on the device of the logits, one of which is finite."""
    if distribution.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
    return below(logits, distribution).double().softmax(-1)


def pick_next(logits: Tensor, asked: Iterable[tuple[int, DistributionParams, int]]) -> Tensor:
    """The best token of every row of [n, V], int64 [n] on its device, -1 where no logit is finite.

    asked: rows, their distributions and keys; the other rows are greedy
    """
    tokens = logits.float().argmax(-1)  # the first of equal ones
    for row, distribution, key in asked:
        if distribution.temperature > 0:
            tokens[row] = scores(logits[row], distribution, key).argmax()
    return torch.where(logits.amax(-1).isfinite(), tokens, -1)


def with_float64(logits: Tensor) -> Tensor:
    """Logits on a device that computes in float64: mps does not."""
    return logits.cpu() if logits.device.type == "mps" else logits


def scores(logits: Tensor, distribution: DistributionParams, key: int) -> Tensor:
    """What `pick` ranks, of logits [V] and a temperature above 0: log p + noise."""
    return _noisy(below(logits, distribution), distribution, key, None)


def _noisy(low: Tensor, distribution: DistributionParams, key: int, ids: Tensor | None) -> Tensor:
    """Filtered logits [n] plus the noise of their tokens, which is none at temperature 0."""
    if distribution.temperature == 0:
        return low
    if ids is None:
        return low + gumbel(key, low.numel(), low.device)
    return low + gumbel_of(key, ids.long().to(low.device))


class TopNext:
    """`Backend.top_next`."""

    def asked(
        self, distributions: Sequence[DistributionParams], keys: Sequence[int], vocabulary: int
    ) -> list[tuple[DistributionParams, int]]:
        return [*zip(distributions, keys)]

    def with_keys(
        self, asked: Sequence[tuple[DistributionParams, int]], keys: Sequence[int]
    ) -> list[tuple[DistributionParams, int]]:
        return [(distribution, key) for (distribution, _), key in zip(asked, keys)]

    def __call__(
        self,
        logits: Tensor,
        asked: Sequence[tuple[DistributionParams, int]],
        k: int,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        noised, lows = list[Tensor](), list[Tensor]()
        for row, (distribution, key) in zip(logits, asked):
            lows.append(below(row, distribution) if distribution.temperature > 0 else row.float())
            noised.append(_noisy(lows[-1], distribution, key, ids))
        ordered = torch.stack(noised).sort(dim=-1, descending=True, stable=True)
        values, order = (part[:, :k] for part in ordered)
        missing = ~(values > float("-inf")) | ~logits.amax(-1, keepdim=True).isfinite()
        entries = order.masked_fill(missing, -1)
        entry_probs = torch.stack(lows).double().softmax(-1).gather(1, order)
        return entries, entry_probs.masked_fill(missing, 0.0).float()


def pick(
    logits: Tensor, distribution: DistributionParams, key: int, k: int, ids: Tensor | None = None
) -> tuple[list[int], list[float]]:
    """The k best tokens by log p + noise (by logits if greedy), and their probabilities.

    Returns fewer where filters leave fewer.
    ids: token of each entry, if the entries are not the tokens themselves; its noise is used.
    """
    logits = with_float64(logits)
    if not logits.amax().isfinite():
        return [], []
    low = below(logits, distribution) if distribution.temperature > 0 else logits.float()
    values, order = _noisy(low, distribution, key, ids).sort(descending=True, stable=True)
    tokens = order[:k][values[:k] > float("-inf")]
    return tokens.tolist(), low.double().softmax(-1)[tokens].tolist()
