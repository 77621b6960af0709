"""Texts of hybrid models by plain decoding, and scripts of drafts around them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from helpers import answer
from hybrids import write

from outrider import LLM, SamplingParams
from outrider.testing import KnownTexts, Scripts, check_idle, run_staggered, visible_parts

POSITIONS, CHUNK, NEW = 96, 20, 14
LENGTHS = (1, 6, 23, 40, 23)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(3, 300) for _ in range(length)] for length in lengths]


def sampling(temperature: float, count: int = len(LENGTHS)) -> list[SamplingParams]:
    """Every other prompt has two samples, if they differ."""
    return [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=NEW,
            ignore_eos=True,
            n=2 if i % 2 and temperature else 1,
        )
        for i in range(count)
    ]


class Case:
    """An engine of a hybrid, and texts of plain decoding."""

    def __init__(self, name: str, folder: Path, positions: int = POSITIONS, chunk: int = CHUNK) -> None:
        self.name, self.folder = name, str(folder)
        self.theirs = write(name, folder)
        self.llm = LLM(self.folder, max_num_seqs=3, max_model_len=positions, max_num_batched_tokens=chunk)
        assert self.llm.engine.exact
        self.truth, self.plain = KnownTexts(), dict[Any, Any]()
        self.scripts = Scripts(self.truth)

    def expected(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        """Texts of plain decoding, each prompt alone and without cached pages."""
        self.llm.use(None)
        self.llm.engine.cache.prefix_caching = False
        found = []
        for prompt, p in zip(prompts, params):
            key = (*prompt, p.temperature, p.seed, p.n)
            if key not in self.plain:
                outputs = answer(self.llm, prompt, p).outputs
                self.truth.learn(prompt, p.seed or 0, outputs)
                self.plain[key] = visible_parts(outputs)
            found.append(self.plain[key])
        return found

    def script(self, kind: str, nodes: int = 24, depth: int = 6) -> dict[str, Any]:
        script = getattr(self.scripts, kind)
        return {"method": "scripted", "script": script, "nodes": nodes, "num_speculative_tokens": depth}


def texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    found = [visible_parts(output.outputs) for output in run_staggered(llm, prompts, params)]
    check_idle(llm)
    return found
