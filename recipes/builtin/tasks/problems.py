"""Word problems with written working."""

from __future__ import annotations

from .arithmetic import working
from .check import concludes
from .draw import Draw, Turn
from .lexicon import JOBS, NAMES, PLACES, THINGS, plural, their, they


def _turn(prompt: str, lines: list[str], value: int) -> list[Turn]:
    return [Turn(prompt, "\n".join([*lines, f"The answer is {value}."]), concludes(value))]


def gain_and_loss(d: Draw) -> list[Turn]:
    a, b = d.words(NAMES, 2)
    things, x = d.word(THINGS), d.int(6, 99)
    y, z = d.int(1, x - 1), d.int(2, 60)
    d.hold(x, y, z)
    prompt = d.say(
        "{a} has {x} {t}. {They} gives {y} to {b} and buys {z} more. How many {t} does {a} have?",
        (
            "{a} has {x} {t}. {They} gives {b} {y} of them and then finds {z} more. How many {t} does"
            " {a} have now?"
        ),
        (
            "{a} owns {x} {t}. After giving {y} {t} to {b}, {a} gets {z} new ones. How many {t} does"
            " {a} have in the end?"
        ),
        "There are {x} {t} in a bag. {a} takes out {y} and {b} puts in {z}. How many {t} are in the bag?",
        "{a} starts with {x} {t}, loses {y} and wins {z}. How many {t} does {a} have?",
        "{a} had {x} {t}. {b} took {y} of them. Later {a} bought {z} {t}. How many {t} does {a} have?",
        a=a,
        b=b,
        t=things,
        x=x,
        y=y,
        z=z,
        They=they(a),
    )
    return _turn(prompt, [f"Start: {x}.", working(x, "-", y), working(x - y, "+", z)], x - y + z)


def together(d: Draw) -> list[Turn]:
    a, b = d.words(NAMES, 2)
    things, x, y = d.word(THINGS), d.int(2, 150), d.int(2, 150)
    d.hold(x, y)
    prompt = d.say(
        "{a} has {x} {t} and {b} has {y} {t}. How many {t} do they have together?",
        "{a} collected {x} {t}. {b} collected {y} {t}. How many {t} did they collect in total?",
        "If {a} has {x} {t} and {b} has {y}, how many {t} do they have altogether?",
        "{a} put {x} {t} on the table and {b} put {y} {t} there. How many {t} are on the table?",
        "There are {x} {t} in one box and {y} {t} in another box. How many {t} are there in all?",
        "{a} brings {x} {t}, {b} brings {y}. How many {t} is that?",
        a=a,
        b=b,
        t=things,
        x=x,
        y=y,
    )
    return _turn(prompt, [f"Add {x} and {y}.", working(x, "+", y)], x + y)


def difference(d: Draw) -> list[Turn]:
    a, b = d.words(NAMES, 2)
    things, y, gap = d.word(THINGS), d.int(2, 90), d.int(1, 90)
    x = y + gap
    d.hold(x, y)
    prompt = d.say(
        "{a} has {x} {t} and {b} has {y} {t}. How many more {t} does {a} have than {b}?",
        "{a} has {x} {t}. {b} has only {y}. How many more {t} does {a} have?",
        "{b} read {y} pages and {a} read {x} pages. How many more pages did {a} read?",
        "{a} had {x} {t} and now has {y}. How many {t} are gone?",
        "{a} needs {x} {t} and has {y}. How many {t} are missing?",
        "A shop had {x} {t}. It has {y} left. How many {t} were sold?",
        a=a,
        b=b,
        t=things,
        x=x,
        y=y,
    )
    return _turn(prompt, [f"Subtract {y} from {x}.", working(x, "-", y)], gap)


def groups(d: Draw) -> list[Turn]:
    a, things = d.word(NAMES), d.word(THINGS)
    n, m = (d.int(2, 12), d.int(2, 12)) if d.chance(0.6) else (d.int(2, 9), d.int(13, 60))
    d.hold(n, m)
    prompt = d.say(
        "{a} buys {n} packs. Each pack holds {m} {t}. How many {t} does {a} have?",
        "There are {n} shelves with {m} {t} on each shelf. How many {t} are there?",
        "{a} has {n} bags with {m} {t} in every bag. How many {t} is that in total?",
        "Each of {n} children has {m} {t}. How many {t} do they have together?",
        "{a} fills {n} jars with {m} {t} each. How many {t} does {They} use?",
        "{a} sells {m} {t} a day. How many {t} does {a} sell in {n} days?",
        a=a,
        t=things,
        n=n,
        m=m,
        They=they(a).lower(),
    )
    return _turn(prompt, [f"There are {n} groups of {m}.", working(n, "*", m)], n * m)


def share(d: Draw) -> list[Turn]:
    a, things = d.word(NAMES), d.word(THINGS)
    n, m = d.int(2, 9), d.int(2, 12) if d.chance(0.6) else d.int(13, 60)
    d.hold(n, m)
    prompt = d.say(
        "{a} shares {x} {t} equally among {n} friends. How many {t} does each friend get?",
        "{x} {t} are put into {n} boxes, the same number in each. How many {t} are in one box?",
        "{a} divides {x} {t} fairly between {n} children. How many {t} does every child get?",
        "{a} has {x} {t} and makes {n} equal piles. How many {t} are in each pile?",
        "There are {x} {t} for {n} people. How many {t} does each person get?",
        "{n} friends split {x} {t} evenly. How many {t} does each one get?",
        a=a,
        t=things,
        n=n,
        x=n * m,
    )
    return _turn(prompt, [f"Divide {n * m} by {n}.", working(n * m, "/", n)], m)


def change(d: Draw) -> list[Turn]:
    a, things = d.word(NAMES), d.word(THINGS)
    n, m = d.int(2, 9), d.int(2, 12)
    paid = n * m + d.int(1, 40)
    d.hold(n, m, paid)
    prompt = d.say(
        "A shop sells {t} for {m} dollars each. {a} buys {n} of them and pays with {p} dollars."
        " How much change does {a} get?",
        "{a} buys {n} {t} at {m} dollars each. {They} has {p} dollars. How much money is left?",
        (
            "One pack of {t} costs {m} dollars. {a} takes {n} packs and gives {p} dollars. How many"
            " dollars come back?"
        ),
        "{a} has {p} dollars and spends them on {n} {t} that cost {m} dollars each. How many dollars remain?",
        "{a} pays {p} dollars for {n} {t} at {m} dollars apiece. What is the change?",
        a=a,
        t=things,
        n=n,
        m=m,
        p=paid,
        They=they(a),
    )
    lines = [f"The price is {n} * {m}.", working(n, "*", m), working(paid, "-", n * m)]
    return _turn(prompt, lines, paid - n * m)


def distance(d: Draw) -> list[Turn]:
    a, h, v = d.word(NAMES), d.int(2, 9), d.int(4, 120)
    d.hold(h, v)
    prompt = d.say(
        "A train travels {v} kilometers per hour for {h} hours. How far does it travel?",
        "{a} drives {h} hours at {v} kilometers per hour. How many kilometers is that?",
        "A boat moves {v} kilometers every hour. How far does it get in {h} hours?",
        "How far does {a} get in {h} hours at a speed of {v} kilometers per hour?",
        "{a} rides at {v} kilometers per hour. What distance is that in {h} hours?",
        a=a,
        h=h,
        v=v,
    )
    return _turn(prompt, ["Distance is speed times time.", working(v, "*", h)], v * h)


def ages(d: Draw) -> list[Turn]:
    a, b = d.words(NAMES, 2)
    x, gap, years = d.int(5, 60), d.int(1, 20), d.int(2, 15)
    older = d.chance(0.5)
    if not older and gap >= x:
        gap = x - 1
    d.hold(x, gap, years, older)
    age = x + gap if older else x - gap
    prompt = d.say(
        "{a} is {x} years old. {b} is {g} {w}. How old will {b} be in {y}?",
        "{b} is {g} {w} than {a}, who is {x}. How old is {b} in {y}?",
        "{a} is {x} and {b} is {g} {w}. What is the age of {b} {y} from now?",
        "Today {a} is {x} years old and {b} is {g} {w}. How old is {b} after {y}?",
        "{b}, who is {g} {w} than {a}, wants to know how old {them} will be in {y}. {a} is {x}.",
        a=a,
        b=b,
        x=x,
        g=plural(gap, "year"),
        w="older" if older else "younger",
        y=plural(years, "year"),
        them=they(b).lower(),
    )
    lines = [f"{b} is now:", working(x, "+" if older else "-", gap), working(age, "+", years)]
    return _turn(prompt, lines, age + years)


def times_as_many(d: Draw) -> list[Turn]:
    a, b = d.words(NAMES, 2)
    things, x, k = d.word(THINGS), d.int(2, 12), d.int(2, 9)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}.get(k, f"{k} times")
    d.hold(x, k)
    prompt = d.say(
        "{b} has {x} {t}. {a} has {k} as many. How many {t} do they have together?",
        "{a} has {k} as many {t} as {b}. {b} has {x} {t}. How many {t} do both have together?",
        "{a} found {k} as many {t} as {b}, who found {x}. How many {t} did they find in all?",
        "{b} bought {x} {t} and {a} bought {k} as many. How many {t} is that in total?",
        "If {b} owns {x} {t} and {a} owns {k} as many, what is the total?",
        a=a,
        b=b,
        t=things,
        x=x,
        k=word,
    )
    lines = [f"{a} has {k} times {x}.", working(x, "*", k), working(x * k, "+", x)]
    return _turn(prompt, lines, x * k + x)


def saving(d: Draw) -> list[Turn]:
    a, job, place = d.word(NAMES), d.word(JOBS), d.word(PLACES)
    week, weeks, start = d.int(3, 40), d.int(2, 9), d.int(5, 99)
    d.hold(week, weeks, start)
    prompt = d.say(
        (
            "{a}, a {j}, has {s} dollars and saves {w} dollars every week. How many dollars does {a}"
            " have after {n} weeks?"
        ),
        "{a} saves {w} dollars a week for {n} weeks. {They} already had {s} dollars. How much money is that?",
        (
            "A {p} has {s} visitors in the morning and {w} more every hour. How many visitors came"
            " after {n} hours?"
        ),
        (
            "{a} starts with {s} dollars in {their} box and adds {w} dollars each day. How much is in"
            " it after {n} days?"
        ),
        (
            "With {s} dollars in hand, {a} earns {w} dollars a day. How many dollars does {a} have {n}"
            " days later?"
        ),
        a=a,
        j=job,
        p=place,
        s=start,
        w=week,
        n=weeks,
        They=they(a),
        their=their(a),
    )
    lines = [f"There are {weeks} times {week}.", working(week, "*", weeks), working(start, "+", week * weeks)]
    return _turn(prompt, lines, start + week * weeks)


MAKERS = (
    gain_and_loss,
    together,
    difference,
    groups,
    share,
    change,
    distance,
    ages,
    times_as_many,
    saving,
)


def problem(d: Draw) -> list[Turn]:
    return d.pick(MAKERS)(d)
