"""Checks of what users give."""

from __future__ import annotations

import pytest

from outrider import ConfigError
from outrider.core.validate import text_of


@pytest.mark.parametrize("name", ["no/such/file", "a\0b", "~nobody-of-this-name/x", "."])
def test_a_file_that_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"the prompt file .* cannot be read"):
        text_of(name, "the prompt file")
