"""Evaluations of a run: held-out loss, and acceptance of the saved head, measured by the engine itself."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.params import SamplingParams
from outrider.core.row import LoRARequest, Speculation
from outrider.llm import LLM
from outrider.train.base import replace_text
from outrider.train.loop import Trainer
from outrider.train.report import Report


class Evaluation:
    """Evaluates the weights as they are, and adds a record.  held: the texts, by number.

    by_depth[d]: share of the drafts of which more than d tokens were accepted.
    """

    def __init__(self, llm: LLM, trainer: Trainer, held: Sequence[int], report: Report) -> None:
        self.llm, self.trainer, self.report = llm, trainer, report
        self.held = held[: trainer.options.evaluate_prompts]

    def __call__(self) -> None:
        trainer, began = self.trainer, time.perf_counter()
        texts, method, folder = trainer.features.texts, trainer.method, trainer.options.work / "head"
        method.save(folder)
        config = method.speculation(folder, trainer.options.depth)
        prompts = [texts[i].ids[: texts[i].prompt] for i in self.held]
        total = drafted(self.llm, prompts, trainer.options.evaluate_tokens, config, method.adapter(folder))
        by_depth = [n / total.drafts for n in total.accepted_at]
        record = {"step": trainer.step, "held_loss": trainer.held_loss(self.held), "by_depth": by_depth}
        trainer.records.append({**record, "tokens_per_step": total.tokens_per_step})
        trainer.seconds["evaluation"] += time.perf_counter() - began
        write_log(trainer)
        self.report.evaluated(trainer.records[-1])


def drafted(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    speculative_config: Mapping[str, Any],
    adapter: LoRARequest | None = None,
) -> Speculation:
    """Draft statistics of greedy answers of so many tokens.  Afterwards `llm` has no drafter.

    The engine's drafter is replaced: a second engine would need K/V memory of its own.
    """
    asked: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    llm.use(speculative_config)
    try:
        outputs = llm.generate(asked, params, lora_request=adapter)
        return sum((output.outputs[0].speculation for output in outputs), Speculation())
    finally:
        llm.use(None)
        if adapter is not None and llm.engine.adapters is not None:
            llm.engine.adapters.drop(adapter)  # the next evaluation reads other weights from its folder


def write_log(trainer: Trainer) -> None:
    """work/log.jsonl: an evaluation a line."""
    lines = "".join(json.dumps(record) + "\n" for record in trainer.records)
    replace_text(trainer.options.work / "log.jsonl", lines)
