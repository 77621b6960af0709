"""The certificate of `outrider verify`: its checks and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.certify.chi_square import ChiSquareResult
from outrider.certify.distributions import COMPARED_TOKENS, FALSE_ALARM, DistributionTest
from outrider.certify.texts import Difference, Tally
from outrider.llm import LLM
from outrider.testing.leaks import leaks

FEW_TOKENS = 1000


@dataclass
class Check:
    """One line of the certificate.  figures: in numbers.  judged: False for a rule that is not lossless."""

    name: str
    tested: str
    result: str
    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    judged: bool = True


@dataclass
class Certificate:
    """exact: the kernels are row-invariant.  promise: of the verification rule, see Rule.promise."""

    exact: bool
    promise: str
    checks: list[Check] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def ties(self) -> int:
        return sum(difference.explained for difference in self.differences)

    @property
    def verdict(self) -> str:
        if not self.passed:
            failed = ", ".join(check.name for check in self.checks if not check.passed)
            bug = self.exact and self.promise != "lossy" and bool(self.differences)
            return f"Not proven lossless: {failed}." + " On these kernels every difference is a bug." * bug
        if self.promise == "lossy":
            expected = "This rule is not lossless, as expected"
            return f"{expected}: its deviation was measured, and nothing else is wrong."
        text = "Lossless" if self.exact else "No deviation found"
        ties = f", except for {self.ties} ties within rounding" if self.ties else ""
        texts, tokens = self._sum("texts"), self._sum("tokens")
        text += f": {texts:,} texts of {tokens:,} tokens equal those of plain decoding{ties}."
        if self.promise == "distribution":
            samples = sum(check.figures.get("samples", 0) for check in self.checks)
            text += f" {samples:,} sampled texts show no difference from its distribution."
        if not self.exact:
            text += " On these kernels rounding depends on the batch: other texts may differ."
        if tokens < FEW_TOKENS:
            text += " That is little: give it more --minutes."
        return text

    def _sum(self, figure: str) -> int:
        """A figure summed over all checks that compare texts."""
        return sum(check.figures[figure] for check in self.checks if "ties" in check.figures)


def text_check(tally: Tally, lossless: bool) -> Check:
    """Texts of one set of sampling parameters, compared token by token."""
    wrong = sum(not difference.explained for difference in tally.differences)
    ties = len(tally.differences) - wrong
    settings = ", ".join(f"{name} {value:g}" for name, value in tally.sampling.items() if value) or "greedy"
    settings = settings.replace("temperature", "T =")
    batch = f"in a batch, {tally.joined} of them joining later" if tally.batched else "one at a time"
    result = f"{wrong} texts differ" if wrong else f"same except for {ties} ties" if ties else "same tokens"
    figures = {name: getattr(tally, name) for name in ("texts", "tokens", "joined")}
    figures |= {"different": wrong, "ties": ties}
    name = f"{settings}, {'batched' if tally.batched else 'alone'}"
    tested = f"{tally.texts} texts, {tally.tokens:,} tokens, {batch}"
    return Check(name, tested, result, not (wrong and lossless), figures)


def logprob_check(tallies: Sequence[Tally], limit: float, lossless: bool) -> Check:
    """Log-probabilities of the tokens that both texts have; `limit` is the largest rounding difference."""
    difference = max(tally.logprob_difference for tally in tallies)
    tokens = sum(tally.tokens - len(tally.differences) for tally in tallies)
    result = "equal"
    if math.isinf(difference):
        result = "some are missing, or are not numbers"
    elif difference:
        result = f"largest difference {difference:.2g} (rounding explains {limit:.2g})"
    figures = {"largest difference": difference if math.isfinite(difference) else None, "limit": limit}
    passed = difference <= limit or not lossless
    return Check("log-probabilities", f"{tokens:,} chosen tokens", result, passed, figures)


def distribution_check(test: DistributionTest, lossless: bool) -> Check:
    """Chi-square tests of the first tokens of sampled texts."""
    *cases, combined = results = test.results()
    p = min(result.p for result in results)
    tested = (
        f"{test.num_samples:,} texts: the first {COMPARED_TOKENS} tokens of {len(cases)} prompts and "
        "temperatures"
    )
    figures: dict[str, Any] = {
        "alarm": FALSE_ALARM,
        "level": test.level,
        "p": p,
        "samples": test.num_samples,
        "combined": combined._asdict(),
        "tests": [
            {
                "prompt": case.prompt,
                "temperature": case.temperature,
                "samples": [case.plain.total(), case.speculative.total()],
                **result._asdict(),
            }
            for case, result in zip(test.cases, cases)
        ],
    }
    passed = combined.degrees_of_freedom > 0 and (p >= test.level or not lossless)
    return Check("distribution", tested, _chi_square_text(cases, combined, p, test.level), passed, figures)


def _chi_square_text(
    cases: Sequence[ChiSquareResult], combined: ChiSquareResult, p: float, level: float
) -> str:
    """The result of the tests in words.  p: the smallest.  level: below which a test alarms."""
    if not combined.degrees_of_freedom:
        return "too few samples for a test: give it more --minutes"
    worst = max(cases, key=lambda result: result.distance - result.expected_distance)
    detectable = max(result.minimum_detectable for result in cases)
    return (
        f"{'distributions differ' if p < level else 'no difference'}: smallest p = {p:.2g} of "
        f"{len(cases) + 1} chi-square tests (alarm below {level:.2g}). Largest deviation "
        f"{worst.distance:.1%}, where chance makes {worst.expected_distance:.1%}. Minimum detectable "
        f"deviation (9 times of 10): {combined.minimum_detectable:.1%} if it is in all cases, "
        f"{f'{detectable:.1%}' if detectable < 1 else 'none'} if it is in one"
    )


def leak_check(llms: Sequence[LLM]) -> Check:
    """Pages lost or owned twice, unfinished requests, and finished requests that a drafter holds."""
    wrong = [leak for llm in llms for leak in leaks(llm)]
    tested = "cache, queue and drafter, after all tests"
    return Check("leaks", tested, "; ".join(wrong) or "none", not wrong)
