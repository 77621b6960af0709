"""Usage and speculation statistics of a response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

from outrider.core.row import DraftingSummary, LastDraft, Speculation
from outrider.outputs import CompletionOutput, RequestOutput


def usage_of(outputs: Iterable[RequestOutput], reasoning: int = 0) -> dict[str, Any]:
    """OpenAI's `usage`, over all prompts and samples.  reasoning: tokens in front of the answers."""
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
            "reasoning_tokens": reasoning,
        },
    }


def usage_so_far(output: RequestOutput, sample: CompletionOutput) -> dict[str, int]:
    """Usage of one choice of a stream, as vLLM's `continuous_usage_stats` adds it to every part."""
    prompt, emitted = len(output.prompt_token_ids), len(sample.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": emitted, "total_tokens": prompt + emitted}


def statistics(outputs: Iterable[RequestOutput]) -> Speculation:
    return sum((output.speculation for output in outputs), Speculation())


def speculation_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The opt-in field `speculation` of a response.

    acceptance_by_depth: part of the drafts of which at least so many tokens were accepted, from 1.
    by_method: draft tokens of each method, and how many of them are in the output.
    """
    outputs = list(outputs)
    samples = [sample for output in outputs for sample in output.outputs]
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
        "by_method": by_method(samples),
        **chosen(samples),
    }


def by_method(samples: Iterable[CompletionOutput]) -> dict[str, dict[str, int]]:
    drafted, accepted = Counter[str](), Counter[str]()
    for sample in samples:
        drafted.update(sample.drafted_by)
        accepted.update(source for source in sample.token_sources if source is not None)
    return {name: {"drafted": drafted[name], "accepted": accepted[name]} for name in sorted(drafted)}


def chosen(samples: Iterable[CompletionOutput]) -> dict[str, Any]:
    """Choices of adaptive speculation, by steps, and its gain over plain decoding; {} without it."""
    total, steps = DraftingSummary(), Counter[str]()
    for summary in (sample.drafting for sample in samples):
        if summary is not None:
            steps.update(summary.steps)
            total.seconds += summary.seconds
            total.plain_seconds += summary.plain_seconds
    return {"chosen": dict(steps), "gain": round(total.gain, 4)} if steps else {}


def origins_of(sample: CompletionOutput, start: int, piece: Callable[[int], str]) -> dict[str, Any]:
    """The opt-in field `outrider` of a choice: where its tokens from index `start` on come from.

    tokens: [source, depth in the draft, length of the text behind it] of each.  A source of None is the
    target itself.
    tree: draft of the last step, and the tokens that it emitted.  piece: text of a token id.
    """
    depth = 0
    while depth < start and sample.token_sources[start - 1 - depth] is not None:
        depth += 1
    tokens: list[list[Any]] = []
    for source, end in zip_longest(sample.token_sources[start:], sample.token_ends[start:]):
        depth = 0 if source is None else depth + 1
        tokens.append([source, depth, end])
    counts = {"steps": sample.speculation.steps, "drafted": sample.speculation.drafted}
    return {"tokens": tokens, **counts, "tree": tree_of(sample.last_draft, piece)}


def tree_of(draft: LastDraft | None, piece: Callable[[int], str]) -> dict[str, Any] | None:
    """A draft tree with the texts of its nodes; parent -1 is the root."""
    if draft is None:
        return None
    tree, accepted = draft.tree, set(draft.accepted)
    nodes = [
        {
            "text": piece(tree.tokens[i]),
            "parent": tree.parents[i],
            "source": draft.source_of(i),
            "confidence": round(tree.confidence[i], 3),
            "accepted": i in accepted,
        }
        for i in range(tree.size)
    ]
    return {"nodes": nodes, "emitted": [piece(token) for token in draft.emitted]}
