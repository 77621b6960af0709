"""Drafts with another vocabulary: the same text, and drafts as good as with the same tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import answer, token_prompts
from safetensors.torch import load_file, save_file
from vocabularies import byte_level, checkpoint_of, letters, sentencepiece, tiny_words, twin

from outrider import LLM, ConfigError, SamplingParams, Speculation
from outrider.core.block_table import PAGE
from outrider.core.step import Batch
from outrider.core.tree import Draft
from outrider.draft.draft_model import intersect
from outrider.draft.draft_model.drafter import ModelDrafter
from outrider.draft.draft_model.retokenize import Retokenized
from outrider.testing import (
    check_idle,
    check_statistics,
    make_row,
    random_prompts,
    run_staggered,
    visible_parts,
)

PROMPTS = random_prompts(7)
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8}]
sampled_ways = pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sampled"])
kind_of = pytest.mark.parametrize("kind", [byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
mismatch_of = pytest.mark.parametrize("mismatch", ["intersect", "retokenize"])


def params_of(sampling: dict[str, Any], count: int = len(PROMPTS), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=i, **{"max_tokens": 24, "ignore_eos": True, **sampling, **more})
        for i in range(count)
    ]


def draft(model: str, mismatch: str = "refuse", **more: Any) -> dict[str, Any]:
    return {"model": model, "vocab_mismatch": mismatch, "num_speculative_tokens": 4, **more}


def together(outputs: list[Any]) -> Speculation:
    return sum((output.speculation for output in outputs), Speculation())


@pytest.fixture(scope="module")
def twins(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`twins(kind, keep)`: the target itself under another tokenizer."""
    made: dict[Any, str] = {}

    def make(kind: Any, keep: float = 1.0) -> str:
        if (kind, keep) not in made:
            made[kind, keep] = twin(
                llama, tmp_path_factory.mktemp("twin") / "draft", *tiny_words(), kind, keep
            )
        return made[kind, keep]

    return make


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def spellers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, str]:
    """A target that says letters, and the same network with shuffled ids."""
    folder = tmp_path_factory.mktemp("letters")
    target = checkpoint_of(folder / "target", *letters(), request.param)
    weights = load_file(folder / "target" / "model.safetensors")
    weights["lm_head.weight"][:3] = 0  # it never says a special token
    save_file(weights, folder / "target" / "model.safetensors", {"format": "pt"})
    return LLM(target, max_num_seqs=4), twin(target, folder / "draft", *letters(), request.param)


# ---- as good as with the target's own ids


@sampled_ways
@kind_of
@pytest.mark.parametrize("siblings", [1, 3])
@pytest.mark.parametrize("verification", ["match", "traversal"])
def test_shuffled_ids_draft_the_same_text(
    verification: str,
    siblings: int,
    kind: Any,
    sampling: dict[str, Any],
    fast: LLM,
    llama: str,
    twins: Callable[..., str],
) -> None:
    """Under "intersect" ids and spellings change neither drafts nor their distributions."""
    results = []
    for model, mismatch in ((llama, "refuse"), (twins(kind), "intersect")):
        fast.use(draft(model, mismatch, siblings=siblings, verification=verification))
        outputs = run_staggered(fast, PROMPTS, params_of(sampling))
        check_idle(fast)
        results.append(([visible_parts(o.outputs) for o in outputs], together(outputs)))
    assert results[0] == results[1]
    assert results[1][1].tokens_per_step > 3


@pytest.mark.parametrize("which", ["output", "input"])
def test_a_position_shift_of_one_is_detected(
    which: str, fast: LLM, twins: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above fails if the draft's logits, or the ids that it is fed, are off by one."""
    shared_tokens = intersect.shared_tokens

    def shifted(*given: Any) -> intersect.SharedTokens:
        shared = shared_tokens(*given)
        if which == "output":
            return shared._replace(draft_ids=shared.draft_ids.roll(1))
        return shared._replace(draft_id_of=shared.draft_id_of[1:] + shared.draft_id_of[:1])

    monkeypatch.setattr("outrider.draft.draft_model.drafter.shared_tokens", shifted)
    fast.use(draft(twins(byte_level), "intersect"))
    outputs = run_staggered(fast, PROMPTS, params_of({"temperature": 0.0}))
    assert together(outputs).acceptance < 0.2


def test_same_network_drafts_the_same_text(spellers: tuple[LLM, str]) -> None:
    """Under "retokenize", with one tokenization per text, all greedy tokens are drafted."""
    llm, model = spellers
    prompts = ["It was late, and", "a", "2 + 2 =", "   so  what?\n\nNothing", "x" * 90, "He said: no ", "\n"]
    params = params_of({"temperature": 0.0}, max_tokens=40)
    llm.use(None)
    expected = [visible_parts(llm.generate(prompt, p)[0].outputs) for prompt, p in zip(prompts, params)]
    llm.use(draft(model, "retokenize"))
    outputs = llm.generate(prompts, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert together(outputs).acceptance > 0.98
    check_idle(llm)


@kind_of
@pytest.mark.parametrize("lookbehind", [1, 10])
def test_a_shadow_has_the_cache_of_its_text(
    lookbehind: int, kind: Any, fast: LLM, twins: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all cuts and shared pages, drafts equal the draft model's answer to the same text."""
    heard: dict[tuple[int, ...], list[int]] = {}
    propose = ModelDrafter.propose

    def listening(self: Any, batch: Batch) -> Draft:
        drafted = propose(self, batch)
        for shadow in self.shadows.values():
            if shadow.row in batch.rows and (tokens := drafted.trees[batch.rows.index(shadow.row)].tokens):
                assert not shadow.text.within_character, "it would draft in the middle of a character"
                heard[tuple(shadow.text.ids)] = tokens
        return drafted

    monkeypatch.setattr(ModelDrafter, "propose", listening)
    model = twins(kind, 0.5)
    fast.use(draft(model, "retokenize", assistant_lookbehind=lookbehind))
    whole = random_prompts(1, seed=9, longest=40)[0] * 4
    prompts = [*PROMPTS, *(whole[:length] for length in range(40, 70, 3))]
    for _ in range(2):
        run_staggered(fast, prompts, params_of({"temperature": 0.8}, len(prompts), n=2))
    alone, params = LLM(model), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    outputs = alone.generate(token_prompts(list(heard)), params)
    wrong = [
        ids
        for ids, output in zip(heard, outputs)
        if output.outputs[0].token_ids[: len(heard[ids])] != heard[ids]
    ]
    assert len(heard) > 200
    assert not wrong


# ---- the same text under all conditions


@sampled_ways
@kind_of
@mismatch_of
@pytest.mark.parametrize("keep", [1.0, 0.5])
def test_output_is_the_same_in_a_batch(
    keep: float,
    mismatch: str,
    kind: Any,
    sampling: dict[str, Any],
    fast: LLM,
    plain: LLM,
    twins: Callable[..., str],
) -> None:
    """Alone, then seven ragged prompts for four seats that join and abort midway, of which one asks for three
    samples.
    """
    params = params_of(sampling)
    params[3] = SamplingParams(**{**vars(params[3]), "n": 3})
    expected = [visible_parts(answer(plain, prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    fast.use(draft(twins(kind, keep), mismatch))
    alone = answer(fast, PROMPTS[0], params[0])
    assert visible_parts(alone.outputs) == expected[0]
    outputs = run_staggered(fast, PROMPTS, params, aborts={2: 3, 5: 6})
    check_idle(fast)
    check_statistics([sample for o in outputs for sample in o.outputs])
    assert together(outputs).drafted > 100
    for output, others in zip(outputs, expected):
        for mine, theirs in zip(output.outputs, others):
            whole = visible_parts([mine])[0]
            assert whole == theirs or (
                mine.finish_reason == "abort" and mine.token_ids == theirs[0][: len(mine.token_ids)]
            )


@sampled_ways
@mismatch_of
@pytest.mark.parametrize("caching", [True, False])
def test_prefix_hits_keep_text_and_drafts(
    caching: bool,
    mismatch: str,
    sampling: dict[str, Any],
    llama: str,
    plain: LLM,
    twins: Callable[..., str],
) -> None:
    """The second time the target's prompt comes from the cache, and so does what the draft reads."""
    llm = LLM(
        llama,
        max_num_seqs=4,
        enable_prefix_caching=caching,
        speculative_config=draft(twins(sentencepiece), mismatch),
    )
    common = [*PROMPTS[0], *PROMPTS[1]] * 2
    prompts = [[*common, *tail] for tail in PROMPTS]
    params = params_of(sampling)
    expected = [visible_parts(answer(plain, prompt, p).outputs) for prompt, p in zip(prompts, params)]
    for _ in range(2):
        hits = _hits(llm)
        assert [visible_parts(o.outputs) for o in run_staggered(llm, prompts, params)] == expected
        check_idle(llm)
    assert (min(hits) >= 3 * PAGE) if caching else (max(hits) == 0)
    llm.engine.forget_prefixes()
    assert not any(cache.index for cache in llm.engine.caches)


def test_a_draft_model_with_its_own_pages_keeps_salts_apart(llama: str, twins: Callable[..., str]) -> None:
    llm = LLM(llama, speculative_config=draft(twins(sentencepiece), "retokenize"))
    hits, prompt = _hits(llm), [*PROMPTS[0], *PROMPTS[1]] * 2
    for salt in ("a", "b", "b", None):
        llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, SamplingParams(max_tokens=2))
    assert [hit > 0 for hit in hits] == [False, False, True, False]


def _hits(llm: LLM) -> list[int]:
    """What the last of the engine's allocators finds in its index from now on."""
    cache, found = llm.engine.caches[-1], list[int]()
    match = type(cache).match

    def listening(*given: Any) -> int:
        found.append(match(cache, *given))
        return found[-1]

    cache.match = listening  # type: ignore[method-assign]
    return found


@sampled_ways
@mismatch_of
def test_scarce_memory_leaves_the_text_unchanged(
    mismatch: str, sampling: dict[str, Any], llama: str, plain: LLM, twins: Callable[..., str]
) -> None:
    """Memory for one request, of target and draft together: rows lose their cache and compute it again, or
    are not drafted for.
    """
    params = params_of(sampling, max_tokens=60)
    expected = [visible_parts(answer(plain, prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    config = draft(twins(sentencepiece), mismatch)
    slot = 2 * plain.engine.decoder.footprint.total()  # the draft is the target's network
    llm = LLM(
        llama,
        max_num_seqs=4,
        max_model_len=128,
        kv_cache_memory_bytes=9 * PAGE * slot,
        speculative_config=config,
    )
    assert [cache.pages for cache in llm.engine.caches] == [9] * len(llm.engine.caches)
    outputs = run_staggered(llm, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert llm.engine.scheduler.preemptions > 0
    assert together(outputs).drafted > 0
    check_idle(llm)


@sampled_ways
@pytest.mark.parametrize(
    "options", [{"disable_by_batch_size": 2}, {"target_lookbehind": 1, "assistant_lookbehind": 1}], ids=str
)
def test_rows_that_fall_behind_catch_up(
    options: dict[str, Any],
    sampling: dict[str, Any],
    fast: LLM,
    plain: LLM,
    twins: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speculation pauses in the middle of texts, and a shadow may compute seven tokens a step."""
    monkeypatch.setattr("outrider.draft.draft_model.retokenize.CHUNK", 7)
    params = [
        SamplingParams(**{**vars(p), "max_tokens": 8 + 12 * i}) for i, p in enumerate(params_of(sampling))
    ]
    expected = [visible_parts(answer(plain, prompt, p).outputs) for prompt, p in zip(PROMPTS, params)]
    fast.use(draft(twins(byte_level, 0.5), "retokenize", **options))
    outputs = run_staggered(fast, PROMPTS, params)
    assert [visible_parts(o.outputs) for o in outputs] == expected
    assert together(outputs).drafted > 50
    check_idle(fast)


def test_a_page_that_the_drafter_keeps_is_noticed(
    fast: LLM, twins: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Retokenized, "forget", lambda *_: None)
    fast.use(draft(twins(byte_level), "retokenize"))
    fast.generate(token_prompts(PROMPTS[:1]), params_of(SAMPLING[0], 1))
    with pytest.raises(AssertionError, match="still holds pages"):
        fast.engine.check()
    fast.use(None)


def test_a_draft_that_ends_the_text_ends_it(spellers: tuple[LLM, str]) -> None:
    llm, model = spellers
    llm.use(draft(model, "retokenize"))
    drafter: Any = llm.engine.drafter
    row = make_row(llm.get_tokenizer().encode("abc"))
    (end,) = drafter.draft_codec.ending
    d, e = (drafter.draft_codec.pieces.index(letter) for letter in (b"d", b"e"))
    draft_tree = drafter._translate(row, len(row.tokens), [d, end, e], 4)
    assert draft_tree.tokens == [letters()[0].index(b"d"), 1]


# ---- what is refused


def refused(llm: LLM, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        llm.use({"num_speculative_tokens": 4, **options})
    return str(caught.value)


def test_a_mismatch_names_its_cures(fast: LLM, twins: Callable[..., str]) -> None:
    message = refused(fast, model=twins(byte_level))
    assert all(f'"{cure}"' in message for cure in ("intersect", "retokenize", "allow"))


@mismatch_of
def test_a_draft_without_a_tokenizer(mismatch: str, fast: LLM, tiny: Path) -> None:
    message = refused(fast, model=str(tiny), vocab_mismatch=mismatch)
    assert "tokenizer" in message and str(tiny) in message and '"allow"' in message


def test_intersect_is_refused_with_few_shared_tokens(fast: LLM, twins: Callable[..., str]) -> None:
    message = refused(fast, model=twins(byte_level, 0.0), vocab_mismatch="intersect")
    assert "only 3 of the 300 tokens" in message and "2%" in message and '"retokenize"' in message
    fast.use(draft(twins(byte_level, 0.0), "retokenize"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"vocab_mismatch": "retokenise"}, "Did you mean 'retokenize'"),
        ({"vocab_mismatch": "retokenize", "siblings": 2}, "siblings"),
        ({"target_lookbehind": 0}, "target_lookbehind"),
        ({"assistant_lookbehind": "10"}, "assistant_lookbehind"),
    ],
    ids=str,
)
def test_values_out_of_range(options: dict[str, Any], named: str, fast: LLM) -> None:
    assert named in refused(fast, model="builtin-draft", **options)
