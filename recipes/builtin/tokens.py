"""Turn prompts into token ids of the built-in target, a prompt a line, for gpu.py.

python recipes/builtin/tokens.py prompts.jsonl prompts.jsonl.gz [--leave-out question.jsonl …]

Left out are prompts with a message of the demo, of benchmarks/questions.jsonl or of the files given, those of
more than 384 tokens, and repeated ones.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider import LLM  # noqa: E402 - behind the path
from outrider.bench.conversations import example_of  # noqa: E402
from outrider.bench.prompts import PROMPTS, TASKS  # noqa: E402
from outrider.bench.questions import read  # noqa: E402
from outrider.errors import RequestError  # noqa: E402
from outrider.train.data import encoded  # noqa: E402
from outrider.train.options import TrainOptions  # noqa: E402

LONGEST, LENGTH = 384, 512  # tokens of a prompt, and with its answer


def evaluated(files: Iterable[Path]) -> set[str]:
    """Messages that heads are evaluated on."""
    found = {turn.strip() for prompt in (*PROMPTS, *TASKS) for turn in prompt.turns}
    for file in (ROOT / "benchmarks/questions.jsonl", *files):
        found |= {turn.strip() for question in read(file) for turn in question.turns}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--leave-out", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=26)
    given = parser.parse_args()
    llm = LLM("builtin", max_num_seqs=1, max_model_len=LENGTH, speculative_config=None)
    options = TrainOptions(data=("-",), out="-", length=LENGTH)
    avoided, found, left_out = evaluated(given.leave_out), dict[tuple[int, ...], None](), Counter[str]()
    for line in given.prompts.read_bytes().splitlines():
        example = example_of(line, ".jsonl")
        try:
            prompt = tuple(encoded(llm, example, options).prompt)
        except RequestError:
            prompt = (0,) * LENGTH
        if len(prompt) > LONGEST:
            left_out["too long"] += 1
        elif any(message["content"].strip() in avoided for message in example.messages):
            left_out["evaluated"] += 1
        elif prompt in found:
            left_out["repeated"] += 1
        else:
            found[prompt] = None
    lines = [json.dumps(prompt, separators=(",", ":")) + "\n" for prompt in found]
    random.Random(given.seed).shuffle(lines)
    with gzip.open(given.out, "wt", encoding="utf-8") as file:
        file.writelines(lines)
    print(f"{given.out}: {len(lines)} prompts; left out: {dict(left_out)}")


if __name__ == "__main__":
    main()
