"""Write prompts to train heads on: tasks of all kinds, and the documents of the public data sets.

python recipes/builtin/prompts.py --out prompts.jsonl --tasks 10000 [--data DATA --documents 10000]
python recipes/builtin/prompts.py --out questions.jsonl --held-out 1

The second form writes so many tasks of each kind with held-out wordings, as questions for benchmarks.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.builtin import prose, tasks

TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)<\|end\|>", re.DOTALL)
PROSE_SHOWN = 60  # characters of a document without turns that the target goes on from
PROSE_LONGEST = 1200


def record(document: str) -> dict[str, Any] | None:
    """A conversation up to one of its user messages, or a text; None for one without either."""
    messages = [{"role": role, "content": text} for role, text in TURN.findall(document)]
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if asked:
        last = random.Random(document).choice(asked)
        return {"messages": messages[: last + 1]}
    text = document.removeprefix(prose.BOS).removesuffix(prose.END).strip()
    return {"text": text[:PROSE_LONGEST]} if len(text) > PROSE_SHOWN else None


def records(count: int, documents: int, data: Path | None, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"prompts {seed}")
    for _ in range(count):
        if (made := record(tasks.document(rng))) is not None:
            yield made
    if data is not None:
        train, _ = prose.documents(data)
        for document in rng.sample(train, min(documents, len(train))):
            if (made := record(document)) is not None:
                yield made


def held_out(each: int, seed: int) -> Iterator[dict[str, Any]]:
    """The first turns of tasks, in the form of Spec-Bench's questions."""
    for kind in tasks.KINDS:
        rng = random.Random(f"held out {kind} {seed}")
        for _ in range(each):
            yield {"category": kind, "turns": [tasks.make(kind, rng, "wordings").turns[0].prompt]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--data", type=Path, help="folder of the public data sets")
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--held-out", type=int, default=0, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.held_out:
        made = list(held_out(given.held_out, given.seed))
    else:
        made = list(records(given.tasks, given.documents, given.data, given.seed))
    random.Random(given.seed).shuffle(made)
    with given.out.open("w", encoding="utf8") as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in made)
    print(f"{given.out}: {len(made)} prompts")


if __name__ == "__main__":
    main()
