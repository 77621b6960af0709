"""Our own prompts by kind, as lists of turns (user, assistant, user …), for the demo, tests and examples."""

from __future__ import annotations

from typing import Any, NamedTuple

from outrider.engine.chat_template import render
from outrider.errors import RequestError


class Prompt(NamedTuple):
    kind: str
    turns: tuple[str, ...]


_RAIN = (
    "The village of Arlen lies between two rivers. In spring the northern river floods the lower fields, "
    "and the farmers wait until the water is gone before they plant beans and maize. The southern river is "
    "deep and slow; children swim in it in summer, and a ferry crosses it twice a day. In the year of the "
    "great rain both rivers rose together, and the school was moved to the hill, "
    "where it still stands."
)
_STUDY = (
    "We asked 120 adults with chronic back pain to walk for thirty minutes a day, and compared them with "
    "118 adults who kept their habits. After twelve weeks the walking group reported less pain and slept "
    "longer. There was no difference in the use of medicine between the "
    "groups. Two people in the walking group stopped because of pain in the knee."
)

PROMPTS = (
    Prompt(
        "chat",
        (
            "Hi! I have just come back from a long walk.",
            "That sounds nice. Where did you go?",
            "Up to the lake. Do you like walking?",
        ),
    ),
    Prompt(
        "chat",
        ("What do you do in your free time?", "I like to cook and to read.", "What do you like to cook?"),
    ),
    Prompt("translation", ("Translate English to German: I would like to read this book tomorrow.",)),
    Prompt(
        "translation",
        ("Translate German to English: Wir haben gestern im Garten gegessen, weil das Wetter so schön war.",),
    ),
    Prompt("summary", (f"Summarize: {_STUDY}",)),
    Prompt("summary", (f"Summarize what was said. {_RAIN}",)),
    Prompt("question", ("Can a person see a star in the daytime?",)),
    Prompt("question", ("What do plants need in order to grow?",)),
    Prompt(
        "arithmetic",
        ("Anna has 14 apples. She gives 5 to Ben and buys 8 more. How many apples does she have?",),
    ),
    Prompt("arithmetic", ("A train travels 60 miles an hour for 3 hours. How many miles does it travel?",)),
    Prompt(
        "retrieval",
        (
            f"Answer from the context.\nContext: {_STUDY}\n"
            "Question: Does walking help adults with chronic back pain?",
        ),
    ),
    Prompt(
        "retrieval",
        (f"Answer from the context.\nContext: {_RAIN}\nQuestion: Why was the school moved to the hill?",),
    ),
    Prompt("code", ("Write a function to find the largest number in a list.",)),
    Prompt("code", ("Write the Python file sorts/bubble_sort.py",)),
)
TASKS = (  # kinds of tasks that the built-in target answers correctly
    Prompt("story", ("Tell me a story about Paul and Tina from Tokyo.",)),
    Prompt("code", ("Write a function to check whether a number is prime.",)),
    Prompt(
        "table",
        (
            "Make a Markdown table with name, job and city: Rosa is a farmer in Sydney; Victor is a baker in "
            "Madrid; Emma is a doctor in Oslo; David is a singer in Cairo",
        ),
    ),
    Prompt(
        "extraction",
        ("Extract name, job, city and age as JSON: Lena, a writer from Sydney, is 52 years old.",),
    ),
    Prompt("sql", ("Write an SQL query that lists the title of all books where price is greater than 20.",)),
    Prompt(
        "summary",
        (
            "Summarize in one sentence: Emma was waiting at home. It was a sunny Monday in Vienna. Max had "
            "promised to bring cards, and so Max walked to the market. There Max bought 32 cards and carried "
            "them home to Emma.",
        ),
    ),
    Prompt(
        "translation", ("Translate English to German: I would like to buy the newspaper in the evening.",)
    ),
)
KINDS = tuple(dict.fromkeys(prompt.kind for prompt in PROMPTS))


def rendered(prompt: Prompt, tokenizer: Any, raw: bool = False) -> dict[str, list[int]]:
    """Token ids for `LLM.generate`, through the tokenizer's chat template.

    raw: encode the last turn unchanged, as is done without a template
    """
    if tokenizer is None:
        raise RequestError("prompts need a tokenizer, and the checkpoint has none: name one.")
    if raw or not getattr(tokenizer, "chat_template", None):
        return {"prompt_token_ids": tokenizer.encode(prompt.turns[-1])}
    turns = [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(prompt.turns)
    ]
    return {"prompt_token_ids": render(tokenizer, {"messages": turns})["prompt_token_ids"]}
