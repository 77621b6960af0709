"""Questions on a context, retrieval from long contexts, summaries, headlines and messages."""

from __future__ import annotations

from .check import exactly
from .draw import Draw, Turn
from .lexicon import (
    CITIES,
    COMMON,
    DAYS,
    JOBS,
    MONTHS,
    NAMES,
    PLACES,
    THINGS,
    WEATHER,
    an,
)


def _place_facts(d: Draw) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sentences about a place, each with questions and answers."""
    city, place, (p, q) = d.word(CITIES), d.word(PLACES), d.words(NAMES, 2)
    opens, closes, guests = d.int(6, 11), d.int(15, 22), d.int(10, 900)
    year, day, price, rooms = d.int(1850, 2010), d.pick(DAYS), d.int(2, 40), d.int(2, 60)
    facts = [
        (
            f"It was built in {year} by {p}.",
            [
                (f"When was the {place} built?", f"The {place} was built in {year}."),
                (f"Who built the {place}?", f"{p} built the {place}."),
            ],
        ),
        (
            f"About {guests} people visit it every day.",
            [
                (
                    f"How many people visit the {place} every day?",
                    f"About {guests} people visit the {place} every day.",
                )
            ],
        ),
        (
            f"It is closed on {day}.",
            [
                (f"On which day is the {place} closed?", f"The {place} is closed on {day}."),
                (f"When can I not visit the {place}?", f"The {place} is closed on {day}."),
            ],
        ),
        (
            f"Its director is {q}.",
            [
                (f"Who is the director of the {place}?", f"The director of the {place} is {q}."),
                (f"Who leads the {place}?", f"The director of the {place} is {q}."),
            ],
        ),
        (
            f"A ticket costs {price} dollars.",
            [
                (f"How much is a ticket for the {place}?", f"A ticket costs {price} dollars."),
                ("What does a ticket cost?", f"A ticket costs {price} dollars."),
            ],
        ),
        (
            f"It has {rooms} rooms.",
            [(f"How many rooms does the {place} have?", f"The {place} has {rooms} rooms.")],
        ),
    ]
    first = (
        f"The {place} in {city} opens at {opens} and closes at {closes}.",
        [
            (f"When does the {place} open?", f"The {place} opens at {opens}."),
            (f"When does the {place} close?", f"The {place} closes at {closes}."),
            (f"In which city is the {place}?", f"The {place} is in {city}."),
        ],
    )
    d.hold(opens, closes, guests, year, price)
    return [first, *d.picks(facts, d.int(1, 5))]


def context(d: Draw) -> list[Turn]:
    facts = _place_facts(d)
    text = " ".join(sentence for sentence, _ in facts)
    asked = d.picks([pair for _, pairs in facts for pair in pairs], d.pick((1, 1, 2)))
    prompt = d.say(
        "Answer from the context.\nContext: {c}\nQuestion: {q}",
        "Read the text and answer.\n{c}\n{q}",
        "{c}\n\n{q}",
        "Use this text to answer the question.\nText: {c}\nQuestion: {q}",
        "{q}\nHere is what I know: {c}",
        "Text: {c}\n\nAccording to the text: {q}",
        c=text,
        q=asked[0][0],
    )
    turns = [Turn(prompt, asked[0][1], exactly(asked[0][1]))]
    return turns + [Turn(q, a, exactly(a)) for q, a in asked[1:]]


def retrieval(d: Draw) -> list[Turn]:
    """One entry out of a long list of entries."""
    count = d.int(6, 24)
    names = d.words(NAMES, count)
    way = d.pick(("code", "phone", "room", "key"))
    if way == "key":
        labels = [f"{d.word(COMMON)}-{d.int(1, 99)}" for _ in range(count)]
        values = [str(d.int(100, 99_999)) for _ in range(count)]
        text = "\n".join(f"{k} = {v}" for k, v in zip(labels, values))
        if len(set(labels)) < count:
            labels = [f"{k}{i}" for i, k in enumerate(labels)]
            text = "\n".join(f"{k} = {v}" for k, v in zip(labels, values))
    else:
        labels = names
        values = [
            f"{d.int(100, 999)}-{d.int(1000, 9999)}" if way == "phone" else str(d.int(10, 9999))
            for _ in names
        ]
        text = " ".join(f"The {way} of {n} is {v}." for n, v in zip(labels, values))
    i = d.int(0, count - 1)
    d.hold(labels[i], values[i])
    what = "value" if way == "key" else way
    prompt = d.say(
        "{t}\n\nWhat is the {w} of {n}?",
        "Remember this:\n{t}\nNow tell me the {w} of {n}.",
        "Find the {w} of {n} in this text.\n{t}",
        "Which {w} belongs to {n}?\n{t}",
        "{t}\nLook up the {w} of {n}.",
        t=text,
        w=what,
        n=labels[i],
    )
    answer = f"The {what} of {labels[i]} is {values[i]}."
    turns = [Turn(prompt, answer, exactly(answer))]
    if d.chance(0.4):
        j = d.int(0, count - 1)
        asked = d.say("And of {n}?", "What about {n}?", "Now the {w} of {n}, please.", n=labels[j], w=what)
        reply = f"The {what} of {labels[j]} is {values[j]}."
        turns.append(Turn(asked, reply, exactly(reply)))
    return turns


def summary(d: Draw) -> list[Turn]:
    (p, q), city, day, place = d.words(NAMES, 2), d.word(CITIES), d.pick(DAYS), d.word(PLACES)
    things, n, w, job = d.word(THINGS), d.int(3, 60), d.pick(WEATHER), d.word(JOBS)
    d.hold(p, q, things, n)
    text, brief = d.pick(
        (
            (
                f"On {day}, {p} went to the {place} in {city}. The weather was {w} and many people"
                f" were there. {p} wanted to"
                f" buy {things} for {q}. After a while {p} found a small shop and bought {n}"
                f" {things}. Then {p} went home and"
                f" gave them to {q}, who was very happy.",
                f"On {day}, {p} bought {n} {things} at the {place} in {city} for {q}.",
            ),
            (
                f"{q} was waiting at home. It was a {w} {day} in {city}. {p} had promised to bring"
                f" {things}, and so {p} walked"
                f" to the {place}. There {p} bought {n} {things} and carried them home to {q}.",
                f"On {day}, {p} bought {n} {things} at the {place} in {city} for {q}.",
            ),
            (
                f"{p} has worked as {an(job)} in {city} for {n} years. Every day starts early and"
                f" ends late. Last {day}, {p}"
                f" told {q} about a new plan. {p} wants to leave the job and open a small {place}."
                f" {q} liked the plan and"
                f" offered to help.",
                f"{p}, {an(job)} in {city}, wants to open a {place} with the help of {q}.",
            ),
            (
                f"The team met on {day}. First {p} spoke about the {place} in {city}. It needs {n}"
                f" new {things}, and they are"
                f" expensive. Then {q} asked for more time. In the end all agreed to decide next week.",
                (
                    f"On {day}, {p} and {q} talked about {n} {things} for the {place} in {city} and put"
                    " off the decision."
                ),
            ),
            (
                f"Visitors of the {place} in {city} were surprised on {day}. {p}, {an(job)}, had"
                f" lost {n} {things} there. All"
                f" of them helped to search. At last {q} found the {things} behind a door.",
                f"On {day}, {q} found the {n} {things} that {p} had lost at the {place} in {city}.",
            ),
        )
    )
    prompt = d.say(
        "Summarize in one sentence: {t}",
        "Summarize: {t}",
        "Give a short summary.\n{t}",
        "What is this text about?\n{t}",
        "Write a one-sentence summary of this text:\n{t}",
        "{t}\n\nSummarize this.",
        "Sum up in a sentence: {t}",
        t=text,
    )
    return [Turn(prompt, brief, exactly(brief))]


def headline(d: Draw) -> list[Turn]:
    p, city, place, n = d.word(NAMES), d.word(CITIES), d.word(PLACES), d.int(2, 95)
    day, month = d.int(1, 28), d.pick(MONTHS)
    d.hold(p, city, n)
    text, title = d.pick(
        (
            (
                f"A new {place} opened in {city} on {day} {month}. {p} paid {n} million dollars for it.",
                f"New {place} opens in {city}",
            ),
            (
                (
                    f"After {n} years, the {place} in {city} will close. The owner, {p}, said so on"
                    f" {day} {month}."
                ),
                f"{place.capitalize()} in {city} closes after {n} years",
            ),
            (
                f"On {day} {month}, {p} won a race in {city}. There were {n} runners.",
                f"{p} wins race in {city}",
            ),
        )
    )
    prompt = d.say(
        "Write a headline: {t}",
        "Give this text a title.\n{t}",
        "Find a headline for this news:\n{t}",
        "{t}\n\nWhat is a good headline?",
        "Which title fits?\n{t}",
        t=text,
    )
    return [Turn(prompt, title, exactly(title))]


def email(d: Draw) -> list[Turn]:
    (a, b), day, h, place = d.words(NAMES, 2), d.pick(DAYS), d.int(8, 19), d.word(PLACES)
    things, n = d.word(THINGS), d.int(2, 60)
    d.hold(a, b, day, h)
    about, middle, subject = d.pick(
        (
            (
                f"a meeting on {day} at {h} at the {place}",
                f"I would like to meet you on {day} at {h} at the {place}. Please tell me if this suits you.",
                f"Meeting on {day}",
            ),
            (
                f"an order of {n} {things} for {day}",
                f"I would like to order {n} {things}. Please deliver them on {day}.",
                f"Order of {n} {things}",
            ),
            (
                f"a delay until {day} at {h}",
                f"I am sorry, but I will be late. I will arrive on {day} at {h}.",
                "Delay",
            ),
            (
                f"thanks for {n} {things} that came on {day}",
                f"Thank you very much for the {n} {things}. They arrived on {day}.",
                "Thank you",
            ),
            (
                f"an invitation to dinner on {day} at {h}",
                f"I would like to invite you to dinner on {day} at {h}. I hope that you can come.",
                "Invitation to dinner",
            ),
        )
    )
    prompt = d.say(
        "Write an email from {a} to {b} about {x}.",
        "Write a short email to {b} about {x}. Sign it with {a}.",
        "Draft an email: from {a}, to {b}, about {x}.",
        "{a} wants to write to {b} about {x}. Write the email.",
        "Compose an email to {b} from {a} about {x}.",
        a=a,
        b=b,
        x=about,
    )
    text = f"Subject: {subject}\n\nDear {b},\n\n{middle}\n\nBest regards,\n{a}"
    turns = [Turn(prompt, text, exactly(text))]
    if d.chance(0.3):
        new = d.pick([x for x in DAYS if x != day])
        if day in text:
            asked = d.say(
                "Change the day to {n}.", "Make it {n}.", "Please use {n}.", "Move it to {n}.", n=new
            )
            turns.append(Turn(asked, text.replace(day, new), exactly(text.replace(day, new))))
    return turns
