"""The demo's two panes as a picture, at the time when the faster answer is done.

    python benchmarks/demo_picture.py [--prompt 0] [--out docs/img/demo.svg]

The machine should be idle.  The answer of the median round, by its time, is shown.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from outrider import LLM, SamplingParams
from outrider.bench.demo import DEPTH, DRAFT
from outrider.bench.panes import Piece, frame, lines_of, pieces_of
from outrider.bench.prompts import TASKS, rendered
from outrider.checkpoints.hub import GROWN
from outrider.requests import Prompt

ROUNDS, WIDTH = 3, 110


def recorded(llm: LLM, ids: Prompt) -> list[Piece]:
    llm.engine.forget_prefixes()
    answer = llm.generate(ids, SamplingParams(temperature=0, max_tokens=96))[0].outputs[0]
    return pieces_of(answer, lambda tokens: str(llm.tokenizer.decode(tokens, skip_special_tokens=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=int, default=0, help="number of the demo's prompt")
    parser.add_argument("--out", type=Path, default=Path("docs/img/demo.svg"))
    given = parser.parse_args()
    plain = LLM(model=GROWN, speculative_config=None, max_num_seqs=1, max_model_len=1024)
    fast = plain.variant({"model": DRAFT, "num_speculative_tokens": DEPTH})
    prompt = TASKS[given.prompt]
    ids = rendered(prompt, plain.tokenizer)
    rounds = [[recorded(llm, ids) for llm in (plain, fast)] for _ in range(1 + ROUNDS)][1:]
    slow, quick = (
        sorted(answers, key=lambda pieces: pieces[-1].seconds)[ROUNDS // 2] for answers in zip(*rounds)
    )
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    console.print(frame(prompt.turns[-1], slow, quick, quick[-1].seconds, 1.0, lines_of(slow, console)))
    console.save_svg(str(given.out), title="outrider demo")


if __name__ == "__main__":
    main()
