"""Build the small datastore of the built-in target, from the target's own answers to many prompts.

    python scripts/tiny_datastore.py --answers 2800

The prompts are made from the words and sentences below, in the forms that the target was trained on.  None is
one of the demo's.  Answers are sampled at temperature 0.8.  Those that repeat themselves are left out.  A
document is an answer behind the last tokens of its prompt.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider import LLM, SamplingParams
from outrider.bench.prompts import PROMPTS
from outrider.draft.datastore.corpus import build
from outrider.draft.datastore.store import BUILTIN, SPAN

MAX_TOKENS = 160  # of an answer
MAX_REPEATED = 0.3  # share of an answer's 4-grams that occurred before in it


def listed(text: str) -> list[str]:
    return text.split(", ")


def paired(text: str) -> list[list[str]]:
    return [pair.split(" = ") for pair in text.split(", ")]


NAMES = listed(
    "Tom, Lena, Omar, Ruth, Felix, Nora, Hugo, Mia, Leo, Clara, Samuel, Ida, Jonas, Emma, Paul, Grace, "
    "Victor, Alice, Martin, Julia"
)
THINGS = listed(
    "pencils, stamps, marbles, cookies, books, stickers, shells, coins, eggs, balloons, oranges, "
    "flowers, cards, bottles, tickets, chairs"
)
ANIMALS = listed(
    "cats, wolves, elephants, bees, snakes, owls, whales, frogs, horses, spiders, penguins, sheep, "
    "rabbits, bears, goats, ants"
)
OBJECTS = listed(
    "a bridge, a candle, a mirror, a kettle, a ladder, a clock, a blanket, a compass, a wheel, a map, "
    "a hammer, a boat, a bell, a lamp, a piano, a telescope, a bucket, an umbrella, a saw, a coat"
)
PLACES = listed(
    "kitchen, school, library, forest, desert, hospital, farm, market, harbour, museum, garage, park, "
    "office, theatre, station, bakery"
)
TOPICS = listed(
    "music, football, films, dogs, gardening, painting, trains, the sea, mountains, coffee, old books, "
    "photography, dancing, bread, winter, board games, camping, cycling, languages, the stars"
)
DONE = listed(
    "started a new job, moved to a small town, adopted a kitten, finished a long book, baked a cake, "
    "been to a concert, planted some trees, bought an old bicycle, visited my grandmother, learned to "
    "swim, painted my room, seen a film, joined a choir, missed my train"
)
SUBJECTS = paired(
    "My brother = Mein Bruder, My sister = Meine Schwester, The teacher = Der Lehrer, The child = Das "
    "Kind, Tom = Tom, Our neighbour = Unser Nachbar, The old woman = Die alte Frau, Mary = Maria, The "
    "doctor = Der Arzt, He = Er, My father = Mein Vater, She = Sie"
)
TIMES = paired(
    "yesterday = gestern, this morning = heute Morgen, last week = letzte Woche, in the evening = am "
    "Abend, on Sunday = am Sonntag, in the summer = im Sommer, two days ago = vor zwei Tagen, in "
    "Berlin = in Berlin"
)
DEEDS = paired(
    "bought a bicycle = ein Fahrrad gekauft, written a long letter = einen langen Brief geschrieben, "
    "lost the key = den Schlüssel verloren, opened the window = das Fenster geöffnet, drunk a cup of "
    "coffee = eine Tasse Kaffee getrunken, asked a question = eine Frage gestellt, sold the car = das "
    "Auto verkauft, told a story = eine Geschichte erzählt, seen a film = einen Film gesehen, helped "
    "the children = den Kindern geholfen, found a dog = einen Hund gefunden, made a mistake = einen "
    "Fehler gemacht, learned German = Deutsch gelernt, heard the news = die Nachricht gehört, repaired "
    "the door = die Tür repariert, played the piano = Klavier gespielt"
)
PATIENTS = listed(
    "children with asthma, nurses, women with anaemia, men with high blood pressure, patients with "
    "diabetes, runners with a sore knee, people with migraine, students with poor sleep"
)
CURES = listed(
    "a daily dose of vitamin D, a breathing exercise, a low-salt diet, a new tablet, warm baths, ten "
    "minutes of stretching, green tea, weekly advice by telephone"
)
EFFECTS = listed(
    "fewer headaches, lower blood pressure, better sleep, less pain, more energy, fewer visits to a "
    "doctor, a higher level of iron, less stress"
)
TOWNS = listed("Velden, Marrow, Port Ister, Quill, Sandby, Orrin, Thale, Lower Wick, Castell, Brune")
LANDS = listed(
    "on a steep hill above the sea, at the edge of a wide plain, beside a lake, in a narrow valley, on "
    "an island of rock, near an old mine"
)
WORKS = listed("salt, wool, glass, apples, fish, paper, honey, timber")
EVENTS = paired(
    "the bridge fell into the water = a ship had struck it, the market was closed = the well had run "
    "dry, the bell was sold = the roof had to be paid for, a wall was built = wolves came down in "
    "winter, the mill was moved = the stream had changed its bed, the road was made wider = two carts "
    "could not pass, a lighthouse was put up = three boats were lost in fog, the baker left = nobody "
    "had flour to sell"
)
TASKS = listed(
    "count the vowels in {}, reverse {}, check whether {} is empty, remove duplicates from {}, sort {} "
    "by length, find the shortest word in {}, split {} into two halves, sum the even numbers in {}, "
    "merge two dictionaries into {}, convert {} to upper case, rotate {} by n places, find the second "
    "smallest number in {}, check if {} is a palindrome, multiply all numbers in {}, find the missing "
    "number in {}, count how often each item is in {}"
)
VALUES = listed(
    "a list, a string, a given tuple, a list of lists, an array, a sentence, the given list, a list of "
    "strings"
)
FOLDERS = listed(
    "maths, strings, graphs, searches, matrix, geometry, ciphers, conversions, queues, trees, physics"
)
FILES = listed(
    "average, binary_search, caesar_cipher, circle_area, count_words, depth_first_search, digit_sum, "
    "distance, factorial, fibonacci, gcd, is_prime, linked_list, mean_square, palindrome, "
    "power_of_two, queue_with_list, rotate, shortest_path, square_root, stack, transpose, "
    "volume_of_cube"
)
FACTS = listed("Capital, Climate, Terrain, Natural resources, Languages, Population, Exports, Borders")
COUNTRIES = listed(
    "Norway, Peru, Kenya, Japan, Chile, Egypt, Iceland, Vietnam, Portugal, Ghana, Mongolia, Austria, "
    "Cuba, Jordan, Fiji, Poland"
)
SPEAKERS = ("Project Manager", "Marketing", "Professor", "Designer")
OPINIONS = (
    "I think the battery should last longer .",
    "Okay , and what about the colour ?",
    "The buttons are too small for old people .",
    "Yeah , but that costs more .",
    "We could test it with ten users first .",
    "Um , the recordings are not ready yet .",
    "So the next meeting is on Monday .",
    "Right , I will write the report .",
    "The screen is the most important part .",
    "I would rather keep the design simple .",
    "Mm-hmm , that sounds good .",
    "We have no money for a second model .",
)


def study(rng: random.Random) -> str:
    people, cure, effect, other = (
        rng.choice(PATIENTS),
        rng.choice(CURES),
        *rng.sample(EFFECTS, 2),
    )
    return (
        f"In this trial {rng.randint(20, 400)} {people} were given {cure} for {rng.randint(2, 24)} weeks; "
        f"as many others were not. The treated group had {effect} ({rng.randint(21, 70)} % against "
        f"{rng.randint(5, 20)} %), but not {other}. More trials are needed."
    )


def town(rng: random.Random) -> tuple[str, str]:
    """A text, and a question about it."""
    name, (event, reason) = rng.choice(TOWNS), rng.choice(EVENTS)
    text = (
        f"{name} stands {rng.choice(LANDS)}. Its people have lived on {rng.choice(WORKS)} for a long time. "
        f"In the year "
        f"{rng.randint(1650, 1950)} {event}, because {reason}. Today about {rng.randint(2, 90)}00 people "
        f"live there, "
        f"and most of them work in {rng.choice(WORKS)}."
    )
    return text, rng.choice(
        [f"Why was it that {event}?", f"Where does {name} stand?", f"How many people live in {name}?"]
    )


def chat(rng: random.Random) -> list[str]:
    topic, done, name = (
        rng.choice(TOPICS),
        rng.choice(DONE),
        rng.choice(NAMES),
    )
    return rng.choice(
        [
            [f"Hello, I am {name}. I like {topic}."],
            [f"Hi! I have {done}."],
            [f"Hello! What do you think about {topic}?"],
            [
                f"Hey, I am {name}.",
                "Hello! What do you do for fun?",
                f"I have {done}. And I enjoy {topic}. What about you?",
            ],
            [
                f"Have you ever {done}?",
                "Not yet, I am afraid. Have you?",
                f"Yes, with my friend {name}. Do you like {topic}?",
            ],
        ]
    )


def translation(rng: random.Random) -> list[str]:
    (who, wer), (when, wann), (deed, tat) = (
        rng.choice(SUBJECTS),
        rng.choice(TIMES),
        rng.choice(DEEDS),
    )
    return rng.choice(
        [
            [f"Translate English to German: {who} had {deed} {when}."],
            [f"Translate German to English: {wer} hat {wann} {tat}."],
        ]
    )


def summary(rng: random.Random) -> list[str]:
    meeting = "\n".join(f"{rng.choice(SPEAKERS)}: {line}" for line in rng.sample(OPINIONS, 4))
    return rng.choice(
        [
            [f"Summarize: {study(rng)}"],
            [f"Summarize what was said. {town(rng)[0]}"],
            [f"Summarize what was said.\n{meeting}"],
        ]
    )


def question(rng: random.Random) -> list[str]:
    animals, other, thing, place = (
        *rng.sample(ANIMALS, 2),
        rng.choice(OBJECTS),
        rng.choice(PLACES),
    )
    forms = (
        f"What do {animals} eat?",
        f"Can {animals} swim faster than {other}?",
        f"Would you find {thing} in a {place}?",
        f"Why do people go to a {place}?",
        f"What is {thing} made of?",
        f"Where do {animals} sleep?",
        f"Are {animals} afraid of {other}?",
        f"{rng.choice(FACTS)} of {rng.choice(COUNTRIES)}?",
        f"What could {animals} do in a {place}?",
        f"Could {thing} be older than a {place}?",
    )
    return [rng.choice(forms)]


def arithmetic(rng: random.Random) -> list[str]:
    (name, other), things, place = (
        rng.sample(NAMES, 2),
        rng.choice(THINGS),
        rng.choice(PLACES),
    )
    a, b, c = rng.randint(20, 90), rng.randint(2, 19), rng.randint(2, 12)
    forms = (
        f"{name} has {a} {things} and loses {b} of them. How many {things} are left?",
        f"A box holds {b} {things}. How many {things} are in {c} boxes?",
        f"{name} has {a} {things}, {other} has {b} more than {name}. "
        f"How many {things} do they have together?",
        f"{name} buys {c} {things} for {b} dollars each and pays with {b * c + a} dollars. "
        f"How much money does {name} get back?",
        f"{name} reads {b} pages a day. How many pages does {name} read in {c} weeks?",
        f"{b * c} {things} are shared equally among {c} children. How many {things} does each child get?",
        f"In a {place} there are {a} {things}. {name} brings {b} and {other} takes {c}. "
        f"How many {things} are there now?",
    )
    return [rng.choice(forms)]


def retrieval(rng: random.Random) -> list[str]:
    text, asked = town(rng)
    trial = study(rng)
    cure, people = (
        next(cure for cure in CURES if cure in trial),
        next(people for people in PATIENTS if people in trial),
    )
    known = rng.choice([(text, asked), (trial, f"Does {cure} help {people}?")])
    return [f"Answer from the context.\nContext: {known[0]}\nQuestion: {known[1]}"]


def code(rng: random.Random) -> list[str]:
    task = rng.choice(TASKS).format(rng.choice(VALUES))
    return rng.choice(
        [
            [f"Write a function to {task}."],
            [f"Write the Python file {rng.choice(FOLDERS)}/{rng.choice(FILES)}.py"],
        ]
    )


KINDS: tuple[Callable[[random.Random], list[str]], ...] = (
    chat,
    translation,
    summary,
    question,
    arithmetic,
    retrieval,
    code,
)


def prompts(count: int) -> list[tuple[str, list[str]]]:
    """(kind, turns) of `count` prompts, equally many of each kind.

    Prompts may be equal: answers are sampled.
    """
    rng, taken = random.Random(0), {prompt.turns for prompt in PROMPTS}
    found: list[tuple[str, list[str]]] = []
    while len(found) < count:
        kind = KINDS[len(found) % len(KINDS)]
        turns = kind(rng)
        if tuple(turns) not in taken:
            found.append((kind.__name__, turns))
    return found


def repeated(tokens: list[int]) -> float:
    """Share of the 4-grams that occurred before."""
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / max(1, len(grams))


def answers(llm: LLM, asked: list[tuple[str, list[str]]]) -> list[tuple[str, list[int], list[int]]]:
    """(kind, token ids of prompt, token ids of answer) for answers that do not repeat themselves."""
    talks = [
        [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)]
        for _, turns in asked
    ]
    params = [SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, seed=i) for i in range(len(talks))]
    outputs = zip(asked, llm.chat(talks, params, use_tqdm=True))
    answered = [
        (kind, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for (kind, _), output in outputs
    ]
    return [one for one in answered if repeated(one[2]) <= MAX_REPEATED]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=2800)
    parser.add_argument("--output", type=Path, default=BUILTIN["builtin-datastore"])
    args = parser.parse_args()
    console, llm, asked = (
        Console(),
        LLM("builtin", max_num_seqs=32, speculative_config=None),
        prompts(args.answers),
    )
    kept = answers(llm, asked)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "answers.jsonl"
        corpus.write_text(
            "".join(
                json.dumps({"token_ids": [*prompt[-SPAN:], *answer]}) + "\n" for _, prompt, answer in kept
            )
        )
        build([str(corpus)], str(args.output), llm.tokenizer, llm.engine.target.vocabulary)
    table = Table("kind", "prompts", "answers kept", "tokens")
    for kind, number in Counter(kind for kind, _ in asked).items():
        sizes = [len(answer) for of, _, answer in kept if of == kind]
        table.add_row(kind, str(number), str(len(sizes)), f"{sum(sizes):,}")
    console.print(table)
    console.print(
        f"{args.output}: {sum(len(answer) for _, _, answer in kept):,} tokens of answers, "
        f"{args.output.stat().st_size:,} bytes"
    )
