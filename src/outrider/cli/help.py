"""Names of options in `--help`: all of them, on several lines where typer's table would cut them."""

from __future__ import annotations

from rich.highlighter import RegexHighlighter
from rich.text import Text
from typer import rich_utils


class Names(RegexHighlighter):
    """Highlighter that breaks lists of names, such as "--temp,--temperature", between two names."""

    def __call__(self, text: str | Text) -> Text:
        if not isinstance(text, str) or not text.startswith("-"):
            return super().__call__(text)
        names = super().__call__(text.replace(",", " "))
        names.overflow = "fold"
        return names


class OptionNames(Names, rich_utils.OptionHighlighter):
    highlights = rich_utils.OptionHighlighter.highlights


class NegativeNames(Names, rich_utils.NegativeOptionHighlighter):
    highlights = rich_utils.NegativeOptionHighlighter.highlights


def wrap_names() -> None:
    """Use these highlighters in the help of this process."""
    rich_utils.highlighter, rich_utils.negative_highlighter = OptionNames(), NegativeNames()
