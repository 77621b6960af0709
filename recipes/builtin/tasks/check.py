"""Predicates that accept right answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

Check = Callable[[str], bool]
_EQUATION = re.compile(r"(?<![\d.])([\d.][\d. +*/-]*?) = (\d+(?:\.\d+)?)(?![\d.]*\d)")
_TERM = re.compile(r"\d+(?:\.\d+)?|[+*/-]")


def tidy(text: str) -> str:
    """The text without trailing blanks and blank ends."""
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def exactly(*answers: str) -> Check:
    """Accept any of the answers, apart from trailing blanks."""
    wanted = {tidy(a) for a in answers}
    return lambda text: tidy(text) in wanted


def concludes(value: object) -> Check:
    """Accept text that ends with "The answer is <value>." and whose equations all hold."""
    ending = f"The answer is {value}."
    return lambda text: tidy(text).endswith(ending) and equations_hold(text)


def last_line(line: str) -> Check:
    """Accept text with this last line whose equations all hold."""
    return lambda text: tidy(text).split("\n")[-1] == line and equations_hold(text)


def mentions(*parts: str, sentences: tuple[int, int] = (1, 100)) -> Check:
    """Accept text that has every part as a whole word and a number of sentences in the given range."""

    def check(text: str) -> bool:
        count = len(re.findall(r"[.!?](?=\s|\"|$)", text))
        found = all(re.search(rf"(?<!\w){re.escape(p)}(?!\w)", text) for p in parts)
        return found and sentences[0] <= count <= sentences[1] and text.rstrip()[-1:] in '.!?"'

    return check


def both(*checks: Check) -> Check:
    return lambda text: all(c(text) for c in checks)


def equations_hold(text: str) -> bool:
    """True if every equation `terms = number` in the text is right; `rest` gives a remainder."""
    for line in text.split("\n"):
        for match in _EQUATION.finditer(line):
            terms = match[1].strip()
            rest = re.match(r" rest (\d+)", line[match.end() :])
            if rest:
                top, bottom = (int(x) for x in terms.split(" / "))
                if (int(match[2]), int(rest[1])) != divmod(top, bottom):
                    return False
            elif _value(terms) not in (None, Fraction(match[2])):
                return False
    return True


def _value(terms: str) -> Fraction | None:
    """Value of a flat expression with * and / before + and -; None if it is not one."""
    tokens = _TERM.findall(terms)
    if "".join(tokens) != terms.replace(" ", "") or len(tokens) % 2 == 0:
        return None
    total, sign, product = Fraction(0), 1, Fraction(tokens[0])
    for op, number in zip(tokens[1::2], tokens[2::2]):
        if op in "*/":
            if op == "/" and Fraction(number) == 0:
                return None
            product = product * Fraction(number) if op == "*" else product / Fraction(number)
        else:
            total, sign, product = total + sign * product, 1 if op == "+" else -1, Fraction(number)
    return total + sign * product
