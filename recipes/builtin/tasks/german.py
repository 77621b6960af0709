"""German and English sentences from one template grammar."""

from __future__ import annotations

from .check import exactly
from .draw import Draw, Turn, pairs

# English noun: German noun and gender
NOUNS = pairs(
    "book:Buch n,house:Haus n,car:Auto n,letter:Brief m,apple:Apfel m,table:Tisch m,dog:Hund m,"
    "cat:Katze f,city:Stadt f,flower:Blume f,key:Schlüssel m,picture:Bild n,newspaper:Zeitung f,"
    "chair:Stuhl m,bag:Tasche f,ball:Ball m,cup:Tasse f,bicycle:Fahrrad n,coat:Mantel m,door:Tür f,"
    "window:Fenster n,bread:Brot n,lamp:Lampe f,garden:Garten m,shirt:Hemd n,clock:Uhr f,"
    "bottle:Flasche f,knife:Messer n,spoon:Löffel m,ship:Schiff n"
)
# English infinitive, third person, past; German infinitive, ich, er, participle
VERBS = [
    tuple(v.split("/"))
    for v in [
        "see/sees/saw/sehen/sehe/sieht/gesehen",
        "buy/buys/bought/kaufen/kaufe/kauft/gekauft",
        "find/finds/found/finden/finde/findet/gefunden",
        "sell/sells/sold/verkaufen/verkaufe/verkauft/verkauft",
        "bring/brings/brought/bringen/bringe/bringt/gebracht",
        "paint/paints/painted/malen/male/malt/gemalt",
        "show/shows/showed/zeigen/zeige/zeigt/gezeigt",
        "need/needs/needed/brauchen/brauche/braucht/gebraucht",
        "clean/cleans/cleaned/putzen/putze/putzt/geputzt",
        "take/takes/took/nehmen/nehme/nimmt/genommen",
        "hold/holds/held/halten/halte/hält/gehalten",
        "lose/loses/lost/verlieren/verliere/verliert/verloren",
    ]
]
ADJECTIVES = pairs(
    "big:groß,small:klein,new:neu,old:alt,beautiful:schön,cheap:billig,red:rot,green:grün,"
    "black:schwarz,white:weiß,good:gut,heavy:schwer"
)
NOW = {"today": "heute", "now": "jetzt", "every day": "jeden Tag", "often": "oft"}
PAST = {"yesterday": "gestern", "last week": "letzte Woche", "on Monday": "am Montag"}
LATER = {"tomorrow": "morgen", "on Friday": "am Freitag", "in the evening": "am Abend", "today": "heute"}
# English subject, German subject, verb form: 0 ich, 1 er, 2 infinitive
SUBJECTS = (("I", "Ich", 0), ("he", "er", 1), ("she", "sie", 1), ("we", "wir", 2), ("they", "sie", 2))
MODALS = {
    "must": ("muss", "müssen"),
    "can": ("kann", "können"),
    "want to": ("will", "wollen"),
    "would like to": ("möchte", "möchten"),
}
NOMINATIVE = {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")}
ACCUSATIVE = {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")}
INDEFINITE = {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")}


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _object(d: Draw) -> tuple[str, str]:
    """A noun phrase in English and its German accusative."""
    english = d.pick(list(NOUNS))
    german, gender = NOUNS[english].split()
    definite, adjective = d.chance(0.6), d.pick([None, None, *ADJECTIVES])
    article, ending = (ACCUSATIVE if definite else INDEFINITE)[gender]
    first = adjective or english
    before = "the" if definite else ("an" if first[0] in "aeiou" else "a")
    middle = f" {adjective}" if adjective else ""
    inner = f" {ADJECTIVES[adjective]}{ending}" if adjective else ""
    return f"{before}{middle} {english}", f"{article}{inner} {german}"


def _action(d: Draw) -> tuple[str, str]:
    """A sentence of subject, verb, time and object."""
    english, german, form = d.pick(SUBJECTS)
    verb, object_en, object_de = d.pick(VERBS), *_object(d)
    way = d.pick(("present", "modal", "perfect", "negated", "question"))
    english = _capital(english)
    infinitive = verb[3]
    if way == "present":
        time = d.pick(list(NOW))
        said = verb[1] if form == 1 else verb[0]
        return f"{english} {said} {object_en} {time}.", (
            f"{_capital(german)} {verb[4] if form == 0 else verb[5] if form == 1 else infinitive}"
            f" {NOW[time]} {object_de}."
        )
    if way == "modal":
        modal, time = d.pick(list(MODALS)), d.pick(list(LATER))
        said = "wants to" if modal == "want to" and form == 1 else modal
        return f"{english} {said} {verb[0]} {object_en} {time}.", (
            f"{_capital(german)} {MODALS[modal][form == 2]} {LATER[time]} {object_de} {infinitive}."
        )
    if way == "perfect":
        time = d.pick(list(PAST))
        has = ("habe", "hat", "haben")[form]
        return f"{english} {verb[2]} {object_en} {time}.", (
            f"{_capital(german)} {has} {PAST[time]} {object_de} {verb[6]}."
        )
    if way == "negated":
        said = "cannot"
        return f"{english} {said} {verb[0]} {object_en}.", (
            f"{_capital(german)} {'können' if form == 2 else 'kann'} {object_de} nicht {infinitive}."
        )
    inside = "I" if english == "I" else english.lower()
    return f"Can {inside} {verb[0]} {object_en}?", (
        f"{'Können' if form == 2 else 'Kann'} {german.lower()} {object_de} {infinitive}?"
    )


def _state(d: Draw) -> tuple[str, str]:
    """A sentence that tells a property, or where something is."""
    english, adjective = d.pick(list(NOUNS)), d.pick(list(ADJECTIVES))
    german, gender = NOUNS[english].split()
    article = NOMINATIVE[gender][0]
    other = d.pick([a for a in ADJECTIVES if a != adjective])
    return d.pick(
        (
            (f"The {english} is {adjective}.", f"{_capital(article)} {german} ist {ADJECTIVES[adjective]}."),
            (f"Is the {english} {adjective}?", f"Ist {article} {german} {ADJECTIVES[adjective]}?"),
            (
                f"The {english} is not {adjective}.",
                f"{_capital(article)} {german} ist nicht {ADJECTIVES[adjective]}.",
            ),
            (
                f"The {english} is very {adjective}.",
                f"{_capital(article)} {german} ist sehr {ADJECTIVES[adjective]}.",
            ),
            (
                f"The {english} is {adjective} and {other}.",
                f"{_capital(article)} {german} ist {ADJECTIVES[adjective]} und {ADJECTIVES[other]}.",
            ),
            (f"Where is the {adjective} {english}?", f"Wo ist {article} {ADJECTIVES[adjective]}e {german}?"),
        )
    )


def translation(d: Draw) -> list[Turn]:
    turns = []
    into = d.chance(0.6)
    for _ in range(d.pick((1, 1, 2))):
        english, german = (_action if d.chance(0.65) else _state)(d)
        d.hold(english)
        source, target = (english, german) if into else (german, english)
        old, new = ("English", "German") if into else ("German", "English")
        prompt = d.say(
            "Translate {o} to {n}: {s}",
            "Translate from {o} to {n}: {s}",
            "Translate into {n}: {s}",
            "How do you say this in {n}? {s}",
            "{s} - in {n}, please.",
            "What is the {n} for: {s}",
            "Put this {o} sentence into {n}: {s}",
            "Say in {n}: {s}",
            o=old,
            n=new,
            s=source,
        )
        turns.append(Turn(prompt, target, exactly(target)))
    return turns


def vocabulary(d: Draw) -> list[Turn]:
    english = d.picks(list(NOUNS), d.int(1, 4))
    d.hold(*english)
    german = [_with_article(e) for e in english]
    if d.chance(0.5):
        prompt = d.say(
            "Which German words mean {s}?",
            "German for {s}?",
            "Translate these nouns to German: {s}",
            "What is the German for {s}?",
            "Give the German nouns with article: {s}",
            s=", ".join(english),
        )
        return [Turn(prompt, ", ".join(german), exactly(", ".join(german)))]
    prompt = d.say(
        "Which English words mean {s}?",
        "English for {s}?",
        "Translate these nouns to English: {s}",
        "What is the English for {s}?",
        "Give the English nouns: {s}",
        s=", ".join(german),
    )
    return [Turn(prompt, ", ".join(english), exactly(", ".join(english)))]


def _with_article(english: str) -> str:
    german, gender = NOUNS[english].split()
    return f"{NOMINATIVE[gender][0]} {german}"
