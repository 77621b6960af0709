"""Edits of a text: replace, correct, reorder, change case, number and tense; spelling."""

from __future__ import annotations

from .check import concludes, exactly
from .draw import Draw, OtherSplit, Turn, listed, pairs
from .lexicon import CITIES, COLORS, COMMON, DAYS, JOBS, NAMES, PLACES, THINGS, WEATHER, an

SYLLABLES = listed(
    "ba be bo da de di fa fi ga go ka ki la le lo ma me mi na ne no pa pi ra re ri sa se so ta te ti va vo za"
)


def _sentences(d: Draw, count: int) -> tuple[list[str], list[str]]:
    """Plain sentences, and the words in them that may be replaced."""
    (a, b), city, job = d.words(NAMES, 2), d.word(CITIES), d.word(JOBS)
    things, place, day, color, w = (
        d.word(THINGS),
        d.word(PLACES),
        d.pick(DAYS),
        d.pick(COLORS),
        d.pick(WEATHER),
    )
    n = d.int(2, 90)
    pool = [
        (f"{a} bought {n} {things} at the {place}.", [a, str(n), things, place]),
        (f"On {day}, {b} went to {city} by train.", [day, b, city]),
        (f"The {place} was painted {color} last year.", [place, color]),
        (f"{b} works as {an(job)} and likes the {w} weather.", [b, w]),
        (f"{a} called {b} because the {things} were lost.", [a, b, things]),
        (f"In {city} the days are often {w}.", [city, w]),
        (f"The {color} bag holds {n} {things}.", [color, str(n), things]),
        (f"{a} and {b} will meet again on {day}.", [a, b, day]),
    ]
    chosen = d.picks(pool, count)
    return [s for s, _ in chosen], sorted({x for _, xs in chosen for x in xs})


def replace(d: Draw) -> list[Turn]:
    sentences, targets = _sentences(d, d.int(1, 5))
    text = " ".join(sentences)
    turns = []
    for i in range(d.pick((1, 1, 2))):
        old = d.pick(targets)
        new = str(d.int(2, 99)) if old.isdigit() else _same_class(d, old)
        if new == old or new in targets:
            raise OtherSplit
        d.hold(old, new)
        text = _replace_words(text, old, new)
        if i == 0:
            prompt = d.say(
                "Replace {o} by {n}: {s}",
                "Change {o} to {n} in this text: {s}",
                "{s}\n\nReplace {o} with {n}.",
                "Write {n} instead of {o}: {s}",
                "Put {n} wherever it says {o}.\n{s}",
                "Swap {o} for {n}: {s}",
                o=old,
                n=new,
                s=" ".join(sentences),
            )
        else:
            prompt = d.say(
                "Now replace {o} by {n}.", "And change {o} to {n}.", "Also write {n} for {o}.", o=old, n=new
            )
        turns.append(Turn(prompt, text, exactly(text)))
        targets = [t for t in targets if t not in (old, new)] + [new]
    return turns


def _same_class(d: Draw, word: str) -> str:
    for group in (NAMES, CITIES, THINGS, PLACES):
        if d.class_of.get(word) is group:
            return d.word(group)
    return d.pick(next(g for g in (COLORS, DAYS, WEATHER) if word in g))


def _replace_words(text: str, old: str, new: str) -> str:
    marks = ".,"
    return " ".join(new + w[len(old) :] if w.rstrip(marks) == old else w for w in text.split(" "))


def correct(d: Draw) -> list[Turn]:
    """Doubled words, missing capitals, missing full stops, wrong articles and swapped letters."""
    sentences, _ = _sentences(d, d.int(1, 4))
    text = " ".join(sentences)
    d.hold(text)
    parts = text.split(" ")
    way = d.pick(("double", "capital", "space", "typo"))
    i = d.int(1, len(parts) - 1)
    if way == "double":
        broken = " ".join([*parts[:i], parts[i].strip(".,"), *parts[i:]])
    elif way == "capital":
        broken = text[0].lower() + text[1:].replace(". I", ". i").replace(". T", ". t").replace(". O", ". o")
    elif way == "space":
        broken = text.replace(". ", " . ").replace(" the ", "  the ")
        broken = broken[:-1] if broken == text else broken
    else:
        common = [j for j, p in enumerate(parts) if p in _TYPOS]
        if not common:
            broken = text[:-1]
        else:
            j = d.pick(common)
            broken = " ".join([*parts[:j], _TYPOS[parts[j]], *parts[j + 1 :]])
    prompt = d.say(
        "Correct the text: {s}",
        "Fix the mistakes: {s}",
        "Correct this: {s}",
        "{s}\n\nFix the errors in this text.",
        "Please proofread: {s}",
        "What is the right spelling of this text? {s}",
        s=broken,
    )
    return [Turn(prompt, text, exactly(text))]


_TYPOS = {
    "the": "teh",
    "and": "adn",
    "because": "becuase",
    "bought": "bougth",
    "called": "caled",
    "were": "weer",
    "works": "wroks",
    "likes": "liks",
    "weather": "wether",
    "went": "wnet",
    "train": "trian",
    "will": "wil",
    "meet": "meat",
    "again": "agian",
    "often": "offen",
    "days": "dyas",
    "painted": "paintd",
    "last": "lsat",
    "holds": "hodls",
    "with": "wiht",
}


def sentence_lines(d: Draw) -> list[Turn]:
    """One sentence a line, reversed order of sentences, or one sentence removed."""
    sentences, _ = _sentences(d, d.int(2, 5))
    text, way = " ".join(sentences), d.pick(("lines", "first", "last", "drop"))
    d.hold(text, way)
    i = d.int(0, len(sentences) - 1)
    order = ("first", "second", "third", "fourth", "fifth")[i]
    kept = [s for j, s in enumerate(sentences) if j != i]
    what, answer = {
        "lines": ("Write every sentence on its own line", "\n".join(sentences)),
        "first": (f"Give me the {order} sentence", sentences[i]),
        "last": ("Give me the last sentence", sentences[-1]),
        "drop": (f"Delete the {order} sentence", " ".join(kept)),
    }[way]
    prompt = d.say(
        "{w}: {s}",
        "{w} of this text: {s}",
        "{s}\n\n{w}.",
        "Text: {s}\nTask: {w}.",
        "{w}, please.\n{s}",
        w=what,
        s=text,
    )
    return [Turn(prompt, answer, exactly(answer))]


PAST = pairs(
    "go:went,see:saw,buy:bought,find:found,give:gave,take:took,write:wrote,read:read,eat:ate,"
    "drink:drank,come:came,know:knew,think:thought,make:made,say:said,tell:told,run:ran,sing:sang,"
    "swim:swam,begin:began,break:broke,bring:brought,build:built,catch:caught,choose:chose,do:did,"
    "draw:drew,drive:drove,fall:fell,feel:felt,fly:flew,forget:forgot,get:got,grow:grew,hear:heard,"
    "hold:held,keep:kept,leave:left,lose:lost,meet:met,pay:paid,ride:rode,sell:sold,send:sent,sit:sat,"
    "sleep:slept,speak:spoke,stand:stood,swear:swore,teach:taught,throw:threw,wake:woke,wear:wore,"
    "win:won,work:worked,play:played,walk:walked,talk:talked,look:looked,call:called,help:helped"
)
PLURALS = pairs(
    "child:children,man:men,woman:women,foot:feet,tooth:teeth,mouse:mice,goose:geese,city:cities,"
    "baby:babies,box:boxes,bus:buses,knife:knives,leaf:leaves,wolf:wolves,book:books,car:cars,dog:dogs,"
    "tree:trees,house:houses,watch:watches,dish:dishes,lady:ladies,story:stories,potato:potatoes,"
    "tomato:tomatoes,person:people,sheep:sheep,fish:fish,key:keys,boy:boys,day:days,glass:glasses,"
    "match:matches,life:lives,wife:wives,shelf:shelves"
)
OPPOSITES = pairs(
    "big:small,hot:cold,old:new,fast:slow,high:low,long:short,light:dark,full:empty,hard:soft,wet:dry,"
    "rich:poor,strong:weak,early:late,open:closed,happy:sad,clean:dirty,cheap:expensive,easy:difficult,"
    "near:far,deep:shallow,wide:narrow,thick:thin,loud:quiet,up:down,left:right,inside:outside,"
    "before:after,always:never,good:bad,first:last"
)


def word_forms(d: Draw) -> list[Turn]:
    table, name = d.pick(((PAST, "past tense"), (PLURALS, "plural"), (OPPOSITES, "opposite")))
    chosen = d.picks(list(table), d.int(1, 4))
    d.hold(*chosen)
    prompt = d.say(
        "What is the {k} of {w}?",
        "Give the {k} of {w}.",
        "{w}: {k}?",
        "Tell me the {k} of {w}.",
        "Write the {k} of {w}.",
        k=name,
        w=", ".join(chosen),
    )
    answer = ", ".join(table[w] for w in chosen)
    return [Turn(prompt, answer, exactly(answer))]


def spelling(d: Draw) -> list[Turn]:
    made_up = d.chance(0.4)
    word = "".join(d.pick(SYLLABLES) for _ in range(d.int(2, 4))) if made_up else d.pick(COMMON.all)
    way = d.pick(("spell", "count", "upper", "first", "last", "reverse", "letter"))
    letter = d.pick(word)
    d.hold(word, way, letter if way == "letter" else "")
    spelled = "-".join(word)
    what, answer = {
        "spell": ("Spell the word {w}", spelled),
        "count": (
            "How many letters does the word {w} have",
            f"{_numbered(word)}\nThe answer is {len(word)}.",
        ),
        "upper": ("Write the word {w} in capital letters", word.upper()),
        "first": ("What is the first letter of the word {w}", word[0]),
        "last": ("What is the last letter of the word {w}", f"{spelled}: {word[-1]}"),
        "reverse": ("Spell the word {w} backwards", f"{spelled}\n{'-'.join(reversed(word))}"),
        "letter": (
            f"How often does the letter {letter} occur in the word {{w}}",
            f"{_marked(word, letter)}\nThe answer is {word.count(letter)}.",
        ),
    }[way]
    end = "?" if what[0] in "WH" and not what.startswith("Write") else "."
    prompt = d.say(
        "{q}{e}",
        "{Q}: {w}",
        "Please tell me: {q}{e}",
        "Here is a word: {w}. {q}{e}",
        "I have a question. {q}{e}",
        q=what.format(w=word),
        Q=what.replace(" the word {w}", " the following word"),
        w=word,
        e=end,
    )
    check = concludes(answer.split()[-1][:-1]) if "answer is" in answer else exactly(answer)
    return [Turn(prompt, answer, check)]


def _numbered(word: str) -> str:
    return " ".join(f"{c}{i}" for i, c in enumerate(word, 1))


def _marked(word: str, letter: str) -> str:
    count, parts = 0, []
    for c in word:
        count += c == letter
        parts.append(f"{c}{count}" if c == letter else c)
    return " ".join(parts)
