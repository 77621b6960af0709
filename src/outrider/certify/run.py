"""Test of a speculative configuration on a model: `outrider verify`.

the rule promises      greedy texts            sampled texts
the same text          token by token          token by token, same seeds
the distribution       token by token          chi-square test of their first tokens
nothing                measured                measured
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.certify.certificate import (
    Certificate,
    Check,
    distribution_check,
    leak_check,
    logprob_check,
    text_check,
)
from outrider.certify.distributions import CANDIDATES, DistributionTest
from outrider.certify.prompts import PromptSource
from outrider.certify.texts import GREEDY, SEEDED, Difference, TextComparison
from outrider.certify.ties import look, reference_logits, tolerance
from outrider.llm import LLM

MAX_UNEXPLAINED = 5  # differences after which the others are not examined
GREEDY_SHARE = 0.3  # of the time, if distributions are tested as well
ROUNDING_TEXTS = 3  # texts on which rounding is measured

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Effort:
    """Effort of a test.

    minutes: time for the tests, without loading.  tokens: maximum length of the compared texts.
    samples: minimum number of sampled texts per case and engine, however long they take.
    """

    minutes: float = 2.0
    tokens: int = 64
    samples: int = 0
    seed: int = 0


def certify(
    plain: LLM,
    speculative: LLM,
    prompts: PromptSource,
    effort: Effort,
    expect_lossy: bool = False,
    tick: Tick = lambda what: None,
) -> Certificate:
    """Test `speculative`, a variant of `plain`.  Raises the error of a prompt that was not answered."""
    clock, rule, exact = _Clock(effort.minutes), speculative.engine.rule, plain.engine.exact
    certificate = Certificate(exact, rule.promise)
    settings, share = [GREEDY], GREEDY_SHARE
    if rule.keeps_tokens:
        # With rounding, a token may enter or leave the nucleus of top_p: such a difference is not a tie.
        settings, share = [GREEDY, *(SEEDED if exact else SEEDED[:1])], 1.0
    texts = TextComparison(plain, speculative, settings, effort.seed)
    compared = _compare(texts, prompts, effort, clock, share, tick)
    for tally in texts.tallies:
        certificate.differences += tally.differences
    _explain(plain, certificate.differences)
    certificate.checks += [text_check(tally, rule.lossless) for tally in texts.tallies]
    limit = 0.0 if exact else _logprob_tolerance(plain, compared)
    certificate.checks.append(logprob_check(texts.tallies, limit, rule.lossless))
    if not rule.keeps_tokens:
        test = DistributionTest(plain, speculative, prompts.shortest(CANDIDATES), effort.seed)
        _sample(test, effort.samples, clock, tick)
        certificate.checks.append(distribution_check(test, rule.lossless))
    if not rule.lossless:
        promise = Check("the rule", "its promise", "it is marked as not lossless", expect_lossy)
        certificate.checks.append(promise)
        for check in certificate.checks:
            check.judged = False
    certificate.checks.append(leak_check((plain, speculative)))
    return certificate


class _Clock:
    def __init__(self, minutes: float) -> None:
        self.seconds, self.began = 60 * minutes, time.perf_counter()

    def left(self, share: float = 1.0) -> float:
        """Remaining seconds of the first `share` of the time."""
        return self.seconds * share - (time.perf_counter() - self.began)


def _compare(
    texts: TextComparison, prompts: PromptSource, effort: Effort, clock: _Clock, share: float, tick: Tick
) -> list[list[int]]:
    """Rounds of more and longer texts while time and prompts last; the first few of plain decoding."""
    size, tokens, kept = 4, min(8, effort.tokens), list[list[int]]()
    max_size = 2 * texts.speculative.engine.options.max_num_seqs
    while batch := prompts.take(size):
        began = clock.left()
        for text in texts.round(batch, tokens):
            prompts.add_text(text)
            kept = kept if len(kept) == ROUNDING_TEXTS else [*kept, text]
            tick(f"texts, {tokens} tokens each")
        work, size, tokens = len(batch) * tokens, max(size, max_size), min(2 * tokens, effort.tokens)
        if (began - clock.left()) * size * tokens / work > clock.left(share):
            break
    return kept


def _sample(test: DistributionTest, min_samples: int, clock: _Clock, tick: Tick) -> None:
    """Rounds of sampled texts while another one fits into the time, at least `min_samples` per case."""
    count, took = 2 * test.speculative.engine.options.max_num_seqs, 0.0
    while took <= clock.left() or test.samples_per_case < max(1, min_samples):
        began = clock.left()
        for _ in test.round(count):
            tick(f"distributions, {test.num_samples:,} texts")
        took = began - clock.left()


def _explain(llm: LLM, differences: list[Difference]) -> None:
    """Fill in `gap` of the differences, until MAX_UNEXPLAINED of them are not explained by rounding."""
    unexplained = 0
    for difference in differences:
        token = difference.speculative
        if token is not None and difference.plain is not None and unexplained < MAX_UNEXPLAINED:
            difference.gap = look(llm.engine, difference.prompt, difference.params, difference.before, token)
        unexplained += not difference.explained


def _logprob_tolerance(llm: LLM, texts: Sequence[list[int]]) -> float:
    """Rounding error of a log-probability, at most: twice that of a logit, as the normaliser moves too."""
    decoder, largest = llm.engine.decoder, 0.0
    for text in texts:
        middle = len(text) // 2
        alone, together = reference_logits(decoder, text[:middle], text[middle:])
        largest = max(largest, 2 * tolerance(alone, together, decoder.dtype))
    return largest
