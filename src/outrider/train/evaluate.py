"""Acceptance of a saved head, measured by the engine itself on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.params import SamplingParams
from outrider.core.row import Speculation
from outrider.llm import LLM


@dataclass(frozen=True)
class Acceptance:
    """by_depth[d]: share of the drafts of which more than d tokens were accepted."""

    by_depth: list[float]
    tokens_per_step: float

    @staticmethod
    def of(total: Speculation) -> Acceptance:
        return Acceptance([n / total.drafts for n in total.accepted_at], total.tokens_per_step)


class Evaluator:
    """Greedy answers to some prompts, with the drafter to be judged.

    The engine itself is used, whose drafter is replaced: a second one would need K/V memory of its own.
    """

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self.llm = llm
        self.prompts = [{"prompt_token_ids": list(ids)} for ids in prompts]
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)

    def measure(self, speculative_config: Mapping[str, Any]) -> Acceptance:
        self.llm.use(speculative_config)
        try:
            total = Speculation()
            for output in self.llm.generate(self.prompts, self.params):
                total = total + output.outputs[0].speculation
        finally:
            self.llm.use(None)
        return Acceptance.of(total)
