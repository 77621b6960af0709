"""An option that several commands have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

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
