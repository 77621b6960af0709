"""JSON extraction, tables and lists in several formats, SQL and shell commands."""

from __future__ import annotations

import json
import re
import sqlite3
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


def extraction(d: Draw) -> list[Turn]:
    values: dict[str, Any] = {
        "name": d.word(NAMES), "age": d.int(18, 89), "city": d.word(CITIES), "job": d.word(JOBS), "color": d.pick(COLORS),
    }  # fmt: skip
    v = values
    sentence, keys = d.pick((
        (f"{v['name']} is {v['age']} years old and lives in {v['city']}.", ("name", "age", "city")),
        (f"{v['name']}, {an(v['job'])} from {v['city']}, is {v['age']} years old.", ("name", "job", "city", "age")),
        (f"My name is {v['name']}. I work as {an(v['job'])} in {v['city']}.", ("name", "job", "city")),
        (f"In {v['city']} there is {an(v['job'])} called {v['name']}.", ("city", "job", "name")),
        (f"{v['name']} likes {v['color']} and works as {an(v['job'])}.", ("name", "color", "job")),
        (f"At the age of {v['age']}, {v['name']} moved to {v['city']} to be {an(v['job'])}.",
         ("age", "name", "city", "job")),
        (f"The {v['job']} {v['name']} ({v['age']}) has a {v['color']} car.", ("job", "name", "age", "color")),
    ))  # fmt: skip
    chosen = sorted(d.picks(keys, d.int(2, len(keys))), key=lambda _: d.rng.random())
    d.hold(*(v[k] for k in keys))
    listed = ", ".join(chosen[:-1]) + " and " + chosen[-1]
    prompt = d.say(
        "Extract {k} as JSON: {s}", "Extract the {k} from this text as JSON: {s}", "Give me {k} as a JSON object. {s}",
        "{s}\nReturn {k} as JSON.", "Read the text and write {k} as JSON.\nText: {s}", "Turn into JSON with {k}: {s}",
        "Which {k} are in this sentence? Answer in JSON. {s}", k=listed, s=sentence,
    )  # fmt: skip
    value = {k: v[k] for k in chosen}
    turns = [Turn(prompt, json.dumps(value), json_equals(value))]
    if d.chance(0.25):
        key, new = d.pick(chosen), {"age": d.int(18, 89), "color": d.pick(COLORS)}
        changed = new.get(key) or d.word({"name": NAMES, "city": CITIES, "job": JOBS}[key])
        asked = d.say(
            "Change the {k} to {n}.", "Set {k} to {n}.", "Replace the {k} by {n}.", "Now make the {k} {n}.", k=key, n=changed
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
    draw = {"age": lambda: d.int(18, 89), "city": lambda: d.word(CITIES), "job": lambda: d.word(JOBS),
            "color": lambda: d.pick(COLORS), "points": lambda: d.int(1, 99)}  # fmt: skip
    return [{"name": n, **{k: draw[k]() for k in keys[1:]}} for n in names]


def tables(d: Draw) -> list[Turn]:
    rows = _rows(d)
    d.hold(rows)
    source, target = d.picks(FORMATS, 2)
    prompt = d.say(
        "Convert this {s} to a {t}:\n{x}", "Turn this {s} into a {t}:\n{x}", "Rewrite as a {t}:\n{x}",
        "{x}\n\nMake a {t} from this.", "Here is a {s}. Write it as a {t}.\n{x}", "Change the format to {t}:\n{x}",
        s=source, t=target, x=render(rows, source),
    )  # fmt: skip
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
        "{x}\n\nWhat is the {k} of {n}?", "Look at this {s} and tell me the {k} of {n}.\n{x}",
        "Which {k} does {n} have?\n{x}", "{x}\nGive me the {k} of {n}.", "Find the {k} of {n}:\n{x}",
        x=render(rows, shape), k=key, n=row["name"], s=shape,
    )  # fmt: skip
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
        "Make a {t}: {x}", "Turn this into a {t}:\n{x}", "Write as a {t}:\n{x}", "Convert to a {t}:\n{x}",
        "{x}\n\nChange this into a {t}.", "Please format as a {t}:\n{x}", t=target, x=shapes[source],
    )  # fmt: skip
    return [Turn(prompt, shapes[target], exactly(shapes[target]))]


TABLES = ("customers", "orders", "products", "employees", "students", "books", "members", "cities")
TEXT_FIELDS = ("name", "city", "title", "email")
NUMBER_FIELDS = ("age", "price", "salary", "points", "weight")


def _database() -> sqlite3.Connection:
    """Eight tables of nine rows with repeated and distinct values."""
    db = sqlite3.connect(":memory:")
    fields = [*TEXT_FIELDS, *NUMBER_FIELDS]
    for i, table in enumerate(TABLES):
        db.execute(f"CREATE TABLE {table} ({', '.join(fields)})")
        for row in range(9):
            texts = [CITIES.all[(row * 5 + i + j * 2) % len(CITIES.all)] if row < 8 else "Rome" for j in range(4)]
            numbers = [(row * 37 + i * 11 + j * 17 + (row % 3) * 5) % 100 for j in range(5)]
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(fields))})", [*texts, *numbers])
    return db


def query_result(text: str) -> Any:
    """Rows of a query, or all rows of its table after a change; None if it is not one valid statement."""
    db = _database()
    try:
        rows = db.execute(text.strip()).fetchall()
        table = re.search(r"\b(?:FROM|UPDATE|INTO) (\w+)", text)
        return rows, db.execute(f"SELECT * FROM {table[1]}").fetchall() if table else None
    except (sqlite3.Error, sqlite3.Warning):
        return None
    finally:
        db.close()


def sql(d: Draw) -> list[Turn]:
    t, c, f, n = d.pick(TABLES), d.pick(TEXT_FIELDS), d.pick(NUMBER_FIELDS), d.int(1, 99)
    g, place, m = d.pick([x for x in NUMBER_FIELDS if x != f]), d.word(CITIES), d.int(2, 8)
    asked, text = d.pick((
        (f"list the {c} of all {t}", f"SELECT {c} FROM {t};"),
        (f"list {c} and {f} of all {t}", f"SELECT {c}, {f} FROM {t};"),
        (f"count all {t}", f"SELECT COUNT(*) FROM {t};"),
        (f"count the {t} where {f} is less than {n}", f"SELECT COUNT(*) FROM {t} WHERE {f} < {n};"),
        (f"list the {c} of all {t} where {f} is greater than {n}", f"SELECT {c} FROM {t} WHERE {f} > {n};"),
        (f"list all {t} where {c} is {place}", f"SELECT * FROM {t} WHERE {c} = '{place}';"),
        (f"list all {t} sorted by {f}", f"SELECT * FROM {t} ORDER BY {f};"),
        (f"list all {t} sorted by {f}, the highest first", f"SELECT * FROM {t} ORDER BY {f} DESC;"),
        (f"show the {m} {t} with the highest {f}", f"SELECT * FROM {t} ORDER BY {f} DESC LIMIT {m};"),
        (f"show the average {f} of {t}", f"SELECT AVG({f}) FROM {t};"),
        (f"show the highest {f} of {t}", f"SELECT MAX({f}) FROM {t};"),
        (f"show the lowest {f} of {t}", f"SELECT MIN({f}) FROM {t};"),
        (f"show the total {f} of {t}", f"SELECT SUM({f}) FROM {t};"),
        (f"show the average {f} of {t} for each {c}", f"SELECT {c}, AVG({f}) FROM {t} GROUP BY {c};"),
        (f"delete all {t} where {f} is less than {n}", f"DELETE FROM {t} WHERE {f} < {n};"),
        (f"set {f} to {n} for all {t} where {c} is {place}", f"UPDATE {t} SET {f} = {n} WHERE {c} = '{place}';"),
        (f"list the {c} of {t} where {f} is between {n} and {n + m}",
         f"SELECT {c} FROM {t} WHERE {f} BETWEEN {n} AND {n + m};"),
        (f"list the {c} of {t} where {f} is greater than {n} and {g} is less than {n + m}",
         f"SELECT {c} FROM {t} WHERE {f} > {n} AND {g} < {n + m};"),
        (f"list the different values of {c} in {t}", f"SELECT DISTINCT {c} FROM {t};"),
    ))  # fmt: skip
    d.hold(text)
    prompt = d.say(
        "Write an SQL query to {a}.", "How do I {a} in SQL?", "SQL: {a}", "Give me the SQL to {a}.",
        "Write SQL that can {a}.", "I want to {a}. Which SQL query do I need?", "Use SQL to {a}.", a=asked,
    )  # fmt: skip

    def values_and_names(query: str) -> tuple[list[str], set[str]]:
        return re.findall(r"'.*?'|\d+", query), set(re.findall(r"[a-z]+", query))

    def check(given: str) -> bool:
        # Results alone would accept another column where no row is found.
        return values_and_names(given) == values_and_names(text) and query_result(given) == query_result(text)

    return [Turn(prompt, text, check)]


SHELL = tuple(
    tuple(x.split(" = "))
    for x in (
        "list all files = ls -la;show the current directory = pwd;create a directory called {w} = mkdir {w};"
        "delete the file {w}.txt = rm {w}.txt;delete the folder {w} = rm -r {w};copy {w}.txt to {v}.txt = cp {w}.txt {v}.txt;"
        "copy the folder {w} to {v} = cp -r {w} {v};rename {w}.txt to {v}.txt = mv {w}.txt {v}.txt;"
        "move {w}.txt to the folder {v} = mv {w}.txt {v}/;show the last {n} lines of {w}.log = tail -n {n} {w}.log;"
        "show the first {n} lines of {w}.log = head -n {n} {w}.log;count the lines in {w}.txt = wc -l {w}.txt;"
        "count the words in {w}.txt = wc -w {w}.txt;search for {v} in {w}.txt = grep {v} {w}.txt;"
        'search for {v} in all files = grep -r {v} .;find all Python files = find . -name "*.py";'
        'find all files that end in .{w} = find . -name "*.{w}";show free disk space = df -h;'
        "show running processes = ps aux;compress the folder {w} = tar -czf {w}.tar.gz {w};"
        "extract {w}.tar.gz = tar -xzf {w}.tar.gz;download a page from {w}.com = curl https://{w}.com;"
        "sort the lines of {w}.txt = sort {w}.txt;make {w}.sh executable = chmod +x {w}.sh;"
        "show the content of {w}.txt = cat {w}.txt;go to the folder {w} = cd {w};show the size of {w} = du -sh {w};"
        "stop the process {n} = kill {n};create an empty file {w}.txt = touch {w}.txt;"
        "remove repeated lines from {w}.txt = sort -u {w}.txt;compare {w}.txt and {v}.txt = diff {w}.txt {v}.txt;"
        "replace {w} by {v} in {w}.txt = sed -i 's/{w}/{v}/g' {w}.txt"
    ).split(";")
)


def shell(d: Draw) -> list[Turn]:
    about, command = d.pick(SHELL)
    w, v = d.words(COMMON, 2)
    values = {"w": w, "v": v, "n": d.int(2, 99)}
    about, command = about.format(**values), command.format(**values)
    if "{" in about or not re.search(r"\d", command):
        d.hold(about) if w in about else d.hold(about, d.int(0, 10**6))
    else:
        d.hold(about)
    prompt = d.say(
        "Which command do I use to {a}?", "How do I {a} in the shell?", "Shell command to {a}?",
        "What is the command to {a}?", "Give me a shell command to {a}.", "How can I {a} on the command line?",
        "I want to {a} in a terminal. What do I type?", a=about,
    )  # fmt: skip
    return [Turn(prompt, command, exactly(command))]


HTML_TAGS = words("p, h1, h2, li, em, strong, div, span, td, th, code, title")


def markup(d: Draw) -> list[Turn]:
    tag, text = d.word(HTML_TAGS), " ".join(d.words(COMMON, d.int(1, 4)))
    d.hold(tag, text)
    answer = f"<{tag}>{text}</{tag}>"
    if d.chance(0.6):
        prompt = d.say(
            "Put this in a {t} tag: {x}", "Wrap in <{t}>: {x}", "Write {x} as an HTML {t} element.",
            "HTML {t} element with the text {x}?", "Mark up {x} with the tag {t}.", t=tag, x=text,
        )  # fmt: skip
        return [Turn(prompt, answer, exactly(answer))]
    prompt = d.say(
        "Remove the tags: {x}", "Strip the HTML from {x}", "Give me the text of {x}",
        "Which text is inside {x}?", "Delete the HTML tags in {x}", x=answer,
    )  # fmt: skip
    return [Turn(prompt, text, lambda given: tidy(given) == text)]
