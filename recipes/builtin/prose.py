"""Public data sets turned into documents in the chat format, by kind.

The data folder holds the files named below; their sources and licences are listed in README.md.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BOS, END, PAD, USER, ASSISTANT, SYSTEM = (
    "<|bos|>",
    "<|end|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
SPECIAL = (BOS, END, PAD, USER, ASSISTANT, SYSTEM)
SKIPPED_BOOKS = ("bible", "milton", "shakespeare", "blake", "whitman")  # verse and old spelling
TRANSLATION_PAIRS = 66_000


def chat(*turns: str) -> str:
    """Alternating user and assistant turns."""
    return BOS + "".join((ASSISTANT if i % 2 else USER) + t.strip() + END for i, t in enumerate(turns))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf8") as file:
        for line in file:
            yield json.loads(line)


def _rationales(data: Path, name: str) -> Iterator[str]:
    """Question, answer and rationale of a tab-separated file."""
    with (data / f"flan_cot/{name}_train.tsv").open(encoding="utf8") as file:
        for line in file:
            row = [cell.replace("\\n", "\n") for cell in line.rstrip("\n").split("\t")]
            if len(row) == 3:
                yield chat(row[0], f"{row[2].strip()} So the answer is {row[1]}.")


def mathematics(data: Path) -> Iterator[str]:
    for row in _lines(data / "gsm8k/train.jsonl"):
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("#### ", "The answer is ")
        yield chat(row["question"], answer)
    for row in _lines(data / "mawps/mawps.jsonl"):
        question = row["Question"]
        for i, value in enumerate(row["Numbers"].split()):
            question = question.replace(f"number{i}", value.removesuffix(".0"))
        yield chat(re.sub(r" ([.,?!])", r"\1", question), f"The answer is {row['Answer']}")
    yield from _rationales(data, "aqua")


def questions(data: Path) -> Iterator[str]:
    for name in ("creak", "strategyqa", "ecqa", "qasc"):
        yield from _rationales(data, name)


def contexts(data: Path) -> Iterator[str]:
    for row in json.loads((data / "pubmedqa/ori_pqal.json").read_text(encoding="utf8")).values():
        prompt = (
            f"Answer from the context.\nContext: {' '.join(row['CONTEXTS'])}\nQuestion: {row['QUESTION']}"
        )
        yield chat(prompt, f"{row['LONG_ANSWER']} The answer is {row['final_decision']}.")


def summaries(data: Path) -> Iterator[str]:
    for part in ("train", "dev", "test"):
        for row in _lines(data / f"scitldr/{part}.jsonl"):
            target = row["target"]
            yield chat(
                "Summarize: " + " ".join(row["source"]), target if isinstance(target, str) else target[0]
            )
    for row in _lines(data / "qmsum/train.jsonl"):
        transcript = row.get("meeting_transcripts", [])
        for item in row.get("specific_query_list", []):
            spans = [(int(a), int(b)) for a, b in item.get("relevant_text_span", [])]
            said = [t for a, b in spans for t in transcript[a : b + 1]]
            text = re.sub(r"\{[a-z]+\}", "", "\n".join(f"{t['speaker']}: {t['content']}" for t in said))
            if 200 < len(text) < 2500:
                yield chat(f"Summarize what was said. {item['query']}\n{text}", item["answer"])


def translations(data: Path) -> Iterator[str]:
    """Conversations of three sentence pairs."""
    rng = random.Random(0)
    lines = (data / "tatoeba_deu_eng/deu.txt").read_text(encoding="utf8").splitlines()
    rng.shuffle(lines)
    pairs = [line.split("\t")[:2] for line in lines[:TRANSLATION_PAIRS]]
    for i in range(0, len(pairs), 3):
        turns = []
        for english, german in pairs[i : i + 3]:
            into_english = rng.random() < 0.7
            turns += (
                [f"Translate German to English: {german}", english]
                if into_english
                else [f"Translate English to German: {english}", german]
            )
        yield chat(*turns)


def dialogues(data: Path) -> Iterator[str]:
    for row in _lines(data / "synthetic_persona_chat/valid_test.jsonl"):
        lines = row["Best Generated Conversation"].split("\n")
        yield chat(*(re.sub(r"^User \d: ?", "", x) for x in lines if x.strip()))
    for row in _lines(data / "taskmaster4/dialogs.jsonl"):
        yield chat(*(text for _, text in row["turns"]))


def commands(data: Path) -> Iterator[str]:
    for row in _lines(data / "tldr_pages/pages.jsonl"):
        if row["lang"] in ("en", ""):
            yield chat(f"How do I use the command {row['name']}?", row["text"])


def programs(data: Path) -> Iterator[str]:
    for row in _lines(data / "mbpp/mbpp_train.jsonl"):
        yield chat(row["text"], row["code"].replace("\r\n", "\n").replace("\t", "    "))
    for row in _lines(data / "the_algorithms_python/files.jsonl"):
        yield chat(f"Write the Python file {row['path']}", row["text"])


def stories(data: Path) -> Iterator[str]:
    for row in _lines(data / "african_storybook/cc_by.jsonl"):
        if row["lang"] == "en":
            title, *lines = row["text"].splitlines()
            yield chat(f"Tell me the story {title.lstrip('# ')}", re.sub(r"#+\s*", "", "\n".join(lines)))


def countries(data: Path) -> Iterator[str]:
    for row in _lines(data / "factbook/countries.jsonl"):
        sections = row["data"]
        names = sections.get("Government", {}).get("Country name", {})
        name = names.get("conventional short form", {}).get("text", "")
        if name in ("none", ""):
            continue
        for fields in sections.values():
            for key, value in fields.items() if isinstance(fields, dict) else ():
                if isinstance(value, dict) and 20 < len(value.get("text", "")) < 1500:
                    yield chat(f"{key} of {_plain(name)}?", _plain(value["text"]))


def _plain(text: str) -> str:
    return re.sub(r"<.*?>", "", text)


def books(data: Path) -> Iterator[str]:
    for row in _lines(data / "gutenberg_nltk/books_detok.jsonl"):
        if any(name in row["name"] for name in SKIPPED_BOOKS):
            continue
        lines = row["text"].split("\n")
        for i in range(0, len(lines), 60):
            yield BOS + "\n".join(lines[i : i + 60]) + END


KINDS: dict[str, Callable[[Path], Iterator[str]]] = {
    "math": mathematics,
    "qa": questions,
    "rag": contexts,
    "summary": summaries,
    "translation": translations,
    "dialogue": dialogues,
    "howto": commands,
    "code": programs,
    "story": stories,
    "facts": countries,
    "prose": books,
}


def documents(data: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Shuffled training documents, and the held-out 1 % of every kind."""
    rng = random.Random(0)
    train: list[str] = []
    held: dict[str, list[str]] = {}
    for kind, read in KINDS.items():
        rows = list(read(data))
        rng.shuffle(rows)
        count = max(8, len(rows) // 100)
        held[kind] = rows[:count]
        train += rows[count:]
    rng.shuffle(train)
    return train, held
