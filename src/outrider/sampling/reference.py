"""The law of a request and the choice from it, in torch.  `kernels/sample.c` is tested equal to this.

Order as in vLLM: temperature, min_p, top_k, top_p.  Equal logits stay or go together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.sampling.noise import gumbel
from outrider.sampling.params import Law


def filtered(logits: Tensor, law: Law) -> Tensor:
    """Logits [V] at temperature, -inf where the law forbids a token; greedy laws forbid nothing."""
    if law.temperature == 0:
        return logits.float()
    scaled = logits.float() / law.temperature
    if law.min_p > 0:
        scaled = scaled.masked_fill(scaled < scaled.max() + torch.tensor(law.min_p).log(), float("-inf"))
    if 0 < law.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(law.top_k).values[-1], float("-inf"))
    if law.top_p < 1:
        whole = (scaled - scaled.max()).exp().double().sum()
        for most in (256, 4096, scaled.numel()):  # a sort of the whole vocabulary would take the longest by far
            best = scaled.topk(min(most, scaled.numel())).values
            mass = (best - best[0]).exp().double()
            if mass.sum() >= law.top_p * whole:
                break
        last = best[mass.cumsum(0) - mass < law.top_p * whole].min()
        scaled = scaled.masked_fill(scaled < last, float("-inf"))
    return scaled


def probabilities(logits: Tensor, law: Law) -> Tensor:
    """The law itself, float64 [V]; a greedy law is the one-hot of its argmax."""
    if law.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
    return filtered(logits, law).double().softmax(-1)


def pick(logits: Tensor, law: Law, key: int, k: int, ids: Tensor | None = None) -> tuple[list[int], list[float]]:
    """The k best of log p + noise (of the logits where greedy) and their probabilities; fewer where the law allows fewer.

    ids: the token that each entry stands for, if it is another; its noise counts.
    """
    if not logits.amax().isfinite():
        return [], []
    scores = scaled = filtered(logits, law)
    if law.temperature > 0:
        noise = gumbel(key, scaled.numel() if ids is None else int(ids.max()) + 1, scaled.device)
        scores = scaled + (noise if ids is None else noise[ids.long().to(noise.device)])
    values, order = scores.sort(descending=True, stable=True)
    tokens = order[:k][values[:k] > float("-inf")]
    return tokens.tolist(), scaled.double().softmax(-1)[tokens].tolist()
