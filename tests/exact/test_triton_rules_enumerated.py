"""The kernels of rules emit the target's distribution, by exact enumeration of all random choices.

In Triton's interpreter, where a uniform is replaced by an object that takes each comparison both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from kernel_cases import sampled_row
from test_rules import chosen, sampled
from torch import Tensor

from outrider.backends.torch.sampling import probabilities
from outrider.core.params import DistributionParams
from outrider.core.tree import DraftTree
from outrider.testing import Emissions, RandomModels, enumerate_rule
from outrider.verify.base import RowPicker, Rule

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl

from outrider.backends.triton import distributions, rules
from outrider.backends.triton.verifier import TreeVerifier

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of masked lanes
    pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled kernels are not enumerated"),
]
PLAIN = DistributionParams(1.0)
RULES = ["rejection", "block", "traversal"]
CASES: dict[str, tuple[int, Callable[[RandomModels], DraftTree]]] = {
    "chain": (3, sampled(2, 1)),
    "chosen chain": (3, chosen([0, 2], [-1, 0])),
    "without replacement": (4, sampled(1, 2)),
    "independent": (3, sampled(1, 2, "independent")),
    "whole tree": (2, sampled(2, 2)),
    "chosen tree": (3, chosen([0, 2, 1, 1, 0], [-1, -1, 0, 0, 1])),
}


class Logits(RandomModels):
    """Random models whose p is that of float32 logits."""

    def logits(self, path: Sequence[int]) -> Tensor:
        return super().distribution("p", path).log().float()

    def distribution(self, model: str, path: Sequence[int]) -> Tensor:
        if model != "p":
            return super().distribution(model, path)
        probs = probabilities(self.logits(path), PLAIN)
        assert probs is not None
        return probs


class Choice:
    """A uniform that is compared with a probability, which is taken both ways."""

    def __init__(self, models: RandomModels) -> None:
        self.models = models

    def __lt__(self, probability: Any) -> Any:
        value = float(probability.handle.data.item())
        taken = self.models.accept(0, 0, min(1.0, value) if value == value else 0.0)
        return probability == probability if taken else probability != probability

    def __ge__(self, probability: Any) -> Any:
        return ~(self < probability)


class Kernel(Rule):
    """A rule as its kernel computes it."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.name, self.patch = name, patch

    def walk(self, tree: DraftTree, target: RowPicker) -> tuple[list[int], list[int]]:
        models: Any = target.picker

        def draw(t: Any, root: Any, node: Any, behind: Any, total: Any, uniform: Choice) -> Any:
            i = tl.arange(0, 4)
            masses = distributions._residual(t, root, node, behind, i).handle.data
            assert masses.sum() == pytest.approx(total.handle.data.item(), abs=1e-14)
            token = models.choices.choose(masses.tolist())
            return tl.full((), token, tl.int32)

        self.patch.setattr(rules, "_uniform", lambda key, node: Choice(models))
        self.patch.setattr(rules, "_draw", draw)
        paths = [list[int]()]
        for node, parent in enumerate(tree.parents):
            paths.append([*paths[parent + 1], tree.tokens[node]])
        logits = torch.stack([models.logits(path) for path in paths])
        queries = TreeVerifier(DEVICE).queries(self.name)
        queries.add(0, sampled_row([1, 2], PLAIN), tree, 0)
        TreeVerifier(DEVICE).verify(logits, queries)
        found = dict(queries.read())[0]
        assert found is not None
        return found


def emissions(name: str, case: str, patch: pytest.MonkeyPatch, seed: int = 0) -> Emissions:
    vocabulary, drafting = CASES[case]
    return enumerate_rule(Kernel(name, patch), drafting, models=Logits(vocabulary, seed))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RULES)
def test_kernels_emit_the_targets_distribution(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "block" and "chain" not in case:
        pytest.skip("block judges chains")
    found = [emissions(name, case, monkeypatch, seed) for seed in range(2)]
    assert max(one.error() for one in found) <= 1e-12
    assert max(one.mean_tokens for one in found) > 1.1, "nothing is ever accepted"


@pytest.mark.parametrize(("name", "case"), [(name, "chain") for name in RULES])
def test_a_missing_residual_is_detected(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the token comes from p itself."""

    def take(t: Any, root: Any, node: Any, child: Any, total: Any, scale: Any) -> Any:
        mass = distributions._take(t, root, node, child, total, scale)
        tl.store(distributions._record(t, root, child) + distributions.MASS, mass * 0.0)
        return mass * 0.0

    monkeypatch.setattr(rules, "_take", take)
    assert emissions(name, case, monkeypatch).error() > 1e-3
