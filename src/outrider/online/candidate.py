"""The copy of a drafter's weights that is trained."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.drafting.base import Drafter
from outrider.heads.sample import Agreement, TargetWeights
from outrider.online.judging import Score
from outrider.online.networks import Trainable
from outrider.online.parallelism import Parallelism, threads
from outrider.online.texts import Text, Texts

BETAS, CLIP, BASE_RATE, MOST_RATE = (0.9, 0.95), 1.0, 3e-5 * 4096, 1e-3
DECAY = 0.95  # of the mean, in a step
Weights = dict[str, Tensor]


class Candidate:
    """Trained text by text; what is judged and used is a running mean of the weights.

    Steps of one text are noisy.  Their mean is not, and it needs no schedule that lowers the rate:

        w_0  weights in use     w_k  after k steps     mean_k = d · mean_k-1 + (1 - d) · w_k
                                                       d = min(0.95, k / (k + 1))
    """

    def __init__(self, drafter: Drafter, rate: float | None) -> None:
        """Raises ConfigError for a drafter that is not trained while serving."""
        decoder = drafter.target.decoder
        self.trained = Trainable.of(drafter)
        self.network = self.trained.network
        self.outer = TargetWeights.of(decoder)
        self.rate = rate or min(MOST_RATE, BASE_RATE / decoder.spec.hidden)
        self.parallelism = Parallelism()
        self.begin(self.weights())

    def weights(self) -> Weights:
        """A copy of the network's."""
        return {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}

    def begin(self, weights: Weights) -> None:
        """Train from these weights on."""
        self.network.load_state_dict(weights)
        self.network.zero_grad(set_to_none=True)
        self.adam = torch.optim.AdamW(self.network.parameters(), lr=self.rate, betas=BETAS, weight_decay=0.0)
        self.mean, self.steps = self.weights(), 0

    def learn(self, texts: Texts, text: Text) -> None:
        """One step of the optimizer."""
        with self.parallelism.timed(len(text.tokens)):
            self._step(texts, text)
        self.steps += 1

    def _step(self, texts: Texts, text: Text) -> None:
        self.network.train()
        self._loss(texts, text).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        decay = min(DECAY, (self.steps + 1) / (self.steps + 2))
        for name, tensor in self.network.state_dict().items():
            if tensor.is_floating_point():
                self.mean[name].lerp_(tensor.detach(), 1 - decay)

    def score(self, weights: Weights, texts: Texts, text: Text) -> Score:
        """The loss and the agreement with other weights than the network's."""
        self.network.eval()
        own, agreement = dict[str, Tensor](), Agreement()
        try:
            for name, parameter in self.network.named_parameters():  # no copies
                own[name], parameter.data = parameter.data, weights[name]
            with torch.no_grad(), threads(self.parallelism.count):
                sample = texts.sample(text, self.outer.logits)
                loss = self.trained.loss(replace(sample, agreement=agreement), self.outer)
            return Score(float(loss), agreement.share)
        finally:
            for name, parameter in self.network.named_parameters():
                parameter.data = own.get(name, parameter.data)

    def _loss(self, texts: Texts, text: Text) -> Tensor:
        return self.trained.loss(texts.sample(text, self.outer.logits), self.outer)

    def end(self) -> None:
        """Free what only training needs."""
        self.network.zero_grad(set_to_none=True)
        self.adam.state.clear()
        self.mean = {}
