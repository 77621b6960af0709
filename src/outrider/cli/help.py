"""`--help` on narrow terminals: names of options on several lines where typer's table would cut them, and
paragraphs in lines of the terminal's width.
"""

from __future__ import annotations

import inspect

import typer
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


def wrap(app: typer.Typer) -> None:
    """Use these highlighters in the help of this process, and join the lines of paragraphs in docstrings."""
    rich_utils.highlighter, rich_utils.negative_highlighter = OptionNames(), NegativeNames()
    for command in app.registered_commands:
        if command.help is None and command.callback is not None:
            command.help = joined(command.callback.__doc__ or "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            wrap(group.typer_instance)


def joined(text: str) -> str:
    """One line for each paragraph: typer keeps the line breaks of all but the first."""
    return "\n\n".join(part.replace("\n", " ") for part in inspect.cleandoc(text).split("\n\n"))
