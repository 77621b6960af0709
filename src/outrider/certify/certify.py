"""Whether speculation keeps its promise on somebody's own model: `outrider verify`.

Rules that promise the same text are held to it at every temperature.  Those that promise the same law are held to the text
where it is greedy, and to the law where it is sampled; a rule that promises neither is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.certify.distributions import ALARM, CANDIDATES, FIRST, LawTest
from outrider.certify.passages import Passages
from outrider.certify.texts import GREEDY, SEEDED, Difference, Tally, Texts
from outrider.certify.ties import both, look, tolerance
from outrider.core.row import Row
from outrider.llm import LLM

FEW = 1000  # tokens: fewer say little
SHOWN = 5  # differences that are looked at before it is clear that rounding is not the reason
GREEDY_SHARE = 0.3  # of the time, where laws are to be tested as well
TOUCHES = 3  # texts over which rounding is measured

Tick = Callable[[str], None]


@dataclass
class Check:
    """One line of the certificate.  figures: the same in numbers.  judged: False where a rule promises nothing that could be kept."""

    name: str
    tested: str
    result: str
    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    judged: bool = True


@dataclass
class Certificate:
    exact: bool
    promise: str  # of the rule: see Rule.promise
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
            bug = self.exact and self.promise != "lossy" and self.differences
            return f"Not proven lossless: {failed}." + (
                " On these kernels every difference is a bug." if bug else ""
            )
        if self.promise == "lossy":
            return "This rule is not lossless, as was expected: what it changes was measured, and nothing else is wrong."
        said = "Lossless" if self.exact else "No loss found"
        but = f", but for {self.ties} ties within rounding" if self.ties else ""
        said += f": {self.texts:,} texts, {self.tokens:,} tokens, are those of plain decoding{but}."
        if self.promise == "law":
            said += f" {self.samples:,} sampled texts have its law, as far as so many can show."
        if not self.exact:
            said += " On these kernels rounding depends on the batch: other texts may differ."
        if self.tokens < FEW:
            said += " That is little: more --minutes compare more."
        return said

    def counted(self, figure: str) -> int:
        """The sum of a figure over all checks that compared texts."""
        return sum(check.figures[figure] for check in self.checks if "ties" in check.figures)

    @property
    def texts(self) -> int:
        return self.counted("texts")

    @property
    def tokens(self) -> int:
        return self.counted("tokens")

    @property
    def samples(self) -> int:
        """Texts on which the law was tested."""
        return sum(check.figures.get("samples", 0) for check in self.checks)


@dataclass(frozen=True)
class Effort:
    """minutes: of the tests, loading aside.  tokens: of the longest texts that are compared.  samples: of each lot where laws are
    compared, however long that takes (the smallest round is always done)."""

    minutes: float = 2.0
    tokens: int = 64
    samples: int = 0
    seed: int = 0


def certify(
    plain: LLM,
    fast: LLM,
    passages: Passages,
    effort: Effort,
    expect_lossy: bool = False,
    tick: Tick = lambda what: None,
) -> Certificate:
    """`fast` is a variant of `plain`, which decodes plainly.  Raises what a prompt raises that cannot be answered."""
    clock, rule, exact = _Clock(effort.minutes), fast.engine.rule, plain.engine.exact
    made = Certificate(exact, rule.promise)
    seeded = (
        SEEDED if plain.engine.exact else SEEDED[:1]
    )  # rounding may move the border of a nucleus, which no tie explains
    texts = Texts(plain, fast, (GREEDY, *seeded) if rule.same else (GREEDY,), effort.seed)
    heard = _compare(texts, passages, effort, clock, 1.0 if rule.same else GREEDY_SHARE, tick)
    made.differences = [difference for tally in texts.tallies for difference in tally.differences]
    _explain(plain, made.differences)
    made.checks += [text_check(tally, rule.lossless) for tally in texts.tallies]
    made.checks.append(logprob_check(texts.tallies, 0.0 if exact else _reach(plain, heard), rule.lossless))
    if not rule.same:
        distributions = LawTest(plain, fast, passages.short(CANDIDATES), effort.seed)
        _sample(distributions, effort.samples, clock, tick)
        made.checks.append(law_check(distributions, rule.lossless))
    if not rule.lossless:
        made.checks.append(
            Check("the rule", "what it promises", "it is not lossless, and says so", expect_lossy)
        )
        for check in made.checks:
            check.judged = False
    made.checks.append(leak_check((plain, fast)))
    return made


class _Clock:
    def __init__(self, minutes: float) -> None:
        self.seconds, self.began = 60 * minutes, time.perf_counter()

    def left(self, share: float = 1.0) -> float:
        """Seconds of the first `share` of the time."""
        return self.seconds * share - (time.perf_counter() - self.began)


def _compare(
    texts: Texts, passages: Passages, effort: Effort, clock: _Clock, share: float, tick: Tick
) -> list[list[int]]:
    """Rounds of more and longer texts while there is time and there are prompts.  Returns what plain decoding said to the first few."""
    size, tokens, kept = 4, min(8, effort.tokens), list[list[int]]()
    most = 2 * texts.fast.engine.options.max_num_seqs
    while prompts := passages.take(size):
        began = clock.left()
        for text in texts.round(prompts, tokens):
            passages.heard(text)
            kept = kept if len(kept) == TOUCHES else [*kept, text]
            tick(f"texts, {tokens} tokens each")
        work, size, tokens = len(prompts) * tokens, max(size, most), min(2 * tokens, effort.tokens)
        if (began - clock.left()) * size * tokens / work > clock.left(share):
            break
    return kept


def _sample(distributions: LawTest, least: int, clock: _Clock, tick: Tick) -> None:
    count, took = 2 * distributions.fast.engine.options.max_num_seqs, 0.0
    while took <= clock.left() or distributions.each < max(1, least):
        began = clock.left()
        for _ in distributions.round(count):
            tick(f"laws, {distributions.samples:,} texts")
        took = began - clock.left()


def _explain(llm: LLM, differences: list[Difference]) -> None:
    """Looks at where texts part, until it is clear that rounding is not the reason."""
    wrong = 0
    for difference in differences:
        if difference.plain is not None and difference.said is not None and wrong < SHOWN:
            difference.gap = look(
                llm.engine, difference.prompt, difference.params, difference.before, difference.said
            )
        wrong += not difference.explained


def _reach(llm: LLM, texts: Sequence[list[int]]) -> float:
    """How far rounding may move a log-probability: a logit, and the sum that it is compared with."""
    found = [both(llm.engine.decoder, text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    return max(
        (2 * tolerance(alone, together, llm.engine.decoder.dtype) for alone, together in found), default=0.0
    )


def text_check(tally: Tally, lossless: bool) -> Check:
    wrong = [difference for difference in tally.differences if not difference.explained]
    ties = len(tally.differences) - len(wrong)
    how = ", ".join(f"{name} {value:g}" for name, value in tally.sampling.items() if value) or "greedy"
    how = how.replace("temperature", "T =")
    company = f"in company, {tally.joined} of them joining later" if tally.together else "alone"
    result = f"{len(wrong)} texts differ" if wrong else f"same but for {ties} ties" if ties else "same tokens"
    figures = {
        "texts": tally.texts,
        "tokens": tally.tokens,
        "joined": tally.joined,
        "different": len(wrong),
        "ties": ties,
    }
    name = f"{how}, {'in company' if tally.together else 'alone'}"
    return Check(
        name,
        f"{tally.texts} texts, {tally.tokens:,} tokens, {company}",
        result,
        not (wrong and lossless),
        figures,
    )


def logprob_check(tallies: Sequence[Tally], limit: float, lossless: bool) -> Check:
    apart = max(tally.apart for tally in tallies)
    tokens = sum(tally.tokens - len(tally.differences) for tally in tallies)
    what = "equal" if apart == 0 else f"{apart:.2g} apart at most ({limit:.2g} is rounding)"
    return Check(
        "log-probabilities",
        f"{tokens:,} chosen tokens",
        what,
        apart <= limit or not lossless,
        {"largest difference": apart, "limit": limit},
    )


def law_check(distributions: LawTest, lossless: bool) -> Check:
    *each, whole = chances = distributions.chances()
    p, tests = min(chance.p for chance in chances), len(chances)
    worst = max(each, key=lambda chance: chance.distance - chance.by_chance)
    sight = max(chance.visible for chance in each)
    result = "too few samples to say anything: give it more --minutes"
    if whole.freedom:
        result = (
            f"{'laws differ' if p < distributions.level else 'no difference'}: p = {p:.2g}, the least of {tests} (alarm below {distributions.level:.2g}). "
            f"{worst.distance:.1%} of a law apart at most, where chance makes {worst.by_chance:.1%}. Seen 9 times of 10: "
            f"{whole.visible:.1%} everywhere, {f'{sight:.1%}' if sight < 1 else 'nothing'} in one place"
        )
    told = zip(distributions.cells, each)
    figures: dict[str, Any] = {
        "alarm": ALARM,
        "level": distributions.level,
        "p": p,
        "samples": distributions.samples,
        "all as one": whole._asdict(),
    }
    figures["tests"] = [
        {
            "prompt": cell.prompt,
            "temperature": cell.temperature,
            "samples": [cell.plain.total(), cell.fast.total()],
            **chance._asdict(),
        }
        for cell, chance in told
    ]
    tested = (
        f"{distributions.samples:,} texts: the first {FIRST} tokens of {len(each)} prompts and temperatures"
    )
    return Check(
        "the law", tested, result, whole.freedom > 0 and (p >= distributions.level or not lossless), figures
    )


def leak_check(llms: Sequence[LLM]) -> Check:
    """No slot is lost, nothing is in flight, and no drafter remembers a text that has ended."""
    wrong = []
    for llm in llms:
        try:
            llm.engine.check()
        except AssertionError as error:
            wrong.append(str(error) or "a slot is lost or owned twice")
        if llm.engine.busy:
            wrong.append("a text is still running")
        kept = [
            name
            for name, value in _state(llm.engine.drafter)
            if isinstance(value, Mapping) and any(isinstance(k, Row) for k in value)
        ]
        wrong += [f"the drafter remembers a finished text in {name!r}" for name in kept]
    return Check("leaks", "cache, queue and drafter, after everything", "; ".join(wrong) or "none", not wrong)


def _state(thing: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The attributes of a drafter, and of what it consists of."""
    seen = seen or set()
    seen.add(id(thing))
    for name, value in vars(thing).items():
        yield name, value
        for inner in value if isinstance(value, list) else [value]:
            if (
                type(inner).__module__.startswith("outrider.draft")
                and hasattr(inner, "__dict__")
                and id(inner) not in seen
            ):
                yield from _state(inner, seen)
