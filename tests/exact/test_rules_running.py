"""Rules other than match in the engine: greedy requests equal plain decoding, sampled ones their seed.

That a sampled request has the target's distribution is tested by test_rules.py and test_distribution.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from covering import parametrized
from drafter_cases import PlainOutputs
from helpers import answer, unpaced

from outrider import LLM, ConfigError, SamplingParams, draft, verify
from outrider.core.block_table import PAGE
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.testing import (
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    use_example,
    visible_parts,
)
from outrider.testing.checkpoints import EOS

PROMPTS = random_prompts(7)
RULES = [name for name in verify.names() if not verify.rule(name).keeps_tokens]
# Every rule judges drafts that are sampled and chosen, in chains and trees; other methods meet one rule each.
KINDS = ("draft_model", "layerskip", "eagle3", "ngram", "union")
TREES = [name for name in RULES if verify.rule(name).branches]
SELECTED = {
    (rule, drafter)
    for i, drafter in enumerate(draft.names())
    for rule in (RULES if drafter in KINDS else [TREES[i % len(TREES)]])
}
each_method = parametrized({"rule": RULES, "drafter": draft.names()}, SELECTED)


def use_drafter(llm: LLM, drafter: str, rule: str) -> None:
    lossless = verify.rule(rule).lossless
    use_example(llm, drafter, verification=rule, lossless=lossless)


def served(llm: LLM, drafter: str, rule: str) -> bool:
    """False where the rule judges chains and the method drafts trees, which must be refused."""
    try:
        use_drafter(llm, drafter, rule)
    except ConfigError as error:
        assert "judges chains" in str(error) and "traversal" in str(error)
        assert not verify.rule(rule).branches
        return False
    return True


@each_method
def test_greedy_output_equals_plain_decoding(
    rule: str, drafter: str, outputs_of: PlainOutputs, fast: LLM
) -> None:
    if not served(fast, drafter, rule):
        return
    params = SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.1)
    expected = [outputs_of(prompt, params) for prompt in PROMPTS]
    got = run_staggered(fast, PROMPTS, params)
    check_idle(fast)
    for one, other in zip(got, expected):
        check_statistics(one.outputs)
        assert visible_parts(one.outputs) == visible_parts(other.outputs)
        assert one.speculation.lossless == verify.rule(rule).lossless


@each_method
def test_a_sampled_text_is_a_function_of_its_seed(rule: str, drafter: str, fast: LLM) -> None:
    """Alone, as the first four are, and among others that join and leave.

    What a drafter learns from other requests may change its drafts, and with them the text: so it has
    learned something, and that stays.
    """
    if not served(fast, drafter, rule):
        return
    each = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=16, n=1 + i % 2)
        for i in range(len(PROMPTS))
    ]
    learns = fast.engine.drafter.memory is not None
    if learns:
        run_staggered(fast, PROMPTS[:3], each[:3])
    learned = copy.deepcopy(fast.engine.drafter.memory)
    alone = []
    # union: when a second sample is admitted decides which of a dozen drafters knows something first;
    # auto: the clock decides how much is drafted
    for prompt, params in zip(PROMPTS[:4], each) if drafter not in ("union", "auto") else ():
        use_drafter(fast, drafter, rule)
        freeze(fast, learned)
        alone.append(visible_parts(answer(fast, prompt, params).outputs))
    use_drafter(fast, drafter, rule)
    freeze(fast, learned)
    together = run_staggered(fast, PROMPTS, each)
    check_idle(fast)
    for one in together:
        check_statistics(one.outputs)
    assert [visible_parts(one.outputs) for one in together[: len(alone)]] == alone
    assert not learns or drafter == "auto" or any(one.speculation.drafted for one in together)


@pytest.mark.parametrize("drafter", ["layerskip", "self"])
def test_a_seed_gives_the_same_text_after_a_prefix_hit(drafter: str, llama: str) -> None:
    """Cached pages leave one token of these prompts to compute, as if that were a step of decoding."""
    llm = LLM(llama, max_num_seqs=1)
    if drafter == "self":
        llm.use({"model": "self", "draft_kv_budget": 12, "verification": "rejection"})
    else:
        use_drafter(llm, drafter, "rejection")
    for seed in range(12):
        prompt = [5 + (7 * seed + 3 * i) % 250 for i in range(2 * PAGE + 1)]
        params = SamplingParams(temperature=0.9, top_k=4, seed=seed, max_tokens=16, ignore_eos=True)
        first, second = answer(llm, prompt, params), answer(llm, prompt, params)
        assert second.num_cached_tokens == 2 * PAGE
        assert visible_parts(second.outputs) == visible_parts(first.outputs)


def freeze(llm: LLM, memory: Any) -> None:
    """Fix the drafter's memory, and grant every row its whole budget, in every later step."""
    unpaced(llm)
    scheduler = llm.engine.scheduler
    scheduler.limits = replace(scheduler.limits, max_num_batched_tokens=1 << 12)
    drafter, propose = llm.engine.drafter, llm.engine.drafter.propose

    def with_memory(batch: Batch) -> Draft:
        drafter.memory = copy.deepcopy(memory)
        return propose(batch)

    drafter.propose = with_memory  # type: ignore[method-assign]


def test_a_row_that_fails_leaves_the_others_alone(fast: LLM) -> None:
    use_drafter(fast, "draft_model", "rejection")

    def never(ids: list[int], logits: object) -> object:
        return logits * float("-inf") if len(ids) == 3 else logits  # type: ignore[operator]

    bad = SamplingParams(temperature=0.8, seed=1, max_tokens=9, logits_processors=[never])
    good = SamplingParams(temperature=0.8, seed=1, max_tokens=9)
    outputs = fast.generate([{"prompt_token_ids": p} for p in PROMPTS[:3]], [good, bad, good])
    check_idle(fast)
    assert outputs[1].error is not None and outputs[0].error is None and outputs[2].error is None
    assert len(outputs[0].outputs[0].token_ids) == 9 or outputs[0].outputs[0].token_ids[-1] == EOS


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"verification": "rejektion"}, "Did you mean 'rejection'"),
        ({"verification": "typical"}, "lossless"),
        ({"verification": "typical", "lossless": "no"}, "lossless must be True or False"),
        ({"verification": "typical", "lossless": False, "posterior_alpha": 2}, "posterior_alpha"),
        ({"verification": "match", "posterior_alpha": 0.3}, "posterior_alpha"),
        ({"method": "recycle", "verification": "block"}, "judges chains"),
    ],
)
def test_what_a_rule_refuses(config: dict[str, object], message: str, fast: LLM) -> None:
    with pytest.raises(ConfigError, match=message):
        fast.use({"method": "ngram", **config})
