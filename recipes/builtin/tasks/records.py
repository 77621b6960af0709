"""JSON extraction, tables and lists in several formats, HTML tags."""

from __future__ import annotations

import json
from typing import Any

from .check import Check, exactly, tidy
from .draw import Draw, Turn, words
from .lexicon import CITIES, COLORS, COMMON, FRUITS, JOBS, NAMES, THINGS, an

FORMATS = ("CSV", "Markdown table", "JSON list", "bullet list")
COLUMNS = ("name", "age", "city", "job", "color", "points")


def json_equals(value: Any) -> Check:
    def check(text: str) -> bool:
        try:
            return bool(json.loads(text) == value)
        except ValueError:
            return False

    return check


def _person(d: Draw) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Values of a person, a sentence about them, and the keys that it tells."""
    values: dict[str, Any] = {
        "name": d.word(NAMES),
        "age": d.int(18, 89),
        "city": d.word(CITIES),
        "job": d.word(JOBS),
        "color": d.pick(COLORS),
    }
    v = values
    sentence, keys = d.pick(
        (
            (f"{v['name']} is {v['age']} years old and lives in {v['city']}.", ("name", "age", "city")),
            (
                f"{v['name']}, {an(v['job'])} from {v['city']}, is {v['age']} years old.",
                ("name", "job", "city", "age"),
            ),
            (f"My name is {v['name']}. I work as {an(v['job'])} in {v['city']}.", ("name", "job", "city")),
            (f"In {v['city']} there is {an(v['job'])} called {v['name']}.", ("city", "job", "name")),
            (f"{v['name']} likes {v['color']} and works as {an(v['job'])}.", ("name", "color", "job")),
            (
                f"At the age of {v['age']}, {v['name']} moved to {v['city']} to be {an(v['job'])}.",
                ("age", "name", "city", "job"),
            ),
            (
                f"The {v['job']} {v['name']} ({v['age']}) has a {v['color']} car.",
                ("job", "name", "age", "color"),
            ),
        )
    )
    return values, sentence, keys


def extraction(d: Draw) -> list[Turn]:
    v, sentence, keys = _person(d)
    chosen = sorted(d.picks(keys, d.int(2, len(keys))), key=lambda _: d.rng.random())
    d.hold(*(v[k] for k in keys))
    listed = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    prompt = d.say(
        "Extract {k} as JSON: {s}",
        "Extract the {k} from this text as JSON: {s}",
        "Give me {k} as a JSON object. {s}",
        "{s}\nReturn {k} as JSON.",
        "Read the text and write {k} as JSON.\nText: {s}",
        "Turn into JSON with {k}: {s}",
        "Which {k} are in this sentence? Answer in JSON. {s}",
        k=listed,
        s=sentence,
    )
    value = {k: v[k] for k in chosen}
    turns = [Turn(prompt, json.dumps(value), json_equals(value))]
    if d.chance(0.25):
        key, new = d.pick(chosen), {"age": d.int(18, 89), "color": d.pick(COLORS)}
        changed = new.get(key) or d.word({"name": NAMES, "city": CITIES, "job": JOBS}[key])
        asked = d.say(
            "Change the {k} to {n}.",
            "Set {k} to {n}.",
            "Replace the {k} by {n}.",
            "Now make the {k} {n}.",
            k=key,
            n=changed,
        )
        other = {**value, key: changed}
        turns.append(Turn(asked, json.dumps(other), json_equals(other)))
    return turns


def render(rows: list[dict[str, Any]], shape: str) -> str:
    """The records in one of FORMATS."""
    keys = list(rows[0])
    if shape == "CSV":
        return "\n".join([",".join(keys), *(",".join(str(r[k]) for k in keys) for r in rows)])
    if shape == "Markdown table":
        lines = [f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
        return "\n".join([*lines, *(f"| {' | '.join(str(r[k]) for k in keys)} |" for r in rows)])
    if shape == "JSON list":
        return json.dumps(rows)
    return "\n".join("- " + ", ".join(f"{k}: {r[k]}" for k in keys) for r in rows)


def _rows(d: Draw) -> list[dict[str, Any]]:
    keys = ["name", *d.picks(COLUMNS[1:], d.int(1, 3))]
    names = d.words(NAMES, d.int(2, 5))
    draw = {
        "age": lambda: d.int(18, 89),
        "city": lambda: d.word(CITIES),
        "job": lambda: d.word(JOBS),
        "color": lambda: d.pick(COLORS),
        "points": lambda: d.int(1, 99),
    }
    return [{"name": n, **{k: draw[k]() for k in keys[1:]}} for n in names]


def tables(d: Draw) -> list[Turn]:
    rows = _rows(d)
    d.hold(rows)
    source, target = d.picks(FORMATS, 2)
    prompt = d.say(
        "Convert this {s} to a {t}:\n{x}",
        "Turn this {s} into a {t}:\n{x}",
        "Rewrite as a {t}:\n{x}",
        "{x}\n\nMake a {t} from this.",
        "Here is a {s}. Write it as a {t}.\n{x}",
        "Change the format to {t}:\n{x}",
        s=source,
        t=target,
        x=render(rows, source),
    )
    text = render(rows, target)
    turns = [Turn(prompt, text, json_equals(rows) if target == "JSON list" else exactly(text))]
    if d.chance(0.25) and target != "JSON list":
        key = d.pick(list(rows[0])[1:])
        less = [{k: v for k, v in r.items() if k != key} for r in rows]
        asked = d.say("Now without the {k}.", "Remove the {k}.", "Leave out the {k}.", "Drop {k}.", k=key)
        turns.append(Turn(asked, render(less, target), exactly(render(less, target))))
    return turns


def table_lookup(d: Draw) -> list[Turn]:
    rows = _rows(d)
    shape, row = d.pick(FORMATS), d.pick(rows)
    key = d.pick(list(row)[1:])
    d.hold(rows, key)
    prompt = d.say(
        "{x}\n\nWhat is the {k} of {n}?",
        "Look at this {s} and tell me the {k} of {n}.\n{x}",
        "Which {k} does {n} have?\n{x}",
        "{x}\nGive me the {k} of {n}.",
        "Find the {k} of {n}:\n{x}",
        x=render(rows, shape),
        k=key,
        n=row["name"],
        s=shape,
    )
    text = f"The {key} of {row['name']} is {row[key]}."
    return [Turn(prompt, text, exactly(text))]


def lists(d: Draw) -> list[Turn]:
    items = d.words(d.pick((COMMON, THINGS, CITIES, FRUITS)), d.int(3, 6) if d.split != "values" else 3)
    d.hold(*items)
    shapes = {
        "comma-separated list": ", ".join(items),
        "numbered list": "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)),
        "bullet list": "\n".join(f"- {x}" for x in items),
        "JSON array": json.dumps(items),
        "list with one item a line": "\n".join(items),
    }
    source, target = d.picks(list(shapes), 2)
    prompt = d.say(
        "Make a {t}: {x}",
        "Turn this into a {t}:\n{x}",
        "Write as a {t}:\n{x}",
        "Convert to a {t}:\n{x}",
        "{x}\n\nChange this into a {t}.",
        "Please format as a {t}:\n{x}",
        t=target,
        x=shapes[source],
    )
    return [Turn(prompt, shapes[target], exactly(shapes[target]))]


HTML_TAGS = words("p, h1, h2, li, em, strong, div, span, td, th, code, title", replaceable=False)


def markup(d: Draw) -> list[Turn]:
    tag, text = d.word(HTML_TAGS), " ".join(d.words(COMMON, d.int(1, 4)))
    d.hold(tag, text)
    answer = f"<{tag}>{text}</{tag}>"
    if d.chance(0.6):
        prompt = d.say(
            "Put this in a {t} tag: {x}",
            "Wrap in <{t}>: {x}",
            "Write {x} as an HTML {t} element.",
            "HTML {t} element with the text {x}?",
            "Mark up {x} with the tag {t}.",
            t=tag,
            x=text,
        )
        return [Turn(prompt, answer, exactly(answer))]
    prompt = d.say(
        "Remove the tags: {x}",
        "Strip the HTML from {x}",
        "Give me the text of {x}",
        "Which text is inside {x}?",
        "Delete the HTML tags in {x}",
        x=answer,
    )
    return [Turn(prompt, text, lambda given: tidy(given) == text)]
