"""A confidence of sampled draft tokens never depends on these tokens.

A controller cuts trees by confidence.  Under a rule that judges samples, a cut that depended on a sampled
token would bias the output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from toys import V, toy_target

from outrider import LLM, SamplingParams, draft
from outrider.config import SpeculativeOptions
from outrider.control.fixed import FixedController, Options
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.drafting.base import Drafter

REJECTION = SpeculativeOptions.of({"method": "off", "verification": "rejection"})
Seen = dict[tuple[tuple[int, ...], ...], set[tuple[float, ...]]]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(toy_target(tmp_path_factory.mktemp("toy")), dtype="float32", max_num_batched_tokens=512)


def confidences(llm: LLM, drafter: Drafter) -> Seen:
    """(text, parents, sampled nodes) -> the confidences of these seen, from requests that differ in their
    seeds.

    Those of other nodes may differ: they also depend on the texts of other requests.
    """
    seen: Seen = defaultdict(set)
    propose = drafter.propose

    def watched(batch: Batch) -> Draft:
        found = propose(batch)
        for step, tree in zip(batch, found.trees):
            sampled = tuple(node for node, source in enumerate(tree.probs_of) if source >= 0)
            if sampled:
                seen[tuple(step.row.tokens), tuple(tree.parents), sampled].add(
                    tuple(round(tree.confidence[node], 5) for node in sampled)
                )
        return found

    drafter.propose = watched  # type: ignore[method-assign]
    llm.engine.use(drafter, REJECTION)
    llm.engine.controller = FixedController(Options(), 3, drafter.size, V)
    params = [SamplingParams(temperature=1.0, max_tokens=5, seed=i, ignore_eos=True) for i in range(96)]
    llm.generate([{"prompt_token_ids": [5, 9, 77, 3]}] * len(params), params)
    return seen


@pytest.mark.parametrize("name", draft.names())
def test_confidences_of_samples_are_the_same_for_every_seed(name: str, toy: LLM) -> None:
    llm = toy.variant(None)
    target = replace(llm.engine.target, needs_probs=True, adaptive=True)
    seen = confidences(llm, draft.method(name).example(target))
    varying = {key: found for key, found in seen.items() if len(found) > 1}
    assert not varying, Counter(map(len, varying.values()))
