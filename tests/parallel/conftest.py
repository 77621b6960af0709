"""One engine for every layout, shared by the tests: each starts processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from helpers import answer
from machines import machines
from parallel_cases import LAYOUTS, PROMPTS, crowded, params_of

from outrider import LLM
from outrider.parallel.layout import Layout
from outrider.testing import tiny_checkpoint, visible_parts

Ranks = Callable[[Layout], LLM]
Plain = Callable[[str, float], list[tuple[object, ...]]]
__all__ = ["crowded", "machines"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of four layers, four heads and two K/V heads."""
    return tiny_checkpoint(tmp_path_factory.mktemp("parallel"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def ranks(model: str) -> Ranks:
    """`ranks(layout)`: an engine that cuts prompts into chunks."""
    engines: dict[Layout, LLM] = {}

    def make(layout: Layout) -> LLM:
        if layout not in engines:
            engines[layout] = LLM(
                model,
                tensor_parallel_size=layout.tensor,
                pipeline_parallel_size=layout.pipeline,
                pipeline_layers=",".join(map(str, layout.sizes)) or None,
                max_num_seqs=4,
                max_num_batched_tokens=16,
                max_model_len=64,
                enable_lora=True,
            )
        return engines[layout]

    return make


@pytest.fixture(scope="session")
def plain(ranks: Ranks) -> Plain:
    """`plain(layout, temperature)`: each prompt alone, without speculation and without cached pages."""

    @cache
    def texts(layout: str, temperature: float) -> list[tuple[object, ...]]:
        llm, found = ranks(LAYOUTS[layout]), list[tuple[object, ...]]()
        llm.use(None)
        for prompt, params in zip(PROMPTS, params_of(temperature)):
            llm.engine.forget_prefixes()
            found.append(visible_parts(answer(llm, prompt, params).outputs))
        return found

    return texts
