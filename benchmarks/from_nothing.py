"""Minutes of training, from nothing, until a head for the built-in target is better than the draft model.

    python benchmarks/from_nothing.py [--method eagle3] [--options JSON] [--minutes 3] [--json OUT]

The minutes count all that `outrider train` does: answers of the target, features and steps, without
evaluations.  At every evaluation the head and `builtin-draft` answer the same held-out prompts in turn, one
request at a time, greedy, chains of 3, and plain decoding beside them: of this small target it may be faster
than both.  `better`: the minutes after which the head decoded more tokens a second than the draft model, and
had more tokens per step; null if never.  Give OMP_NUM_THREADS=2; the machine should be idle.  On a busy one
`processor minutes` hold: the processor time of all threads, the trainer's own evaluations included.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from command_line import parser_of, settings, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outrider import LLM, SamplingParams
from outrider.bench.conditions import conditions
from outrider.config import options
from outrider.core.row import Speculation
from outrider.engine.chat_template import render
from outrider.train.loop import Trainer
from outrider.train.methods import method
from outrider.train.report import Report
from outrider.train.run import train
from recipes.builtin import prompts, tasks

DEPTH, NEW, HELD, ROUNDS = 3, 64, 8, 2
DRAFT = {"method": "draft_model", "model": "builtin-draft", "num_speculative_tokens": DEPTH}
SMALL = {
    "redrafter": {"layers": 1, "exit_dim": 160},
    "medusa": {"heads": 3, "own": False},
    "eagle": {"inner": 512},
    "eagle3": {"inner": 512, "draft_vocab_size": 2048, "test_steps": 3},
}


class Comparison(Report):
    """Compares the head with the draft model at every evaluation."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        rng = random.Random(1)
        asked = [tasks.make(kind, rng, "values").turns[0].prompt for kind in rng.sample([*tasks.KINDS], HELD)]
        self.prompts = [
            render(llm.tokenizer, {"messages": [{"role": "user", "content": text}]}) for text in asked
        ]
        self.llm, self.rows, self.began, self.own = llm, list[dict[str, Any]](), time.perf_counter(), 0.0
        self.processor_began, self.processor_own = time.process_time(), 0.0

    def start(self, trainer: Trainer, *given: Any) -> None:
        self.trainer = trainer

    def evaluated(self, record: dict[str, Any]) -> None:
        began, processor, trainer = time.perf_counter(), time.process_time(), self.trainer
        minutes = (began - self.began - trainer.seconds["evaluation"] - self.own) / 60
        spent = (processor - self.processor_began - self.processor_own) / 60
        head = trainer.method.speculation(trainer.options.work / "head", DEPTH)
        configs: dict[str, Mapping[str, Any] | None] = {"plain": None, "draft model": DRAFT, "head": head}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in configs}
        for _ in range(ROUNDS):
            for name, config in configs.items():
                found[name].append(self.answer(config))
        best = {name: max(each, key=lambda one: one["tokens/s"]) for name, each in found.items()}
        self.llm.use(None)
        times = {"minutes": round(minutes, 2), "processor minutes": round(spent, 2)}
        self.rows.append({"step": record["step"], "answer tokens": trainer.tokens, **times, **best})
        print(json.dumps(self.rows[-1]), flush=True)
        self.own += time.perf_counter() - began
        self.processor_own += time.process_time() - processor

    def better(self, figure: str) -> float | None:
        """Minutes of the first evaluation where the head's figure was larger than the draft model's."""
        found = (row["minutes"] for row in self.rows if row["head"][figure] > row["draft model"][figure])
        return next(found, None)

    def answer(self, config: Mapping[str, Any] | None) -> dict[str, float]:
        self.llm.use(config)
        params = SamplingParams(temperature=0.0, max_tokens=NEW, detokenize=False)
        self.llm.generate(self.prompts[0], params)
        began, total, tokens = time.perf_counter(), Speculation(), 0
        for prompt in self.prompts:
            (output,) = self.llm.generate(prompt, params)
            total, tokens = total + output.outputs[0].speculation, tokens + len(output.outputs[0].token_ids)
        speed = tokens / (time.perf_counter() - began)
        return {"tokens/s": round(speed, 1), "tokens per step": round(total.tokens_per_step, 3)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--options", type=json.loads, help="of the method; default: sizes as shipped")
    parser.add_argument("--prompts", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    parser.add_argument("--minutes", type=float, default=3.0, help="begin no step after this time")
    given = parser.parse_args()
    sizes = SMALL.get(given.method, {}) if given.options is None else given.options
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        lines = [json.dumps(one) + "\n" for one in prompts.records(given.prompts, 0, None, 0)]
        data.write_text("".join(lines))
        llm = LLM("builtin", max_num_seqs=32, max_model_len=512, speculative_config=None)
        run = {
            "data": [str(data)],
            "out": f"{folder}/head",
            "steps": given.steps,
            "length": 160,
            "answer_tokens": 96,
            "evaluate_every": given.every,
            "evaluate_prompts": 2,
            "minutes": given.minutes,
            "optimizer": "muon",
            "batch": 16,
            "rate": 1.5e-3,
            **sizes,
        }
        comparison = Comparison(llm)
        train(llm, given.method, options(method(given.method).Options, run, "training option"), comparison)
    better = {figure: comparison.better(figure) for figure in ("tokens/s", "tokens per step")}
    print(json.dumps({"better": better}))
    made = {"options": settings(given), "rows": comparison.rows, "better": better}
    write(given.json, {**conditions(), **made})


if __name__ == "__main__":
    main()
