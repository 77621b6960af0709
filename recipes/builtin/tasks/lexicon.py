"""Word lists shared by the task generators."""

from .draw import listed, words

FEMALE = frozenset(
    listed(
        "Anna Clara Emma Grace Ida Kate Mia Olga Rosa Tina Maria Lena Sara Eva Lucy Nora Julia Helen Laura "
        "Alice Ruth Sofia Zoe Vera Martha Irene Paula Diana Nina Ella"
    )
)
NAMES = words(
    "Anna Ben Clara David Emma Oscar Felix Grace Henry Ida Jack Nora Kate Leo Mia Noah Olga Victor "
    "Paul Rosa Sam Tina Maria Julia Tom Lena Max Sara Tim Hugo Eva Jan Lucy Peter Helen Simon Laura "
    "Alice Mark Ruth Daniel Sofia Adam Zoe Robert Vera Martha Frank Irene Paula George Diana Nina Ella "
    "Carl Martin Philip Walter Erik Louis"
)
THINGS = words(
    "apples books coins pencils cards stamps marbles oranges shells stickers eggs flowers balls cups "
    "stones cookies tickets whistles boxes bottles lemons candles buttons ribbons plates spoons "
    "postcards bricks carrots pears seeds cherries nails tiles bags chairs"
)
CITIES = words(
    "Rome Paris Berlin Madrid Oslo Vienna London Dublin Lisbon Prague Athens Warsaw Cairo Tokyo Lima "
    "Boston Denver Toronto Sydney Nairobi Munich Geneva Milan Naples Seville Bergen Glasgow Krakow "
    "Chicago Dallas Austin Quebec Osaka Mumbai Hamburg Zurich"
)
JOBS = words(
    "teacher doctor baker painter driver nurse farmer writer singer engineer cook pilot gardener "
    "lawyer plumber dentist tailor waiter librarian carpenter musician actor sailor chemist"
)
COMMON = words(
    "apple river stone cloud green house light music paper quiet table under voice water young bread "
    "chair dance earth field garden horse island jungle kitchen lemon mountain night ocean pocket "
    "queen rabbit silver tiger umbrella valley window yellow zebra bridge candle dinner engine forest "
    "guitar hammer insect jacket ladder mirror needle orange pencil rocket school ticket village "
    "winter basket button carpet doctor eagle finger ginger helmet market nation office palace ribbon "
    "shadow temple uncle velvet wagon butter castle desert family"
)
COLORS = listed("red blue green yellow black white brown orange purple grey")
ANIMALS = words(
    "dog cat horse cow sheep rabbit mouse goat duck parrot pony fox owl frog bear lion tiger donkey"
)
FRUITS = words("apple pear plum cherry banana lemon orange peach grape melon mango apricot fig kiwi")
TOOLS = words("hammer saw drill wrench pliers screwdriver chisel file spanner ladder shovel rake axe brush")
PLACES = words(
    "museum library market theater bank school park station harbor castle bakery hospital garden tower"
)
WEATHER = ("sunny", "rainy", "cold", "windy", "warm", "cloudy")
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = listed("January February March April May June July August September October November December")
MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)))
NUMBERS = listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = listed("- - twenty thirty forty fifty sixty seventy eighty ninety")


def in_words(number: int) -> str:
    """English words of 0 to 999."""
    if number < 20:
        return NUMBERS[number]
    if number < 100:
        return TENS[number // 10] + (f"-{NUMBERS[number % 10]}" if number % 10 else "")
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{NUMBERS[number // 100]} hundred{rest}"


def female(name: str) -> bool:
    """Whether a story says "she"; of a name that is in no list by its end."""
    return name in FEMALE or (name not in NAMES.all and name.endswith("a"))


def they(name: str) -> str:
    return "She" if female(name) else "He"


def their(name: str) -> str:
    return "her" if female(name) else "his"


def an(word: str) -> str:
    """The word with its indefinite article."""
    return ("an " if word[0].lower() in "aeiou" else "a ") + word


def plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")


def joined(items: list[str]) -> str:
    """A list in a sentence: "a, b and c"."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
