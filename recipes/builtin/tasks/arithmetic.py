"""Sums, differences, products, quotients, comparisons, series and number words.

Working is written column by column from the ones, so that every carry follows from the line before it.
"""

from __future__ import annotations

from .check import both, concludes, equations_hold, exactly, last_line
from .draw import Draw, OtherSplit, Turn
from .lexicon import in_words


def add_steps(a: int, b: int) -> list[str]:
    """Column addition: one line a digit, carry as the last summand."""
    lines, carry = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        terms = [int(s[i]) for s in (x, y) if i < len(s)] + ([carry] if carry else [])
        carry = sum(terms) // 10
        lines.append(" + ".join(map(str, terms)) + (f" = {sum(terms)}" if len(terms) > 1 else ""))
    return lines


def subtract_steps(a: int, b: int) -> list[str]:
    """Column subtraction: ten is borrowed where the upper digit is too small."""
    lines, borrow = [], 0
    x, y = str(a)[::-1], str(b)[::-1]
    for i, digit in enumerate(x):
        lower = int(y[i]) if i < len(y) else 0
        upper = int(digit) - borrow
        text = digit + (" - 1" if borrow else "")
        if upper < lower:
            upper, text = upper + 10, f"10 + {text}"
        borrow = int(upper > int(digit) - borrow)
        lines.append(f"{text} - {lower} = {upper - lower}" if " " in text or i < len(y) else text)
    return lines


def multiply_steps(a: int, b: int) -> list[str]:
    """Column multiplication by one digit."""
    lines, carry = [], 0
    for digit in reversed(str(a)):
        value = int(digit) * b + carry
        lines.append(f"{digit} * {b}" + (f" + {carry}" if carry else "") + f" = {value}")
        carry = value // 10
    return lines


def divide_steps(a: int, b: int) -> list[str]:
    """Long division by one digit: the remainder is carried into the next line."""
    lines, rest = [], 0
    for digit in str(a):
        value = rest * 10 + int(digit)
        rest = value % b
        lines.append(f"{value} / {b} = {value // b} rest {rest}")
    return lines


def working(a: int, op: str, b: int) -> str:
    """The working of a calculation and its result line; short calculations have the result line only."""
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]
    lines: list[str] = []
    if op == "+" and max(a, b) > 9:
        lines = add_steps(a, b)
    elif op == "-" and a > 19:
        lines = subtract_steps(a, b)
    elif op == "*" and (a > 12 or b > 12):
        lines = multiply_steps(max(a, b), min(a, b))
    elif op == "/" and (a > 99 or a // b > 12):
        lines = divide_steps(a, b)
    return "\n".join([*lines, f"{a} {op} {b} = {value}"])


def _calculate(d: Draw, a: int, op: str, b: int, names: tuple[str, ...]) -> list[Turn]:
    d.hold(a, op, b)
    asked = d.say(
        "What is {a} {op} {b}?",
        "Calculate {a} {op} {b}.",
        "{a} {op} {b} = ?",
        "How much is {a} {op} {b}?",
        "Compute {a} {op} {b}.",
        "{a} {op} {b}",
        "Can you work out {a} {op} {b}?",
        "Please solve {a} {op} {b}.",
        "Give me the result of {a} {op} {b}.",
        "Work out {a} {op} {b} step by step.",
        *names,
        a=a,
        b=b,
        op=op,
    )
    text = working(a, op, b)
    return [Turn(asked, text, last_line(text.split("\n")[-1]))]


def _number(d: Draw, digits: int) -> int:
    return d.int(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def addition(d: Draw) -> list[Turn]:
    a, b = _number(d, d.pick((1, 2, 2, 2, 3, 3, 4))), _number(d, d.pick((1, 2, 2, 2, 3, 3, 4)))
    return _calculate(d, a, "+", b, ("Add {a} and {b}.", "What do you get if you add {b} to {a}?"))


def subtraction(d: Draw) -> list[Turn]:
    a, b = _number(d, d.pick((1, 2, 2, 2, 3, 3, 4))), _number(d, d.pick((1, 2, 2, 2, 3, 3)))
    a, b = max(a, b), min(a, b)
    return _calculate(d, a, "-", b, ("Subtract {b} from {a}.", "Take {b} away from {a}."))


def multiplication(d: Draw) -> list[Turn]:
    if d.chance(0.5):
        a, b = d.int(2, 12), d.int(2, 12)
    else:
        a, b = _number(d, d.pick((2, 2, 3))), d.int(2, 9)
    return _calculate(d, a, "*", b, ("Multiply {a} by {b}.", "What is the product of {a} and {b}?"))


def division(d: Draw) -> list[Turn]:
    b = d.int(2, 9)
    a = b * (d.int(2, 12) if d.chance(0.5) else d.int(13, 160))
    return _calculate(d, a, "/", b, ("Divide {a} by {b}.", "How many times does {b} go into {a}?"))


def compare(d: Draw) -> list[Turn]:
    size = d.pick((1, 2, 2, 3, 3, 4))
    a, b = _number(d, size), _number(d, size if d.chance(0.7) else d.int(1, 4))
    if a == b:
        b = a + 1
    d.hold(min(a, b), max(a, b))
    big, small = max(a, b), min(a, b)
    if d.chance(0.5):
        asked = d.say(
            "Which number is larger, {a} or {b}?",
            "Which is bigger: {a} or {b}?",
            "Is {a} or {b} greater?",
            "Compare {a} and {b}. Which one is larger?",
            "Tell me the larger of {a} and {b}.",
            a=a,
            b=b,
        )
        text = f"{big} is larger than {small}."
    else:
        asked = d.say(
            "Which number is smaller, {a} or {b}?",
            "Which is less: {a} or {b}?",
            "Is {a} or {b} smaller?",
            "Compare {a} and {b}. Which one is smaller?",
            "Tell me the smaller of {a} and {b}.",
            a=a,
            b=b,
        )
        text = f"{small} is smaller than {big}."
    return [Turn(asked, text, exactly(text))]


def series(d: Draw) -> list[Turn]:
    step, start, shown = d.int(1, 12), d.int(1, 60), d.int(4, 6)
    up = d.chance(0.7)
    sign = 1 if up else -1
    if not up:
        start += step * (shown + 1)
    d.hold(step, start, up)
    numbers = [start + sign * step * i for i in range(shown)]
    following = numbers[-1] + sign * step
    asked = d.say(
        "What comes next? {s}",
        "Continue the series: {s}",
        "Which number comes next in {s}?",
        "Find the next number: {s}, ...",
        "Here is a pattern: {s}. What is the next number?",
        s=", ".join(map(str, numbers)),
    )
    op = "+" if up else "-"
    pair = (numbers[1], numbers[0]) if up else (numbers[0], numbers[1])
    text = (
        f"The step is {pair[0]} - {pair[1]} = {step}.\n{numbers[-1]} {op} {step} = {following}.\n"
        f"The answer is {following}."
    )
    return [Turn(asked, text, concludes(following))]


def number_words(d: Draw) -> list[Turn]:
    n = d.int(0, 999) if d.chance(0.7) else d.int(10, 99)
    way = d.chance(0.5)
    d.hold(n)
    if way:
        asked = d.say(
            "Write {n} in words.",
            "How do you write the number {n} in words?",
            "Spell out the number {n}.",
            "What is {n} in words?",
            "Put the number {n} into words.",
            n=n,
        )
        return [Turn(asked, in_words(n), exactly(in_words(n)))]
    asked = d.say(
        "Write {n} in digits.",
        "Which number is {n}?",
        "Write the number {n} with digits.",
        "What is {n} in digits?",
        "Turn {n} into digits.",
        n=in_words(n),
    )
    return [Turn(asked, str(n), exactly(str(n)))]


def average(d: Draw) -> list[Turn]:
    count, mean = d.int(2, 4), d.int(3, 40)
    numbers = [d.int(1, 2 * mean) for _ in range(count - 1)]
    numbers.append(mean * count - sum(numbers))
    if numbers[-1] < 1:
        raise OtherSplit
    d.rng.shuffle(numbers)
    d.hold(tuple(numbers))
    asked = d.say(
        "What is the average of {s}?",
        "Calculate the mean of {s}.",
        "Find the average: {s}",
        "Give me the mean of these numbers: {s}",
        "What do {s} come to on average?",
        s=", ".join(map(str, numbers)),
    )
    lines, total = [], numbers[0]
    for n in numbers[1:]:
        lines.append(working(total, "+", n))
        total += n
    lines.append(f"There are {count} numbers.\n{working(total, '/', count)}\nThe answer is {mean}.")
    return [Turn(asked, "\n".join(lines), both(concludes(mean), equations_hold))]
