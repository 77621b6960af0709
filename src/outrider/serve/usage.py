"""Usage and speculation statistics of a response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from outrider.core.row import Speculation
from outrider.outputs import RequestOutput


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """OpenAI's `usage` of completions, over all prompts and samples."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    emitted = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    total = statistics(outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": emitted,
        "total_tokens": prompt + emitted,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens or 0 for o in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": total.accepted,
            "rejected_prediction_tokens": total.drafted - total.accepted,
            "reasoning_tokens": 0,
        },
    }


def statistics(outputs: Iterable[RequestOutput]) -> Speculation:
    return sum((output.speculation for output in outputs), Speculation())


def speculation_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The opt-in field `speculation` of a response.

    acceptance_by_depth: part of the drafts of which at least so many tokens were accepted, from 1.
    """
    total = statistics(outputs)
    return {
        "steps": total.steps,
        "drafts": total.drafts,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "tokens_per_step": round(total.tokens_per_step, 4),
        "acceptance": round(total.acceptance, 4),
        "acceptance_by_depth": [round(count / total.drafts, 4) for count in total.accepted_at],
        "lossless": total.lossless,
    }
