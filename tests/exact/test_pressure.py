"""Every method under pressure: memory for little more than one request, small steps, shared prefixes."""

from __future__ import annotations

from typing import Any

from covering import parametrized
from drafter_cases import PlainOutputs
from helpers import unpaced

from outrider import LLM, SamplingParams, draft
from outrider.core.block_table import PAGE
from outrider.testing import (
    check_idle,
    check_statistics,
    random_prompts,
    run_staggered,
    use_example,
    visible_parts,
)

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
COMMON = random_prompts(1, seed=2, longest=40)[0][:34]
PROMPTS = [
    [*COMMON[: 34 if i % 2 else 0], *tail] for i, tail in enumerate(random_prompts(5, seed=4, longest=30))
]
CHUNK, POSITIONS = 24, 96


# Pages are taken and freed alike with any sampling: methods alternate, and models that draft have both.
SELECTED = {
    (name, sampling)
    for i, name in enumerate(draft.names())
    for sampling in ([*SAMPLING] if name in ("draft_model", "eagle3", "union") else [[*SAMPLING][i % 2]])
}


@parametrized({"name": draft.names(), "sampling": [*SAMPLING]}, SELECTED)
def test_every_method_under_pressure(name: str, sampling: str, llama: str, outputs_of: PlainOutputs) -> None:
    """Preempted rows, chunked and cached prompts, and shrunk draft budgets give the same tokens, twice."""
    params = [
        SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **SAMPLING[sampling])
        for i in range(len(PROMPTS))
    ]
    expected = [visible_parts(outputs_of(prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    roomy = LLM(llama, max_num_seqs=4, max_model_len=POSITIONS)
    use_example(roomy, name)
    engine = roomy.engine
    slot = (engine.decoder.footprint + engine.drafter.footprint(engine.device)).total()
    pages = engine.max_len // PAGE + 3
    for caching in (True, False):
        tight = LLM(
            llama,
            max_num_seqs=4,
            max_model_len=POSITIONS,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=pages * PAGE * slot,
            enable_prefix_caching=caching,
        )
        use_example(tight, name)
        unpaced(tight)
        for _ in range(1 + caching):
            outputs = run_staggered(tight, PROMPTS, params)
            assert [visible_parts(output.outputs) for output in outputs] == expected
            check_statistics([sample for output in outputs for sample in output.outputs])
        assert tight.engine.scheduler.preemptions > 0
        alone = [
            run_staggered(tight, PROMPTS[1:2], params[1:2])[0].num_cached_tokens for _ in range(2)
        ]  # among others its pages may be evicted
        assert bool(alone[1]) == caching
        check_idle(tight)
