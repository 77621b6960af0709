"""Flags of constrained output, in llama.cpp's spelling."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from outrider.core.validate import text_of
from outrider.errors import RequestError

PANEL = "Constrained output"
JsonSchema = Annotated[
    str | None,
    Option(
        "-j", "--json-schema", help="JSON schema of the answer, or a file with one.", rich_help_panel=PANEL
    ),
]
Grammar = Annotated[
    str | None, Option("--grammar", help="GBNF or Lark grammar of the answer.", rich_help_panel=PANEL)
]
GrammarFile = Annotated[
    str | None, Option("--grammar-file", help="As --grammar, from a file.", rich_help_panel=PANEL)
]
Regex = Annotated[
    str | None, Option("--regex", help="Regular expression of the whole answer.", rich_help_panel=PANEL)
]


def constraint(
    json_schema: str | None, grammar: str | None, grammar_file: str | None, regex: str | None
) -> dict[str, Any]:
    """Sampling parameters of these flags; at most one of them."""
    given = {"json": json_schema, "grammar": grammar, "grammar-file": grammar_file, "regex": regex}
    form = {name: text for name, text in given.items() if text is not None}
    if not form:
        return {}
    if "grammar-file" in form:
        if "grammar" in form:
            raise RequestError("give either --grammar or --grammar-file.")
        form["grammar"] = text_of(form.pop("grammar-file"), "the grammar file", RequestError)
    if "json" in form and not form["json"].lstrip().startswith("{"):
        form["json"] = text_of(form["json"], "the JSON schema file", RequestError)
    return {"structured_outputs": form}
