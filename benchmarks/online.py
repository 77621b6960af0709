"""Learning from traffic: acceptance and tokens per step over a stream of requests from one domain.

    python benchmarks/online.py [--drafter builtin-eagle] [--kind source] [--share 0.5] [--json OUT]

The same requests run without and with learning, batches in turn, greedy, chains of 3 draft tokens; the texts
are compared.  Then the controller decides how much to draft, for further requests of the stream, one at a
time, on the grown target: with the first weights and with the learned ones.  `drafting` is the share of the
steps that drafted.  --drafter builtin-draft trains the draft model.

--kind source: Outrider's own source code is continued, twelve lines at a time, which no head of the family
was trained on.  The other kinds are the tasks that they were trained on.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command_line import parser_of, settings, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import outrider
from outrider import LLM, SamplingParams, draft
from outrider.bench.conditions import conditions
from outrider.core.row import Speculation
from outrider.engine.chat_template import render
from outrider.online import store
from recipes.builtin import tasks

PACKAGE, SOURCE, LINES = Path(outrider.__file__).parent, "source", 12
NEW, FURTHER, ROUNDS = 64, 24, 2  # tokens of an answer; requests for the controller, and how often


def prompts(llm: LLM, kind: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    if kind == SOURCE:
        return [{"prompt": text} for text in source_windows(rng, count)]
    asked = (tasks.make(kind, rng).turns[0].prompt for _ in range(count))
    return [render(llm.tokenizer, {"messages": [{"role": "user", "content": text}]}) for text in asked]


def source_windows(rng: random.Random, count: int) -> list[str]:
    """Lines of Outrider's own source code."""
    files = [path.read_text(encoding="utf-8").splitlines() for path in sorted(PACKAGE.rglob("*.py"))]
    files = [lines for lines in files if len(lines) > 2 * LINES]
    windows = []
    for _ in range(count):
        lines = rng.choice(files)
        first = rng.randrange(len(lines) - LINES)
        windows.append("\n".join(lines[first : first + LINES]) + "\n")
    return windows


def serve(llm: LLM, batch: list[dict[str, Any]]) -> tuple[list[list[int]], dict[str, float]]:
    """The texts, and what drafting has given."""
    began, params = time.process_time(), SamplingParams(temperature=0.0, max_tokens=NEW, detokenize=False)
    outputs = llm.generate(batch, params)
    total = Speculation()
    for output in outputs:
        total = total + output.outputs[0].speculation
    first = 1 - total.accepted_lengths[0] / total.drafts if total.drafts else 0.0
    found = {"first": first, "tokens_per_step": total.tokens_per_step, "drafts": total.drafts}
    found |= {"drafting": total.drafts / max(1, total.steps), "drafted": total.drafted}
    found |= {"seconds": time.process_time() - began}
    return [list(output.outputs[0].token_ids) for output in outputs], found


def speculation(drafter: str, **more: Any) -> dict[str, Any]:
    tree = {"tree": "chain"} if draft.detect(drafter) in draft.head_methods() else {}
    return {"model": drafter, "num_speculative_tokens": 3, **tree, **more}


def controlled(target: str, drafter: str, asked: list[dict[str, Any]]) -> dict[str, float]:
    """What the controller drafts with these weights, after a first half of the requests to measure costs."""
    llm = LLM(
        target, max_num_seqs=1, max_model_len=512, speculative_config=speculation(drafter, adaptive=True)
    )
    serve(llm, asked[: len(asked) // 2])
    return serve(llm, asked[len(asked) // 2 :])[1]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="builtin")
    parser.add_argument("--grown", default="builtin-100m", help="target for the controller")
    parser.add_argument("--drafter", default="builtin-eagle")
    parser.add_argument("--kind", default=SOURCE, choices=[SOURCE, *sorted(tasks.KINDS)])
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--requests", type=int, default=720)
    parser.add_argument("--batch", type=int, default=24, help="requests at once")
    parser.add_argument("--minutes", type=float, default=2.5, help="begin no batch after this time")
    given = parser.parse_args()
    ends = time.perf_counter() + 60 * given.minutes
    sizes = {"max_num_seqs": given.batch, "max_model_len": 512}
    fixed = LLM(given.target, speculative_config=speculation(given.drafter), **sizes)
    rows = []
    with tempfile.TemporaryDirectory() as path:
        config = speculation(given.drafter, online={"path": path, "share": given.share})
        learning = LLM(given.target, speculative_config=config, **sizes)
        stream = prompts(fixed, given.kind, given.requests + FURTHER)
        for at in range(0, given.requests, given.batch):
            if time.perf_counter() > ends:
                break
            batch = stream[at : min(at + given.batch, given.requests)]
            (texts, before), (same, after) = (serve(llm, batch) for llm in (fixed, learning))
            assert texts == same, "learning changed a text"
            rows.append({"requests": at + len(texts), "fixed": before, "learning": after})
            print(json.dumps(rows[-1]), flush=True)
        report = store.reported(Path(path))
        weights = {"first weights": given.drafter}
        if any(Path(path).glob("*.safetensors")):  # none if the stream was too short to learn from
            weights["learned weights"] = path
        control: dict[str, list[dict[str, float]]] = {name: [] for name in weights}
        for _ in range(ROUNDS):
            for name, used in weights.items():
                control[name].append(controlled(given.grown, used, stream[-FURTHER:]))
    print(json.dumps(control))
    made = {**conditions(), "options": settings(given), "rows": rows, "report": report, "controller": control}
    write(given.json, made)


if __name__ == "__main__":
    main()
