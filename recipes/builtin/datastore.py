"""Build the small datastore of the built-in target, from the target's own answers.

    python recipes/builtin/datastore.py [--answers 2800] [--out FILE]

The prompts are tasks of all kinds (`prompts.py`), none of which is one of the demo's.  Answers are sampled at
temperature 0.8.  Those that repeat themselves are left out.  A document is an answer behind the last tokens
of its prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from outrider import LLM, SamplingParams  # noqa: E402 - behind the path
from outrider.bench.prompts import TASKS  # noqa: E402
from outrider.draft.datastore.corpus import build  # noqa: E402
from outrider.draft.datastore.store import BUILTIN, SPAN  # noqa: E402
from recipes.builtin.evaluate import repeated  # noqa: E402
from recipes.builtin.prompts import records  # noqa: E402

SEED = 5
MAX_TOKENS = 160  # of an answer
MAX_REPEATED = 0.3  # share of an answer's 4-grams that occurred before in it


def documents(llm: LLM, count: int) -> list[list[int]]:
    """Token ids of answers that do not repeat themselves, each behind the end of its prompt."""
    shown = {task.turns[-1] for task in TASKS}
    talks = [record["messages"] for record in records(count, 0, None, SEED)]
    talks = [talk for talk in talks if talk[-1]["content"] not in shown]
    params = [SamplingParams(temperature=0.8, max_tokens=MAX_TOKENS, seed=i) for i in range(len(talks))]
    found = []
    for output in llm.chat(talks, params, use_tqdm=True):
        answer = list(output.outputs[0].token_ids)
        if repeated(answer) <= MAX_REPEATED:
            found.append([*(output.prompt_token_ids or [])[-SPAN:], *answer])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--answers", type=int, default=2800)
    parser.add_argument("--out", type=Path, default=BUILTIN["builtin-datastore"])
    given = parser.parse_args()
    llm = LLM("builtin", max_num_seqs=32, speculative_config=None)
    kept = documents(llm, given.answers)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "answers.jsonl"
        corpus.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for ids in kept))
        build([str(corpus)], str(given.out), llm.tokenizer, llm.engine.target.vocabulary)
    tokens = sum(map(len, kept))
    print(f"{given.out}: {len(kept)} answers, {tokens:,} tokens, {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
