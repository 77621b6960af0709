"""After a warm-up, graphs serve requests that come and go: nothing is launched or recorded beside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import without_kernels
from interpreted import DEVICE, needs_triton

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeOptions
from outrider.draft import methods
from outrider.draft.auto import Auto
from outrider.draft.union import Union, parse
from outrider.drafting.base import Drafter, Target
from outrider.heads.base import random_head
from outrider.testing import run_staggered, tiny_checkpoint

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE.type == "cuda", reason="computes nothing, on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
ROWS, REQUESTS = 12, 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(Path(tmp_path_factory.mktemp("traffic")) / "llama", **SIZES)


@pytest.fixture
def llm(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    without_kernels.install(monkeypatch)
    yield LLM(checkpoint, device="cpu", enable_prefix_caching=False, max_num_seqs=ROWS)


def eagle3_chains(target: Target) -> Drafter:
    from outrider.draft.eagle3 import Eagle3, Network

    return Eagle3(Eagle3.Options(tree="chain"), target, random_head(Network.like, target))


def draft_model(checkpoint: str, target: Target) -> Drafter:
    method, options, _ = parse({"model": checkpoint})
    return method.create(options, target)


def use(llm: LLM, name: str, checkpoint: str) -> None:
    """Install a drafter."""
    alone = [partial(draft_model, checkpoint)]
    makers = {"draft_model": alone, "traversal": alone, "eagle3": [eagle3_chains]}.get(
        name, [*alone, eagle3_chains]
    )
    config: dict[str, Any] = {"method": name}
    if name in ("union", "auto"):
        config["drafters"] = [{"method": "ngram"}]  # `makers` take its place
    elif name in ("draft_model", "traversal"):
        config = {"model": checkpoint}
        if name == "traversal":
            config["verification"] = name
    speculation = SpeculativeOptions.of(config)
    target = llm.engine.target_for(speculation)
    mix = {"union": Union, "auto": Auto}.get(name)
    drafter = makers[0](target) if mix is None else mix(mix.Options(), target, makers)
    llm.engine.use(drafter, speculation)


def traffic(llm: LLM, temperatures: list[float], methods: list[str | None]) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 40) for _ in range(rng.randint(2, 60))] for _ in range(REQUESTS)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 90),
            temperature=rng.choice(temperatures),
            seed=i,
            ignore_eos=True,
            draft_method=rng.choice(methods),
        )
        for i in range(REQUESTS)
    ]
    run_staggered(llm, prompts, params)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["plain", "draft_model", "traversal", "eagle3", "union", "auto"])
def test_nothing_is_launched_or_recorded_after_a_warm_up(
    name: str, ahead: bool, llm: LLM, checkpoint: str
) -> None:
    """Greedy requests, sampled ones, and both; prompts beside drafts; texts that end at different steps."""
    from outrider.backends.triton.graphs import counts_of_all

    assert name in ("plain", "traversal", *methods())  # a rule, for drafts of a model
    if name != "plain":
        use(llm, name, checkpoint)
    llm.engine.ahead = ahead
    for controller in llm.engine.adaptive:
        controller.settles = ahead
    llm.warm_up()
    warm = counts_of_all()
    for temperatures in ([0.0], [0.8], [0.0, 0.8]):
        traffic(llm, temperatures, [None, *llm.engine.drafter.sources] if name == "union" else [None])
        found = counts_of_all()
        assert (found.launched, found.recorded) == (warm.launched, warm.recorded), temperatures
    assert found.replayed > warm.replayed + 100
    assert found.padded - warm.padded < 0.1 * (found.replayed - warm.replayed)


def test_a_step_of_many_prompts_computes_the_logits_of_their_last_tokens(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 80 prompts, with 6 tokens each: 512 rows with 128 logits, by a graph of the warm-up."""
    from outrider.backends.triton import fused
    from outrider.backends.triton.graphs import counts_of_all

    without_kernels.install(monkeypatch)
    compute, seen = fused._Step.compute, list[tuple[int, int]]()

    def noting(job: Any, inputs: Any) -> Any:
        seen.append((job.padded.step.rows, job.wanted))
        return compute(job, inputs)

    monkeypatch.setattr(fused._Step, "compute", noting)
    llm = LLM(checkpoint, device="cpu", enable_prefix_caching=False, max_num_seqs=80)
    llm.warm_up()
    before = counts_of_all()
    seen.clear()
    prompts = [{"prompt_token_ids": [3 + (i + j) % 37 for j in range(6)]} for i in range(80)]
    llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    assert (512, 128) in seen and not [wanted for _, wanted in seen if wanted > 128]
    assert counts_of_all().launched == before.launched
