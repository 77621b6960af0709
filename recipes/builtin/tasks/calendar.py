"""Weekdays, months, dates, clock times and units."""

from __future__ import annotations

from .arithmetic import working
from .check import concludes, exactly
from .draw import Draw, Turn
from .lexicon import DAYS, MONTH_DAYS, MONTHS, plural


def _steps(names: tuple[str, ...], start: int, count: int, sign: int) -> str:
    op = "+" if sign > 0 else "-"
    return "\n".join(f"{op} {i}: {names[(start + sign * i) % len(names)]}" for i in range(1, count + 1))


def weekday(d: Draw) -> list[Turn]:
    start, days, sign = d.int(0, 6), d.int(1, 20), 1 if d.chance(0.7) else -1
    d.hold(start, days, sign)
    word = "after" if sign > 0 else "before"
    count = plural(days, "day")
    prompt = d.say(
        "Which day comes {c} {w} {d}?",
        "What day is it {c} {w} {d}?",
        "Which weekday is {c} {w} {d}?",
        "Tell me the day {c} {w} {d}.",
        "Name the day of the week {c} {w} {d}.",
        c=count,
        w=word,
        d=DAYS[start],
    )
    rest = days % 7
    lines = [f"{days} / 7 = {days // 7} rest {rest}"] if days > 7 else []
    rest = days if days < 7 else rest
    if days == 7:
        lines.append("7 days are one week.")
    lines += [_steps(DAYS, start, rest, sign)] if rest else []
    answer = DAYS[(start + sign * days) % 7]
    return [Turn(prompt, "\n".join([*lines, f"The answer is {answer}."]), concludes(answer))]


def month(d: Draw) -> list[Turn]:
    start, count, sign = d.int(0, 11), d.int(1, 9), 1 if d.chance(0.7) else -1
    d.hold(start, count, sign)
    word = "after" if sign > 0 else "before"
    prompt = d.say(
        "Which month comes {c} {w} {m}?",
        "What month is it {c} {w} {m}?",
        "Name the month {c} {w} {m}.",
        "Tell me which month is {c} {w} {m}.",
        "{m} is this month. Which month is {c} {w} that?",
        c=plural(count, "month"),
        w=word,
        m=MONTHS[start],
    )
    answer = MONTHS[(start + sign * count) % 12]
    return [Turn(prompt, f"{_steps(MONTHS, start, count, sign)}\nThe answer is {answer}.", concludes(answer))]


def date_after(d: Draw) -> list[Turn]:
    i = d.int(0, 11)
    name, day, days = MONTHS[i], d.int(1, MONTH_DAYS[MONTHS[i]]), d.int(2, 28)
    d.hold(i, day, days)
    prompt = d.say(
        "What date is {n} days after {d} {m}?",
        "Which date comes {n} days after {d} {m}?",
        "Add {n} days to {d} {m}.",
        "It is {d} {m}. What is the date in {n} days?",
        "If today is {d} {m}, what date is it {n} days later?",
        n=days,
        d=day,
        m=name,
    )
    size, total = MONTH_DAYS[name], day + days
    lines = [working(day, "+", days), f"{name} has {size} days."]
    if total > size:
        lines.append(working(total, "-", size))
        total, name = total - size, MONTHS[(i + 1) % 12]
    answer = f"{total} {name}"
    return [Turn(prompt, "\n".join([*lines, f"The answer is {answer}."]), concludes(answer))]


def days_in_month(d: Draw) -> list[Turn]:
    a, b = d.picks(MONTHS, 2)
    d.hold(a, b)
    prompt = d.say(
        "How many days are there in {a} and {b} together?",
        "How many days do {a} and {b} have?",
        "Add the days of {a} and {b}.",
        "What is the number of days in {a} plus {b}?",
        a=a,
        b=b,
    )
    x, y = MONTH_DAYS[a], MONTH_DAYS[b]
    lines = f"{a} has {x} days.\n{b} has {y} days.\n{working(x, '+', y)}\nThe answer is {x + y}."
    return [Turn(prompt, lines, concludes(x + y))]


def date_format(d: Draw) -> list[Turn]:
    i, year = d.int(0, 11), d.int(1900, 2099)
    day = d.int(1, MONTH_DAYS[MONTHS[i]])
    d.hold(i, day, year)
    spelled, iso = f"{day} {MONTHS[i]} {year}", f"{year}-{i + 1:02}-{day:02}"
    german, american = f"{day:02}.{i + 1:02}.{year}", f"{i + 1:02}/{day:02}/{year}"
    source, (target, shape) = (
        d.pick((spelled, german)),
        d.pick(((iso, "YYYY-MM-DD"), (american, "MM/DD/YYYY"))),
    )
    if d.chance(0.3):
        source, target, shape = iso, german, "DD.MM.YYYY"
    prompt = d.say(
        "Write the date {s} as {f}.",
        "Convert {s} to the format {f}.",
        "Format {s} as {f}.",
        "Rewrite {s} in the form {f}.",
        "Date {s} in {f} format?",
        s=source,
        f=shape,
    )
    return [Turn(prompt, target, exactly(target))]


def clock(d: Draw) -> list[Turn]:
    h, m, add = d.int(1, 22), d.pick(range(0, 60, 5)), d.pick(range(5, 60, 5))
    d.hold(h, m, add)
    prompt = d.say(
        "What time is it {a} minutes after {h}:{m:02}?",
        "It is {h}:{m:02}. What time is it in {a} minutes?",
        "Add {a} minutes to {h}:{m:02}.",
        "A film starts at {h}:{m:02} and takes {a} minutes. When does it end?",
        "A bus leaves at {h}:{m:02} and arrives {a} minutes later. When does it arrive?",
        h=h,
        m=m,
        a=add,
    )
    lines, total, hour = [working(m, "+", add)], m + add, h
    if total >= 60:
        total, hour = total - 60, h + 1
        lines += [working(m + add, "-", 60), working(h, "+", 1)]
    answer = f"{hour}:{total:02}"
    return [Turn(prompt, "\n".join([*lines, f"The answer is {answer}."]), concludes(answer))]


def half_day(d: Draw) -> list[Turn]:
    h, m = d.int(0, 23), d.int(0, 59)
    d.hold(h, m)
    long, short = f"{h:02}:{m:02}", f"{(h - 1) % 12 + 1}:{m:02} {'am' if h < 12 else 'pm'}"
    if d.chance(0.5):
        prompt = d.say(
            "Write {t} as a 12-hour time.",
            "Convert {t} to am or pm.",
            "What is {t} on a 12-hour clock?",
            "Give {t} in 12-hour format.",
            "How do you say {t} with am or pm?",
            t=long,
        )
        return [Turn(prompt, short, exactly(short))]
    prompt = d.say(
        "Write {t} as a 24-hour time.",
        "Convert {t} to 24-hour format.",
        "What is {t} on a 24-hour clock?",
        "Give {t} in 24-hour format.",
        "How do you write {t} without am or pm?",
        t=short,
    )
    return [Turn(prompt, long, exactly(long))]


FACTORS = (
    ("kilometers", "meters", 1000),
    ("meters", "centimeters", 100),
    ("kilograms", "grams", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("liters", "milliliters", 1000),
    ("centimeters", "millimeters", 10),
    ("tons", "kilograms", 1000),
    ("feet", "inches", 12),
    ("dollars", "cents", 100),
    ("dozens", "pieces", 12),
)


def units(d: Draw) -> list[Turn]:
    big, small, factor = d.pick(FACTORS)
    n = d.int(2, 9) if factor in (7, 12, 24) else d.int(2, 99)
    down = d.chance(0.7)
    d.hold(big, n, down)
    if down:
        prompt = d.say(
            "How many {s} are {n} {b}?",
            "Convert {n} {b} to {s}.",
            "{n} {b} are how many {s}?",
            "Change {n} {b} into {s}.",
            "What is {n} {b} in {s}?",
            "Express {n} {b} in {s}.",
            n=n,
            b=big,
            s=small,
        )
        steps = f"{n} * {factor} = {n * factor}"
        if factor in (7, 12, 24, 60):
            steps = _product(factor, n)
        text = (
            f"1 {big[:-1] if big != 'feet' else 'foot'} is {factor} {small}.\n{steps}\nThe answer is"
            f" {n * factor} {small}."
        )
        return [Turn(prompt, text, concludes(f"{n * factor} {small}"))]
    prompt = d.say(
        "How many {b} are {n} {s}?",
        "Convert {n} {s} to {b}.",
        "{n} {s} are how many {b}?",
        "Change {n} {s} into {b}.",
        "What is {n} {s} in {b}?",
        "Express {n} {s} in {b}.",
        n=n * factor,
        b=big,
        s=small,
    )
    text = (
        f"1 {big[:-1] if big != 'feet' else 'foot'} is {factor} {small}.\n{n * factor} / {factor} ="
        f" {n}\nThe answer is {n} {big}."
    )
    return [Turn(prompt, text, concludes(f"{n} {big}"))]


def _product(factor: int, n: int) -> str:
    """Multiply by a two-digit number: ones and tens of `n` apart where both are there."""
    if n < 10:
        return working(factor, "*", n)
    tens, ones = n // 10 * 10, n % 10
    first = f"{factor} * {tens // 10} = {factor * tens // 10}\n{factor} * {tens} = {factor * tens}"
    if not ones:
        return first
    second = working(factor, "*", ones)
    third = working(factor * tens, "+", factor * ones)
    return f"{first}\n{second}\n{third}\n{factor} * {n} = {factor * n}"
