"""SQL queries and shell commands."""

from __future__ import annotations

import re
import sqlite3
from typing import Any

from .check import exactly
from .draw import Draw, OtherSplit, Turn
from .lexicon import CITIES, COMMON

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
            texts = [
                CITIES.all[(row * 5 + i + j * 2) % len(CITIES.all)] if row < 8 else "Rome" for j in range(4)
            ]
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


def _query(d: Draw) -> tuple[str, str]:
    """A request in English and its query."""
    t, c, f, n = d.pick(TABLES), d.pick(TEXT_FIELDS), d.pick(NUMBER_FIELDS), d.int(1, 99)
    g, place, m = d.pick([x for x in NUMBER_FIELDS if x != f]), d.word(CITIES), d.int(2, 8)
    return d.pick(
        (
            (f"list the {c} of all {t}", f"SELECT {c} FROM {t};"),
            (f"list {c} and {f} of all {t}", f"SELECT {c}, {f} FROM {t};"),
            (f"count all {t}", f"SELECT COUNT(*) FROM {t};"),
            (f"count the {t} where {f} is less than {n}", f"SELECT COUNT(*) FROM {t} WHERE {f} < {n};"),
            (
                f"list the {c} of all {t} where {f} is greater than {n}",
                f"SELECT {c} FROM {t} WHERE {f} > {n};",
            ),
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
            (
                f"set {f} to {n} for all {t} where {c} is {place}",
                f"UPDATE {t} SET {f} = {n} WHERE {c} = '{place}';",
            ),
            (
                f"list the {c} of {t} where {f} is between {n} and {n + m}",
                f"SELECT {c} FROM {t} WHERE {f} BETWEEN {n} AND {n + m};",
            ),
            (
                f"list the {c} of {t} where {f} is greater than {n} and {g} is less than {n + m}",
                f"SELECT {c} FROM {t} WHERE {f} > {n} AND {g} < {n + m};",
            ),
            (f"list the different values of {c} in {t}", f"SELECT DISTINCT {c} FROM {t};"),
        )
    )


def sql(d: Draw) -> list[Turn]:
    asked, text = _query(d)
    d.hold(text)
    prompt = d.say(
        "Write an SQL query to {a}.",
        "How do I {a} in SQL?",
        "SQL: {a}",
        "Give me the SQL to {a}.",
        "Write SQL that can {a}.",
        "I want to {a}. Which SQL query do I need?",
        "Use SQL to {a}.",
        a=asked,
    )

    def values_and_names(query: str) -> tuple[list[str], set[str]]:
        return re.findall(r"'.*?'|\d+", query), set(re.findall(r"[a-z]+", query))

    def check(given: str) -> bool:
        # Results alone would accept another column where no row is found.
        return values_and_names(given) == values_and_names(text) and query_result(given) == query_result(text)

    return [Turn(prompt, text, check)]


SHELL = (
    ("list all files", "ls -la"),
    ("show the current directory", "pwd"),
    ("create a directory called {w}", "mkdir {w}"),
    ("delete the file {w}.txt", "rm {w}.txt"),
    ("delete the folder {w}", "rm -r {w}"),
    ("copy {w}.txt to {v}.txt", "cp {w}.txt {v}.txt"),
    ("copy the folder {w} to {v}", "cp -r {w} {v}"),
    ("rename {w}.txt to {v}.txt", "mv {w}.txt {v}.txt"),
    ("move {w}.txt to the folder {v}", "mv {w}.txt {v}/"),
    ("show the last {n} lines of {w}.log", "tail -n {n} {w}.log"),
    ("show the first {n} lines of {w}.log", "head -n {n} {w}.log"),
    ("count the lines in {w}.txt", "wc -l {w}.txt"),
    ("count the words in {w}.txt", "wc -w {w}.txt"),
    ("search for {v} in {w}.txt", "grep {v} {w}.txt"),
    ("search for {v} in all files", "grep -r {v} ."),
    ("find all Python files", 'find . -name "*.py"'),
    ("find all files that end in .{w}", 'find . -name "*.{w}"'),
    ("show free disk space", "df -h"),
    ("show running processes", "ps aux"),
    ("compress the folder {w}", "tar -czf {w}.tar.gz {w}"),
    ("extract {w}.tar.gz", "tar -xzf {w}.tar.gz"),
    ("download a page from {w}.com", "curl https://{w}.com"),
    ("sort the lines of {w}.txt", "sort {w}.txt"),
    ("make {w}.sh executable", "chmod +x {w}.sh"),
    ("show the content of {w}.txt", "cat {w}.txt"),
    ("go to the folder {w}", "cd {w}"),
    ("show the size of {w}", "du -sh {w}"),
    ("stop the process {n}", "kill {n}"),
    ("create an empty file {w}.txt", "touch {w}.txt"),
    ("remove repeated lines from {w}.txt", "sort -u {w}.txt"),
    ("compare {w}.txt and {v}.txt", "diff {w}.txt {v}.txt"),
    ("replace {w} by {v} in {w}.txt", "sed -i 's/{w}/{v}/g' {w}.txt"),
)


def shell(d: Draw) -> list[Turn]:
    about, command = d.pick(SHELL)
    w, v = d.words(COMMON, 2)
    values = {"w": w, "v": v, "n": d.int(2, 99)}
    if "{" in about:
        d.hold(about.format(**values))
    elif d.split == "values":  # nothing in it can be held out
        raise OtherSplit
    about, command = about.format(**values), command.format(**values)
    prompt = d.say(
        "Which command do I use to {a}?",
        "How do I {a} in the shell?",
        "Shell command to {a}?",
        "What is the command to {a}?",
        "Give me a shell command to {a}.",
        "How can I {a} on the command line?",
        "I want to {a} in a terminal. What do I type?",
        a=about,
    )
    return [Turn(prompt, command, exactly(command))]
