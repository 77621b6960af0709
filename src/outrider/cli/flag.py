"""An option of the command line, and flags of other programs that have no effect or are refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args

import typer

METAVARS = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """An option of a command.

    field: what it sets in its group.  names: on the command line, the first one is long.
    read: typed value -> value of the field.  variable: of the environment, for a value that is not given.
    """

    field: str
    kind: Any
    names: str
    help: str
    default: Any = None
    read: Callable[[Any], Any] = lambda value: value
    hidden: bool = False
    variable: str | None = None

    @property
    def word(self) -> str:
        """The name of the Python parameter."""
        return re.split("[ /]", self.names)[0].lstrip("-").replace("-", "_")

    def parameter(self, panel: str) -> inspect.Parameter:
        kinds = (*get_args(self.kind), self.kind)
        metavar = next((METAVARS[kind] for kind in kinds if kind in METAVARS), None)
        option = typer.Option(
            *self.names.split(),
            help=self.help,
            rich_help_panel=panel,
            metavar=metavar,
            show_default=self.default not in (None, []),
            hidden=self.hidden,
            envvar=self.variable,
            show_envvar=False,
        )
        kind = self.kind if self.default is not None else self.kind | None
        return inspect.Parameter(
            self.word,
            inspect.Parameter.KEYWORD_ONLY,
            default=self.default,
            annotation=Annotated[kind, option],
        )


class Names(NamedTuple):
    """Flags with a value, and those without one.

    "|" is between two flags, a space between two names of one.  The first name lacks its dashes.
    """

    valued: str = ""
    bare: str = ""


def unsupported(table: Mapping[str, Names]) -> tuple[Flag, ...]:
    """Flags that `--help` does not show, from reason -> names.  Their help is the reason."""
    made: list[Flag] = []
    for reason, (valued, bare) in table.items():
        made += [Flag("", str, f"--{names}", reason, hidden=True) for names in valued.split("|") if names]
        made += [
            Flag("", bool, f"--{names}", reason, False, hidden=True) for names in bare.split("|") if names
        ]
    return tuple(made)
