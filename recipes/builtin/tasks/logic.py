"""Small logic puzzles, categories, and facts with one right answer."""

from __future__ import annotations

from itertools import pairwise

from .check import concludes, exactly
from .draw import Draw, OtherSplit, Turn, pairs
from .lexicon import ANIMALS, CITIES, COLORS, FRUITS, JOBS, NAMES, TOOLS, an, joined

ORDERS = (
    ("taller", "tallest", "shortest"),
    ("older", "oldest", "youngest"),
    ("faster", "fastest", "slowest"),
    ("stronger", "strongest", "weakest"),
    ("heavier", "heaviest", "lightest"),
)


def ordering(d: Draw) -> list[Turn]:
    """Who is the tallest: pairwise statements, in any order, that give one chain."""
    names = d.words(NAMES, d.int(3, 4))
    word, most, least = d.pick(ORDERS)
    clues = [f"{a} is {word} than {b}." for a, b in pairwise(names)]
    d.rng.shuffle(clues)
    d.hold(tuple(names))
    top = d.chance(0.5)
    prompt = d.say(
        "{c} Who is the {w}?",
        "{c} Which of them is the {w}?",
        "Who is the {w}? {c}",
        "Solve the puzzle: {c} Who is the {w}?",
        "Given: {c} Name the {w}.",
        c=" ".join(clues),
        w=most if top else least,
    )
    answer = names[0] if top else names[-1]
    text = f"In order from {most} to {least}: {', '.join(names)}.\nThe answer is {answer}."
    return [Turn(prompt, text, concludes(answer))]


def assignment(d: Draw) -> list[Turn]:
    """Three people and three colours: two are known, the third follows."""
    names, colors = d.words(NAMES, 3), d.picks(COLORS, 3)
    d.hold(tuple(names), tuple(colors))
    clues = [f"{names[0]} has the {colors[0]} one.", f"{names[1]} does not have the {colors[2]} one."]
    d.rng.shuffle(clues)
    listed = d.picks(colors, 3)
    i = d.int(1, 2)
    prompt = d.say(
        "{n} each have a ball. The balls are {k}. {c} Which ball does {w} have?",
        "There are three hats: {k}. {n} take one each. {c} Which one does {w} have?",
        "{n} each own one of three cups ({k}). {c} What color is the cup of {w}?",
        "{n} each choose a card: {k}. {c} Which card is with {w}?",
        n=joined(names),
        k=joined(listed),
        c=" ".join(clues),
        w=names[i],
    )
    text = (
        f"{names[0]} has {colors[0]}. {colors[1].capitalize()} and {colors[2]} are left.\n"
        f"{names[1]} does not have {colors[2]}, so {names[1]} has {colors[1]} and {names[2]} has"
        f" {colors[2]}.\n"
        f"The answer is {colors[i]}."
    )
    return [Turn(prompt, text, concludes(colors[i]))]


def tracking(d: Draw) -> list[Turn]:
    """Follow an object through hands."""
    names = d.words(NAMES, d.int(3, 4))
    thing = d.pick(("ball", "key", "letter", "ring", "map", "coin", "hat"))
    holder, lines = names[0], [f"{names[0]} has the {thing}."]
    trail = [names[0]]
    for _ in range(d.int(1, 4)):
        other = d.pick([n for n in names if n != holder])
        lines.append(f"{holder} gives the {thing} to {other}.")
        holder = other
        trail.append(other)
    d.hold(tuple(trail))
    prompt = d.say(
        "{t} Who has the {x}?",
        "{t} Where is the {x} now?",
        "Who has the {x} in the end? {t}",
        "{t} Who holds the {x} now?",
        "Follow the {x}: {t} Who has it?",
        t=" ".join(lines),
        x=thing,
    )
    return [Turn(prompt, f"{' -> '.join(trail)}\nThe answer is {holder}.", concludes(holder))]


def syllogism(d: Draw) -> list[Turn]:
    name, job = d.word(NAMES), d.word(JOBS)
    city, color = d.word(CITIES), d.pick(COLORS)
    d.hold(name, job, city)
    true = d.chance(0.5)
    other = d.word(CITIES)
    if true or other == city:
        lives, answer = city, "Yes"
    else:
        lives, answer = other, "No"
    prompt = d.say(
        "Every {j} from {c} has {ak} coat. {n} is {aj} from {l}. Does it follow that {n} has {ak} coat?",
        "All people who work as {aj} in {c} own {ak} coat. {n} works as {aj} in {l}. Must {n} own {ak} coat?",
        (
            "Rule: {aj} from {c} wears {ak} coat. {n} is {aj} from {l}. Does the rule say that {n}"
            " wears {ak} coat?"
        ),
        (
            "If someone is {aj} from {c}, the coat is {k}. {n} is {aj} from {l}. Can we conclude that"
            " the coat of {n} is {k}?"
        ),
        j=job,
        aj=an(job),
        c=city,
        k=color,
        ak=an(color),
        n=name,
        l=lives,
    )
    reason = "the rule applies" if answer == "Yes" else "the rule says nothing about that"
    text = f"The rule is about {city}. {name} is from {lives}. {answer}, {reason}."
    return [Turn(prompt, text, exactly(text))]


CATEGORIES = {
    "animal": ANIMALS,
    "fruit": FRUITS,
    "tool": TOOLS,
    "color": COLORS,
}


def odd_one_out(d: Draw) -> list[Turn]:
    a, b = d.picks(list(CATEGORIES), 2)
    group = {k: list(v if isinstance(v, tuple) else v.all) for k, v in CATEGORIES.items()}
    usual = [w for w in group[a] if w not in group[b]]
    odd = d.pick([w for w in group[b] if w not in group[a]])
    items = [*d.picks(usual, 3), odd]
    d.rng.shuffle(items)
    d.hold(tuple(items))
    prompt = d.say(
        "Which word does not fit? {s}",
        "Find the odd one out: {s}",
        "Which one is different: {s}?",
        "One of these does not belong with the others: {s}",
        "Odd one out? {s}",
        s=", ".join(items),
    )
    text = f"{odd}, because it is {an(b)} and the others are {a}s."
    return [Turn(prompt, text, exactly(text))]


def categorize(d: Draw) -> list[Turn]:
    group = {k: list(v if isinstance(v, tuple) else v.all) for k, v in CATEGORIES.items()}
    kinds = d.picks(list(group), 2)
    if "orange" in group[kinds[0]] and "orange" in group[kinds[1]]:
        group[kinds[0]] = [w for w in group[kinds[0]] if w != "orange"]
    chosen = {k: d.picks([w for w in group[k] if w != "orange"], d.int(1, 3)) for k in kinds}
    items = [w for ws in chosen.values() for w in ws]
    d.rng.shuffle(items)
    d.hold(tuple(items))
    prompt = d.say(
        "Group these words into {a} and {b}: {s}",
        "Sort into {a} and {b}: {s}",
        "Which are {a} and which are {b}? {s}",
        "Make two groups, {a} and {b}: {s}",
        "Divide into {a} and {b}: {s}",
        a=f"{kinds[0]}s",
        b=f"{kinds[1]}s",
        s=", ".join(items),
    )
    text = "\n".join(f"{k}s: {', '.join(w for w in items if w in chosen[k])}" for k in kinds)
    return [Turn(prompt, text, exactly(text))]


_GOOD = (
    "The food was delicious",
    "The staff was very friendly",
    "The room was clean and quiet",
    "I loved every minute",
    "It works perfectly",
    "The price was fair",
    "The book is wonderful",
    "The music was beautiful",
    "Everything arrived on time",
    "I will come back soon",
)
_BAD = (
    "The food was cold",
    "The staff was rude",
    "The room was dirty and loud",
    "I was bored the whole time",
    "It broke after one day",
    "It was far too expensive",
    "The book is dull",
    "The music was terrible",
    "My order never arrived",
    "I will never come back",
)


def sentiment(d: Draw) -> list[Turn]:
    good, name, city = d.chance(0.5), d.word(NAMES), d.word(CITIES)
    parts = d.picks(_GOOD if good else _BAD, d.int(1, 3))
    d.hold(tuple(parts), name, city)
    where = d.pick((f"I was in {city} with {name}. ", f"{name} took me there. ", ""))
    prompt = d.say(
        "Is this review positive or negative? {s}",
        "Classify as positive or negative: {s}",
        "Sentiment of this text? {s}",
        "{s}\n\nPositive or negative?",
        "Does the writer of this text like it? Say positive or negative. {s}",
        s=where + " ".join(p + "." for p in parts),
    )
    text = f"The text is {'positive' if good else 'negative'}."
    return [Turn(prompt, text, exactly(text))]


CAPITALS = pairs(
    "France:Paris Germany:Berlin Italy:Rome Spain:Madrid Norway:Oslo Austria:Vienna Ireland:Dublin "
    "Portugal:Lisbon Greece:Athens Poland:Warsaw Egypt:Cairo Japan:Tokyo Peru:Lima Canada:Ottawa "
    "Australia:Canberra Kenya:Nairobi Sweden:Stockholm Denmark:Copenhagen Finland:Helsinki "
    "Hungary:Budapest Belgium:Brussels Russia:Moscow Cuba:Havana Chile:Santiago China:Beijing "
    "Turkey:Ankara Ukraine:Kyiv Croatia:Zagreb Serbia:Belgrade Iraq:Baghdad Iran:Tehran "
    "Nepal:Kathmandu Ghana:Accra Iceland:Reykjavik Morocco:Rabat Romania:Bucharest Bulgaria:Sofia "
    "Estonia:Tallinn Latvia:Riga Lithuania:Vilnius Thailand:Bangkok Vietnam:Hanoi India:Delhi"
)


def capitals(d: Draw) -> list[Turn]:
    countries = d.picks(list(CAPITALS), d.pick((1, 1, 2, 3)))
    if len(countries) > 1:
        d.hold(*countries)
    elif d.split == "values":  # a single fact cannot be held out
        raise OtherSplit
    back = len(countries) == 1 and d.chance(0.4)
    if back:
        country = countries[0]
        prompt = d.say(
            "Which country has the capital {c}?",
            "{c} is the capital of which country?",
            "Of which country is {c} the capital?",
            "{c} is a capital. Name its country.",
            c=CAPITALS[country],
        )
        answer = f"{CAPITALS[country]} is the capital of {country}."
        return [Turn(prompt, answer, exactly(answer))]
    prompt = d.say(
        "What is the capital of {c}?",
        "Capital of {c}?",
        "Name the capital of {c}.",
        "Tell me the capital of {c}.",
        "Do you know the capital of {c}?",
        c=joined(countries),
    )
    answer = " ".join(f"The capital of {c} is {CAPITALS[c]}." for c in countries)
    return [Turn(prompt, answer, exactly(answer))]
