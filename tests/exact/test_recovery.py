"""Failures stay local: nothing leaks, and the next request is answered as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from helpers import answer
from torch import Tensor
from transformers import Qwen2Config

from outrider import LLM, CapacityError, ModelError, RequestError, SamplingParams
from outrider.checkpoints.spec import Facts, Spec
from outrider.config import SpeculativeOptions
from outrider.core.block_table import PAGE
from outrider.core.row import Row
from outrider.core.step import Batch
from outrider.core.tree import Draft, DraftTree
from outrider.draft.scripted import Scripted
from outrider.engine.detokenizer import Detokenizer
from outrider.testing import KnownTexts, Scripts, check_idle

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 60))}


@pytest.fixture
def llm(llama: str) -> LLM:
    return LLM(model=llama, dtype="float32", seed=0)


def output(llm: LLM, prompt: Any = PROMPT, params: SamplingParams = PARAMS) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_a_drafter_that_does_not_fit_keeps_the_old_one(llama: str) -> None:
    room = LLM(model=llama, dtype="float32", max_model_len=64)
    slot = room.engine.decoder.footprint.total()
    tight = LLM(model=llama, dtype="float32", max_model_len=64, kv_cache_memory_bytes=(64 + PAGE) * slot)
    before = output(tight)
    with pytest.raises(CapacityError):
        tight.use({"model": llama})
    assert output(tight) == before
    check_idle(tight)


def test_a_prompt_that_the_tokenizer_cannot_read_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, encode = output(llm, "abc"), llm.tokenizer.encode

    def picky(text: str) -> list[int]:
        if "bad" in text:
            raise TypeError("no such character")
        return list(encode(text))

    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda self, text, **_: picky(text))
    good, bad = llm.generate(["abc", "bad"], PARAMS)
    assert good.outputs[0].token_ids == before
    assert isinstance(bad.error, RequestError) and bad.prompt == "bad"
    check_idle(llm)


@pytest.mark.parametrize("at", range(6))
def test_nothing_is_shared_of_a_path_that_was_not_moved(
    at: int, llm: LLM, plain: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted between verification and the move of the accepted path's K/V."""
    truth, params = KnownTexts(), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=0)
    answered = answer(plain, PROMPT["prompt_token_ids"][:7], params).outputs
    truth.learn(PROMPT["prompt_token_ids"][:7], 0, answered)
    whole = PROMPT["prompt_token_ids"][:7] + answered[0].token_ids
    llm.use({"method": "scripted", "script": Scripts(truth).hidden, "nodes": 40, "num_speculative_tokens": 6})
    pool, moves = llm.engine.cache.pools[0], []
    move = pool.move

    def interrupted(sources: list[int], targets: list[int]) -> None:
        moves.append(len(sources))
        if len(moves) == at + 1:
            raise KeyboardInterrupt
        move(sources, targets)

    monkeypatch.setattr(pool, "move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate({"prompt_token_ids": PROMPT["prompt_token_ids"][:7]}, params)
    monkeypatch.undo()
    assert output(llm, {"prompt_token_ids": whole}) == output(plain, {"prompt_token_ids": whole})
    check_idle(llm)


def test_an_interrupted_step_leaks_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt in the step in which a row ends: it has a finish_reason and is not retired yet."""
    before = output(llm)
    observe = llm.engine.drafter.observe

    def interrupted(commit: Any) -> None:
        if any(row.finish_reason for row in commit.batch.rows):
            raise KeyboardInterrupt
        observe(commit)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.drafter, "observe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            output(llm)
    check_idle(llm)
    assert output(llm) == before


def test_a_request_that_fails_in_an_interrupted_step_fails_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boom(ids: list[int], logits: Tensor) -> Tensor:
        raise ValueError("no such state")

    def interrupted(batch: Batch) -> None:
        monkeypatch.undo()
        assert batch[0].row.error is not None
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.scheduler, "clip", interrupted)
    ticket = llm.enqueue(PROMPT, SamplingParams(logits_processors=[boom]))[0]
    limit = time.monotonic() + 5
    with pytest.raises(KeyboardInterrupt):
        llm.loop.run_until(lambda: ticket.finished)
    llm.loop.run_until(lambda: ticket.finished or time.monotonic() > limit)
    assert ticket.finished and ticket.rows[0].finish_reason == "error"
    check_idle(llm)


def test_a_step_interrupted_in_the_target_is_drafted_anew(
    llm: LLM, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has read tokens of a step that failed; the next step brings a new prompt."""
    other = {"prompt_token_ids": [9, 8, 7, 6]}
    plain = [output(llm, prompt) for prompt in (PROMPT, other)]
    fast = LLM(llama, speculative_config={"model": llama, "num_speculative_tokens": 3})
    stream = fast.stream(PROMPT, PARAMS)
    for _ in range(2):
        last = next(stream)

    def broken(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fast.engine.runner, "begin", broken)
        with pytest.raises(KeyboardInterrupt):
            fast.generate({"prompt_token_ids": [3, 4, 5]}, PARAMS)
    assert output(fast, other) == plain[1]
    for last in stream:  # noqa: B007 - the last one is looked at
        pass
    assert last.outputs[0].token_ids == plain[0]
    check_idle(fast)


def test_a_row_without_a_finite_logit_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    good = output(llm)
    pick = llm.engine.sampler.pick

    def broken(row: Row, path: Sequence[int], logits: Tensor, at: int = 0) -> int:
        return pick(
            row, path, logits * float("nan") if row.tokens[0] == 7 and len(row.tokens) > 22 else logits, at
        )

    monkeypatch.setattr(llm.engine.sampler, "pick", broken)
    monkeypatch.setattr(llm.engine.runner, "verifier", None)
    fine, bad = llm.generate([PROMPT, {"prompt_token_ids": [7] * 20}], PARAMS)
    assert fine.outputs[0].token_ids == good and fine.error is None
    assert (
        isinstance(bad.error, ModelError)
        and bad.outputs[0].finish_reason == "error"
        and len(bad.outputs[0].token_ids) == 3
    )
    check_idle(llm)


class Careless(Scripted):
    """Drafts ids that do not exist, and more and deeper nodes than its budget."""

    def propose(self, batch: Batch) -> Draft:
        wild = [10**9, -5, *range(40)]
        return Draft([DraftTree.chain(wild, [0.5] * len(wild)) for _ in batch])


def test_a_bad_drafter_leaves_the_output_unchanged(llm: LLM) -> None:
    before = output(llm)
    config = SpeculativeOptions.of({"method": "scripted", "num_speculative_tokens": 4})
    llm.engine.use(Careless(Careless.Options(), llm.engine.target), config)
    assert output(llm) == before
    check_idle(llm)


@pytest.mark.parametrize(
    "first", [{"max_tokens": 1}, {"speculate": False}], ids=["max_tokens=1", "speculate=False"]
)
def test_prompt_pages_are_reused_between_requests(first: dict[str, Any], llama: str) -> None:
    """A request that never drafted leaves pages that are complete for the draft model, too."""
    llm = LLM(model=llama, dtype="float32", speculative_config={"model": llama, "num_speculative_tokens": 3})
    output(llm, params=SamplingParams(**{**vars(PARAMS), **first}))
    starts: list[int] = []
    propose = llm.engine.drafter.propose

    def listening(batch: Any) -> Any:
        starts.append(batch[0].start)
        return propose(batch)

    llm.engine.drafter.propose = listening  # type: ignore[method-assign]
    output(llm)
    assert starts[0] == (len(PROMPT["prompt_token_ids"]) - 1) // PAGE * PAGE


def test_heads_that_the_kernels_cannot_hold_are_not_for_the_lean_decoder() -> None:
    config = Qwen2Config(
        hidden_size=2048, num_attention_heads=1, num_key_value_heads=1, architectures=["Qwen2ForCausalLM"]
    )
    assert not isinstance(Facts.of(config), Spec)
    config.num_attention_heads = config.num_key_value_heads = 4
    assert isinstance(Facts.of(config), Spec)


def test_variants_draw_the_same_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    one, two = llm.variant(None), llm.variant({"method": "ngram"})
    assert [output(one, params=params) for _ in range(3)] == [output(two, params=params) for _ in range(3)]


def test_a_special_token_in_the_middle_takes_no_space_away() -> None:
    class Pieces:
        """Decodes like a SentencePiece tokenizer: the first piece of a text loses its leading space."""

        added_tokens_decoder: ClassVar = {0: type("Token", (), {"special": True})()}

        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "".join(" " + "abcdefghi"[i] for i in ids if i).lstrip()

    text = Detokenizer(Pieces())
    ids = [1, 2, 0, 0, 3, 0, 4]
    assert "".join(text.feed(i) for i in ids) == Pieces().decode(ids)
