"""Parameters applied to the wrong tokens or node are detected; each test breaks one thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from helpers import answer
from scene import GREEDY, PROMPTS, SAMPLED, Setup
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.core.processor import Ids
from outrider.core.row import Row
from outrider.core.step import Batch, Needs
from outrider.core.tree import ROOT
from outrider.engine.runner import ForwardOutput, Runner
from outrider.sampling.processors import BadWords, LogitBias, Penalties

PENALISED = SamplingParams(
    **{
        **vars(SAMPLED),
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {20: 8, 21: 8},
    }
)
ASKING = SamplingParams(**{**vars(SAMPLED), "logprobs": 2, "prompt_logprobs": 2})


@pytest.mark.parametrize("script", ["right", "hidden"])
def test_a_penalty_that_ignores_the_path(script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = scene(PENALISED, script)
    call = Penalties.__call__
    monkeypatch.setattr(Penalties, "__call__", lambda self, ids, logits: call(self, Ids(ids.tokens), logits))
    assert broken.differences() > 0


@pytest.mark.parametrize("script", ["right", "hidden"])
def test_a_penalty_that_ignores_the_last_token_of_the_path(
    script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = scene(PENALISED, script)
    call = Penalties.__call__
    monkeypatch.setattr(
        Penalties, "__call__", lambda self, ids, logits: call(self, Ids(ids.tokens, ids.path[:-1]), logits)
    )
    assert broken.differences() > 0


def advance(processor: Penalties, tokens: Sequence[int]) -> None:
    """Counts these for good."""
    for token in tokens:
        if token in processor.place:
            processor.counts[token] += 1
            processor.penalties[processor.place[token]] = processor._penalty(processor.counts[token])


@pytest.mark.parametrize("script", ["right", "hidden"])
def test_penalty_state_shared_by_all_nodes_is_detected(
    script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node adds its token to the row's own count, and it is never removed."""
    broken = scene(PENALISED, script)
    call = Penalties.__call__

    def shared(self: Penalties, ids: Ids, logits: Tensor) -> Tensor:
        self._count(ids.tokens)
        advance(self, ids.path[-1:])
        return call(self, Ids(ids.tokens), logits)

    monkeypatch.setattr(Penalties, "__call__", shared)
    assert broken.differences() > 0


def test_penalty_that_counts_rejected_drafts_is_detected(
    scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of the row include every draft token, accepted or not."""
    broken = scene(PENALISED, "hidden")
    begin, count = Runner.begin, Penalties._count
    drafted: dict[int, list[int]] = {}

    def beginning(self: Runner, batch: Batch, needs: Needs) -> Callable[[], ForwardOutput]:
        for step in batch:
            drafted.setdefault(id(step.row.tokens), []).extend(step.tree.tokens)
        return begin(self, batch, needs)

    def counting(self: Penalties, tokens: list[int]) -> None:
        count(self, tokens)
        advance(self, drafted.pop(id(tokens), ()))

    monkeypatch.setattr(Runner, "begin", beginning)
    monkeypatch.setattr(Penalties, "_count", counting)
    assert broken.differences() > 0


def test_bad_words_that_ignore_the_path(scene: Setup, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a word of two tokens forbids is looked up at the root of the tree."""
    params, decode = [], plain.tokenizer.decode
    for prompt in PROMPTS:
        tokens = answer(plain, prompt, GREEDY).outputs[0].token_ids
        pairs = [decode(tokens[i : i + 2]) for i in range(2, 20)]
        params.append(
            SamplingParams(**{**vars(GREEDY), "bad_words": [pair for pair in pairs if pair.strip()]})
        )
    broken = scene(params, "right")
    call = BadWords.__call__
    monkeypatch.setattr(BadWords, "__call__", lambda self, ids, logits: call(self, Ids(ids.tokens), logits))
    monkeypatch.setattr(BadWords, "active", lambda self, length: True)
    assert broken.differences() > 0


def test_a_processor_that_writes_to_the_logits(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities are read from the forward's own row after the token was picked."""
    broken = scene(SamplingParams(**{**vars(ASKING), "logit_bias": {20: 8, 21: -8}}), "hidden")

    def careless(self: LogitBias, ids: Ids, logits: Tensor) -> Tensor:
        return logits.index_add_(0, *self.bias.at(logits))

    monkeypatch.setattr(LogitBias, "__call__", careless)
    assert broken.differences() > 0


@pytest.mark.parametrize("script", ["right", "hidden"])
@pytest.mark.parametrize("wrong", ["root", "next"])
def test_log_probabilities_of_the_wrong_node(
    wrong: str, script: str, scene: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the root for every token of a path, or those after the token instead of before it."""
    broken = scene(ASKING, script)
    record, at = ForwardOutput.record_logprobs, ForwardOutput.at

    def recording(self: ForwardOutput) -> None:
        def off(seen: ForwardOutput, row: int, node: int) -> int:
            nodes = [ROOT, *seen.batch[row].accepted]
            return at(
                seen, row, ROOT if wrong == "root" else nodes[min(nodes.index(node) + 1, len(nodes) - 1)]
            )

        with monkeypatch.context() as patch:
            patch.setattr(ForwardOutput, "at", off)
            record(self)

    monkeypatch.setattr(ForwardOutput, "record_logprobs", recording)
    assert broken.differences() > 0


def test_prompt_logprobs_shifted_by_one_are_detected(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = scene(ASKING)
    score = Runner._score_prompt
    monkeypatch.setattr(
        Runner, "_score_prompt", lambda self, step, x, first: score(self, step, x, max(0, first - 1))
    )
    assert broken.differences() > 0


def test_a_prefix_hit_that_hides_the_prompt(scene: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with prompt_logprobs comes from the cache, so its logits are missing."""
    broken = scene(ASKING)
    monkeypatch.setattr(Row, "reusable", property(lambda row: len(row.tokens) - 1))
    assert broken.differences() == 0, "the cache is empty"
    with pytest.raises(AssertionError, match="logits are needed"):
        broken.differences()
