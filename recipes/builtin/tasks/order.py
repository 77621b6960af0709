"""Sorting, counting and finding the largest of a list."""

from __future__ import annotations

from .check import concludes, exactly, last_line
from .draw import Draw, Turn
from .lexicon import COLORS, COMMON, FRUITS, NAMES


def _selection(numbers: list[int], down: bool) -> str:
    """Selection sort: every line shows what is left and the number that is taken."""
    left, lines = list(numbers), []
    while len(left) > 1:
        best = max(left) if down else min(left)
        lines.append(f"{', '.join(map(str, left))}: take {best}")
        left.remove(best)
    return "\n".join([*lines, f"Sorted: {', '.join(map(str, sorted(numbers, reverse=down)))}"])


def sort_numbers(d: Draw) -> list[Turn]:
    numbers = d.picks(range(1, d.pick((30, 100, 100, 1000))), d.int(3, 7))
    down = d.chance(0.4)
    d.hold(tuple(numbers))
    listed = ", ".join(map(str, numbers))
    if down:
        prompt = d.say(
            "Sort these numbers from largest to smallest: {s}",
            "Put in descending order: {s}",
            "Order these numbers, the largest first: {s}",
            "Arrange {s} from high to low.",
            "Sort {s} in descending order.",
            s=listed,
        )
    else:
        prompt = d.say(
            "Sort these numbers: {s}",
            "Sort these numbers from smallest to largest: {s}",
            "Put in ascending order: {s}",
            "Order these numbers, the smallest first: {s}",
            "Arrange {s} from low to high.",
            "Sort {s} in ascending order.",
            s=listed,
        )
    text = _selection(numbers, down)
    turns = [Turn(prompt, text, last_line(text.split("\n")[-1]))]
    if d.chance(0.25):
        best = min(numbers) if d.chance(0.5) else max(numbers)
        word = "smallest" if best == min(numbers) else "largest"
        asked = d.say("Which one is the {w}?", "And the {w}?", "What is the {w} number?", w=word)
        reply = f"The {word} number is {best}."
        turns.append(Turn(asked, reply, exactly(reply)))
    return turns


def sort_words(d: Draw) -> list[Turn]:
    chosen = d.picks(COMMON.all, d.int(3, 6))
    d.hold(tuple(chosen))
    prompt = d.say(
        "Sort these words alphabetically: {s}",
        "Put in alphabetical order: {s}",
        "Alphabetize: {s}",
        "Order these words from A to Z: {s}",
        "Arrange alphabetically: {s}",
        s=", ".join(chosen),
    )
    text = ", ".join(sorted(chosen, key=str.lower))
    return [Turn(prompt, text, exactly(text))]


def count_items(d: Draw) -> list[Turn]:
    kinds = d.picks(COLORS if d.chance(0.5) else FRUITS.train, d.int(2, 4))
    items = [d.pick(kinds) for _ in range(d.int(4, 10))]
    wanted = d.pick(items)
    d.hold(tuple(items))
    prompt = d.say(
        "How many times does {w} appear? {s}",
        "Count the word {w} in this list: {s}",
        "How often do you see {w} here: {s}",
        "Count {w}: {s}",
        "In the list {s}, how many times is {w}?",
        s=", ".join(items),
        w=wanted,
    )
    marks, count = [], 0
    for item in items:
        count += item == wanted
        marks.append(f"{item} {count}" if item == wanted else item)
    return [Turn(prompt, f"{', '.join(marks)}\nThe answer is {count}.", concludes(count))]


def extremes(d: Draw) -> list[Turn]:
    names = d.words(NAMES, d.int(3, 6))
    scores = d.picks(range(1, 100), len(names))
    d.hold(tuple(scores))
    most = d.chance(0.6)
    best = max(scores) if most else min(scores)
    winner = names[scores.index(best)]
    listed = ", ".join(f"{n} {s}" for n, s in zip(names, scores))
    word = "most" if most else "fewest"
    prompt = d.say(
        "Points: {s}. Who has the {w} points?",
        "Who scored the {w} points? {s}",
        "Here are the points: {s}. Who got the {w}?",
        "{s}. Tell me who has the {w} points.",
        "Look at the points of each player: {s}. Which player has the {w}?",
        s=listed,
        w=word,
    )
    text = f"{winner} has the {word} points: {best}."
    turns = [Turn(prompt, text, exactly(text))]
    if d.chance(0.4):
        i = d.int(0, len(names) - 1)
        asked = d.say("How many points does {n} have?", "And {n}?", "What about {n}?", n=names[i])
        reply = f"{names[i]} has {scores[i]} points."
        turns.append(Turn(asked, reply, exactly(reply)))
    return turns
