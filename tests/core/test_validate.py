"""Checks of what users give."""

from __future__ import annotations

import pytest

from outrider import ConfigError
from outrider.core.validate import NoOptions, made_of, text_of


@pytest.mark.parametrize("name", ["no/such/file", "a\0b", "~nobody-of-this-name/x", "."])
def test_a_file_that_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"the prompt file .* cannot be read"):
        text_of(name, "the prompt file")


def test_two_parts_may_have_options_of_one_class() -> None:
    assert made_of({}, [NoOptions, NoOptions], "config") == [NoOptions(), NoOptions()]
