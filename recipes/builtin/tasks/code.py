"""Write, rename, document and edit Python functions; answers are checked by running them."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from types import FrameType
from typing import Any

from .check import Check, exactly, tidy
from .draw import Draw, OtherSplit, Turn, listed, words
from .functions import EXAMPLES, Example
from .functions.example import Tests

MAX_TRACE_EVENTS = 20_000
_SAFE = listed(
    "abs all any bool dict enumerate float int len list max min range reversed round set sorted str "
    "sum tuple zip"
)
ARGUMENTS = words(
    "x, y, z, value, data, item, values, first, second, left, right, source, target, given, entry,"
    " record, sequence, content, amount, argument, start, end, score, element"
)
NAMES = words(
    "compute, solve, helper, run_it, do_it, answer, get_result, process, calculate, transform,"
    " evaluate, my_function, handle, work, apply, convert, build, check, task, step, result_of, make,"
    " perform, use"
)


class TooLong(Exception):
    """Raised when checked code runs longer than MAX_TRACE_EVENTS."""


def run_function(text: str, name: str, tests: Tests) -> list[Any] | None:
    """Results of the function in `text`; None if it fails, imports, or runs too long."""
    if re.search(r"\b(import|open|exec|eval)\b|__", text):
        return None
    builtins = __builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)
    scope: dict[str, Any] = {"__builtins__": {n: builtins[n] for n in _SAFE}}
    left = MAX_TRACE_EVENTS

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooLong
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in a wrong answer
            exec(text, scope)
        return [scope[name](*copy.deepcopy(test)) for test in tests]
    except Exception:
        return None
    finally:
        sys.settrace(old)


def behaves_like(reference: str, name: str, tests: Tests) -> Check:
    """Accept a definition with the same first line that gives the same results."""
    head = reference.split("\n")[0]

    def check(text: str) -> bool:
        wanted = run_function(reference, name, tests)
        assert wanted is not None, reference
        return tidy(text).startswith(head + "\n") and run_function(text, name, tests) == wanted

    return check


def _new_arguments(d: Draw, example: Example) -> list[str]:
    """Other argument names, none of which the body uses for something else."""
    chosen = d.words(ARGUMENTS, len(example.arguments))
    if not example.free_of(chosen):
        raise OtherSplit
    return chosen


def function(d: Draw) -> list[Turn]:
    e = d.pick(EXAMPLES)
    name, arguments = e.name, list(e.arguments)
    own_name, own_arguments = d.chance(0.35), d.chance(0.5)
    if own_name:
        name = d.word(NAMES)
    if own_arguments or not own_name:
        arguments = _new_arguments(d, e)
        own_arguments = True
    description = d.pick(e.descriptions)
    d.hold(description, name, tuple(arguments))
    called = [f"call it {name}"] if own_name else []
    if own_arguments:
        called.append(f"use the argument{'s' * (len(arguments) > 1)} {', '.join(arguments)}")
    extra = " and ".join(called)
    prompt = (
        d.say(
            "Write a function to {a}.",
            "Write a Python function to {a}.",
            "Write Python code that can {a}.",
            "How do I {a} in Python?",
            "I need a Python function to {a}.",
            "Define a function to {a}.",
            "Please write a function to {a}.",
            "Show me Python code to {a}.",
            "Can you {a} in Python?",
            "Give me a short Python function to {a}.",
            a=description,
        )
        + f" {extra[0].upper()}{extra[1:]}."
    )
    text = e.source(name, arguments)
    return [Turn(prompt, text, behaves_like(text, name, e.tests))]


def rename(d: Draw) -> list[Turn]:
    e = d.pick(EXAMPLES)
    name, arguments = e.name, list(e.arguments)
    old_text = e.source()
    if d.chance(0.6):
        i = d.int(0, len(arguments) - 1)
        old, new, what = arguments[i], d.word(ARGUMENTS), "argument"
        new_arguments = [new if j == i else a for j, a in enumerate(arguments)]
        if new in arguments or re.search(rf"\b{new}\b", old_text):
            new_arguments[i] = new = f"{new}_{i + 1}"
        new_name, text = name, e.source(name, new_arguments)
    else:
        old, new_name, what = name, d.word(NAMES), "function"
        new, text = new_name, e.source(new_name, arguments)
    d.hold(name, old, new)
    prompt = d.say(
        "Rename the {w} {o} to {n}:\n{s}",
        "Change the name of the {w} {o} to {n}.\n{s}",
        "In this code, rename {o} to {n}:\n{s}",
        "{s}\n\nRename the {w} {o} to {n}.",
        "Please rename {o} to {n} in:\n{s}",
        "The {w} {o} should be called {n}. Rewrite the code:\n{s}",
        w=what,
        o=old,
        n=new,
        s=old_text,
    )
    check = behaves_like(text, new_name, e.tests)
    return [Turn(prompt, text, lambda given: check(given) and tidy(given) == text)]


def document(d: Draw) -> list[Turn]:
    e = d.pick(EXAMPLES)
    name, arguments = e.name, list(e.arguments)
    arguments = _new_arguments(d, e) if d.chance(0.7) else arguments
    d.hold(name, tuple(arguments))
    text = e.source(name, arguments)
    head, rest = text.split("\n", 1)
    sentence = e.descriptions[0][0].upper() + e.descriptions[0][1:] + "."
    prompt = d.say(
        "Add a docstring:\n{s}",
        "Add a docstring to this function:\n{s}",
        "Document this function:\n{s}",
        "{s}\n\nAdd a docstring to it.",
        "Write the docstring of this function:\n{s}",
        s=text,
    )
    answer = f'{head}\n    """{sentence}"""\n{rest}'
    return [Turn(prompt, answer, exactly(answer))]


def explain(d: Draw) -> list[Turn]:
    e = d.pick(EXAMPLES)
    name, arguments = e.name, list(e.arguments)
    arguments = _new_arguments(d, e)
    name = d.word(NAMES) if d.chance(0.5) else name
    d.hold(name, tuple(arguments))
    prompt = d.say(
        "What does this function do?\n{s}",
        "Explain this code:\n{s}",
        "What is this code for?\n{s}",
        "{s}\n\nWhat does it do?",
        "Describe the function in one sentence:\n{s}",
        s=e.source(name, arguments),
    )
    answer = f"The function {name} is used to {e.descriptions[0]}."
    return [Turn(prompt, answer, exactly(answer))]


def call(d: Draw) -> list[Turn]:
    """Add an example call that prints a result."""
    e = d.pick([x for x in EXAMPLES if len(x.arguments) < 3])
    name, arguments = e.name, list(e.arguments)
    arguments = _new_arguments(d, e) if d.chance(0.5) else arguments
    shown = ", ".join(repr(x) for x in d.pick(e.tests))
    d.hold(name, tuple(arguments), shown)
    text = e.source(name, arguments)
    prompt = d.say(
        "Print the result of {n}({v}) after this function:\n{s}",
        "Add a call that prints {n}({v}):\n{s}",
        "Append a line that prints {n}({v}).\n{s}",
        "{s}\n\nAdd a line that prints {n}({v}).",
        "Extend this code with a print of {n}({v}):\n{s}",
        n=name,
        v=shown,
        s=text,
    )
    answer = f"{text}\n\nprint({name}({shown}))"
    return [Turn(prompt, answer, exactly(answer))]
