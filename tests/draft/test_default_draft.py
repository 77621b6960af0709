"""A draft model that is not named: the built-in one for the built-in targets, an error for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider import LLM, ConfigError
from outrider.testing import tiny_checkpoint

CONFIG = {"method": "draft_model", "num_speculative_tokens": 2}


def test_a_built_in_target_takes_the_built_in_draft() -> None:
    llm = LLM("builtin", speculative_config=CONFIG, max_num_seqs=1, max_model_len=64)
    assert llm.engine.drafter.options.model == "builtin-draft"


@pytest.mark.parametrize("more", [{}, {"vocab_mismatch": "retokenize"}], ids=str)
def test_another_target_needs_a_model(tmp_path: Path, more: dict[str, str]) -> None:
    """The error was about the built-in draft, which had not been asked for."""
    llm = LLM(tiny_checkpoint(tmp_path), max_num_seqs=1)
    with pytest.raises(ConfigError, match="the method needs 'model'"):
        llm.use({**CONFIG, **more})


def test_draws_that_the_rule_does_not_ask_for_are_refused(tmp_path: Path) -> None:
    """`match` reads no q, so nothing is sampled; in a mix, too."""
    folder = tiny_checkpoint(tmp_path)
    draft = {"method": "draft_model", "model": folder, "siblings": 2, "sibling_draws": "independent"}
    mix = {"method": "union", "drafters": [{"method": "ngram"}, draft]}
    for config in (draft, mix):
        with pytest.raises(ConfigError, match="sibling_draws = 'independent' has no effect without"):
            LLM(folder, device="cpu", speculative_config=config)
        LLM(folder, device="cpu", speculative_config={**config, "verification": "rejection"})
