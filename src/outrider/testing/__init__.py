"""Helpers for tests of a drafter or a rule: tiny models, scripts, a step driver, exact enumeration.

docs/testing.md shows them at work.
"""

from outrider.testing.checkpoints import bare_checkpoint, random_model, tiny_checkpoint, tiny_tokenizer
from outrider.testing.driver import (
    EngineDriver,
    check_idle,
    check_statistics,
    run_staggered,
    use_example,
    visible_parts,
)
from outrider.testing.enumeration import Choices, Emissions, RandomModels, enumerate_rule
from outrider.testing.rows import (
    FakeTarget,
    accepted_path,
    check_tree,
    drafted_batch,
    make_drafter,
    make_row,
    propose_tree,
    proposed_tree,
    replay,
)
from outrider.testing.same_text import assert_same_text, random_prompts
from outrider.testing.scripts import KnownTexts, Script, Scripts

__all__ = [
    "Choices",
    "Emissions",
    "EngineDriver",
    "FakeTarget",
    "KnownTexts",
    "RandomModels",
    "Script",
    "Scripts",
    "accepted_path",
    "assert_same_text",
    "bare_checkpoint",
    "check_idle",
    "check_statistics",
    "check_tree",
    "drafted_batch",
    "enumerate_rule",
    "make_drafter",
    "make_row",
    "propose_tree",
    "proposed_tree",
    "random_model",
    "random_prompts",
    "replay",
    "run_staggered",
    "tiny_checkpoint",
    "tiny_tokenizer",
    "use_example",
    "visible_parts",
]
