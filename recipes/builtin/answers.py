"""Score the answers of the shipped target, or another one of the family, by kind of task.

python recipes/builtin/answers.py --json FILE [--per-kind 100] [--kinds function sql …] [--target FOLDER]

Answers are greedy, of the shipped target by the weights in 8 bits.  The demo shows kinds of which at least
95 % are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider.bench.conditions import conditions  # noqa: E402 - behind the path
from recipes.builtin import tasks  # noqa: E402
from recipes.builtin.evaluate import SPLITS, engine, score  # noqa: E402

TARGET = ROOT / "src/outrider/builtin/target"
DEMO = {  # kinds of the demo's prompts
    "arithmetic": "problem", "code": "function", "story": "story", "docstring": "document", "sql": "sql",
    "summary": "summary", "translation": "translation", "email": "email", "sorting": "sort_numbers",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--per-kind", type=int, default=100)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--kinds", nargs="+", choices=tuple(tasks.KINDS), default=tuple(tasks.KINDS))
    given = parser.parse_args()
    answer = engine(str(given.target))
    found = {**conditions(), "per kind": given.per_kind}
    for split in SPLITS:
        scores = score(answer, given.target, given.per_kind, split, given.kinds)
        print(f"{split}: {scores['accuracy']:.1%} right, {scores['repeated_4_grams']:.1%} repeated 4-grams")
        right = {kind: means["right"] for kind, means in scores["kinds"].items()}
        for kind, share in sorted(right.items(), key=lambda pair: pair[1]):
            print(f"    {kind:16s} {share:6.1%} of {scores['turns'][kind]}")
        kept = {name: scores[name] for name in ("accuracy", "repeated_4_grams", "turns")}
        found[split] = {**kept, "right": right}
    given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
