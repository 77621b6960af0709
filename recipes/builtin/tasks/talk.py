"""Memory of what was said, stories, small talk, and changes of the grammatical person."""

from __future__ import annotations

from .check import both, exactly, mentions
from .draw import Draw, Turn
from .lexicon import (
    CITIES,
    COLORS,
    DAYS,
    JOBS,
    NAMES,
    PLACES,
    THINGS,
    WEATHER,
    an,
    female,
    joined,
    their,
    they,
)


def memory(d: Draw) -> list[Turn]:
    """Statements about oneself that later turns ask for."""
    name, city, job = d.word(NAMES), d.word(CITIES), d.word(JOBS)
    color, age, pet = d.pick(COLORS), d.int(18, 89), d.word(NAMES)
    d.hold(name, city, age)
    facts = {
        "name": (f"my name is {name}", "What is my name?", f"Your name is {name}."),
        "city": (f"I live in {city}", "Where do I live?", f"You live in {city}."),
        "job": (f"I work as {an(job)}", "What is my job?", f"You work as {an(job)}."),
        "color": (
            f"my favorite color is {color}",
            "What is my favorite color?",
            f"Your favorite color is {color}.",
        ),
        "age": (f"I am {age} years old", "How old am I?", f"You are {age} years old."),
        "pet": (f"my dog is called {pet}", "What is my dog called?", f"Your dog is called {pet}."),
    }
    told = d.picks(list(facts), d.int(2, 4))
    listed = joined([facts[k][0] for k in told])
    prompt = d.say(
        "Hello, {t}.",
        "Hi! Please remember: {t}.",
        "{T}. Can you remember that?",
        "Let me tell you something: {t}.",
        "Good morning, {t}.",
        t=listed,
        T=listed[0].upper() + listed[1:],
    )
    greeting = (
        f"Nice to meet you, {name}. I will remember that." if "name" in told else "I will remember that."
    )
    turns = [Turn(prompt, greeting, exactly(greeting))]
    for key in d.picks(told, d.int(1, len(told))):
        turns.append(Turn(facts[key][1], facts[key][2], exactly(facts[key][2])))
    missing = [k for k in facts if k not in told]
    if d.chance(0.3):
        turns.append(
            Turn(
                facts[d.pick(missing)][1], "You have not told me that.", exactly("You have not told me that.")
            )
        )
    return turns


_START = (
    "Once upon a time there was {aj} called {a}, who lived in {c}.",
    "{a} was {aj} in {c} and had a good friend called {b}.",
    "In the city of {c} lived {aj} with the name {a}.",
    "Long ago, {a} and {b} lived next to each other in {c}.",
)
_WISH = (
    "One {w} {d}, {a} found {n} {t} in front of the door.",
    "Every {d}, {a} went to the {p} to look at the {t} there.",
    "{a} had {n} {t} and kept them in a {k} box.",
    "One day {a} wanted to bring {n} {t} to the {p}.",
)
_TROUBLE = (
    "But on a {w} morning all the {t} were gone.",
    'Then {b} came and said, "I have lost my {t}. Can you help me?"',
    "On the way it grew dark, and {a} could not find the way back.",
    "But {b} had no {t} at all and was very sad.",
)
_TURN = (
    "{a} looked under the table, behind the door and in the garden.",
    "{a} asked everyone in {c}, but nobody knew anything.",
    "So {a} took a lamp and walked to the {p}.",
    "{a} thought about it for a long time and had an idea.",
)
_END = (
    'There {b} was waiting with a smile. "Here you are," said {b}. "I kept your {t} safe." From'
    " that day on they were"
    " the best of friends.",
    (
        'In the end {a} gave half of the {t} to {b}. "Thank you," said {b}, and they played together'
        " until the evening."
    ),
    (
        'At last {a} and {b} found the {t} at the {p}. "This was a good day," said {a}, and they went'
        " home together."
    ),
)


def story(d: Draw) -> list[Turn]:
    (a, b), c, job = d.words(NAMES, 2), d.word(CITIES), d.word(JOBS)
    values = {
        "a": a,
        "b": b,
        "c": c,
        "aj": an(job),
        "t": d.word(THINGS),
        "n": d.int(3, 30),
        "w": d.pick(WEATHER),
        "d": d.pick(DAYS),
        "p": d.word(PLACES),
        "k": d.pick(COLORS),
    }
    d.hold(a, b, c, job)
    text = " ".join(d.pick(part) for part in (_START, _WISH, _TROUBLE, _TURN, _END)).format(**values)
    prompt = d.say(
        "Tell me a story about {a}, {j} in {c}, and {b}. It should have {t} in it.",
        "Write a short story about {a}, {j} from {c}, with {b} and some {t}.",
        "Tell a story with {a} ({j}, {c}), {b} and {t}.",
        "I would like a story about {a}, {j} in {c}, {b} and their {t}.",
        "Please invent a story: {a} is {j} in {c}, {b} is a friend, and there are {t}.",
        a=a,
        b=b,
        c=c,
        j=an(job),
        t=values["t"],
    )
    turns = [Turn(prompt, text, both(mentions(a, b, c, values["t"], sentences=(5, 12))))]
    if d.chance(0.25):
        reply = f"The story is about {a} and {b}."
        asked = d.say("Who is in the story?", "Who is the story about?", "Which people are in it?")
        turns.append(Turn(asked, reply, exactly(reply)))
    return turns


_ABOUT = "I am a small language model. I know short tasks and little of the world."
_ABILITIES = (
    "I can calculate, sort, translate short sentences, write small programs and answer questions on a text."
)


def smalltalk(d: Draw) -> list[Turn]:
    """A greeting with a name, then questions about the model, thanks or a farewell."""
    name, city = d.word(NAMES), d.word(CITIES)
    d.hold(name, city)
    prompt = d.say(
        "Hello, I am {n} from {c}.",
        "Hi! This is {n} in {c}.",
        "Good morning, {n} here, from {c}.",
        "Hey, I am {n} and I live in {c}.",
        "Good evening! I am {n}, from {c}.",
        n=name,
        c=city,
    )
    reply = f"Hello {name}! How can I help you?"
    turns = [Turn(prompt, reply, exactly(reply))]
    others = [
        (("Who are you?", "What are you?", "Tell me who you are.", "Are you a person?"), _ABOUT),
        (
            ("What can you do?", "How can you help me?", "What are you good at?", "What do you know?"),
            _ABILITIES,
        ),
        (
            ("Thank you!", "Thanks a lot.", "Thanks!", "That helped a lot, cheers."),
            f"You are welcome, {name}.",
        ),
        (("Bye!", "Goodbye.", "See you!", "That was all, goodbye."), f"Goodbye, {name}!"),
    ]
    for wordings, answer in d.picks(others, d.int(1, 3)):
        turns.append(Turn(d.say(*wordings), answer, exactly(answer)))
    return turns


def third_person(d: Draw) -> list[Turn]:
    """Change the subject of short sentences: "I have my book" for a named person."""
    name, things, place, day = d.word(NAMES), d.word(THINGS), d.word(PLACES), d.pick(DAYS)
    n, job, city = d.int(2, 90), d.word(JOBS), d.word(CITIES)
    d.hold(name, things, n)
    own, he = their(name), they(name)
    parts = [
        (f"I have {n} {things}.", f"{name} has {n} {things}.", f"{he} has {n} {things}."),
        (f"I work as {an(job)}.", f"{name} works as {an(job)}.", f"{he} works as {an(job)}."),
        (
            f"I live in {city} with my family.",
            f"{name} lives in {city} with {own} family.",
            f"{he} lives in {city} with {own} family.",
        ),
        (
            f"On {day} I go to the {place}.",
            f"On {day} {name} goes to the {place}.",
            f"On {day} {he.lower()} goes to the {place}.",
        ),
        ("I like my work.", f"{name} likes {own} work.", f"{he} likes {own} work."),
    ]
    chosen = d.picks(parts, d.int(1, 3))
    source = " ".join(p[0] for p in chosen)
    target = " ".join(p[1] if i == 0 else p[2] for i, p in enumerate(chosen))
    gender = "woman" if female(name) else "man"
    prompt = d.say(
        "Rewrite about {n} (a {g}) instead of me: {s}",
        "Put this in the third person. The name is {n} (a {g}). {s}",
        "{s}\nRewrite this text about {n}, a {g}.",
        "Change I to {n} (a {g}): {s}",
        "Tell this as if {n}, a {g}, had done it: {s}",
        n=name,
        s=source,
        g=gender,
    )
    return [Turn(prompt, target, exactly(target))]
