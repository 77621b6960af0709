"""The built-in checkpoint, and a compiler of grammars for its tokenizer."""

from __future__ import annotations

import pytest

from outrider.checkpoints.hub import Checkpoint
from outrider.sampling.grammar.compiler import GrammarCompiler


@pytest.fixture(scope="package")
def builtin() -> Checkpoint:
    return Checkpoint.open("builtin")


@pytest.fixture(scope="package")
def compiler(builtin: Checkpoint) -> GrammarCompiler:
    return GrammarCompiler(builtin.tokenizer, builtin.spec.vocabulary, builtin.ending)
