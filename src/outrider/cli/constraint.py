"""Flags of constrained output, in llama.cpp's spelling."""

from __future__ import annotations

from outrider.cli.flag import Flag
from outrider.cli.flags import GROUPS, Given
from outrider.core.validate import text_of
from outrider.errors import RequestError

GROUPS["constraint"] = (
    (
        Flag("json", str, "--json-schema -j", "JSON schema of the answer, or a file with one."),
        Flag("grammar", str, "--grammar", "GBNF or Lark grammar of the answer."),
        Flag("grammar_file", str, "--grammar-file", "As --grammar, from a file."),
        Flag("regex", str, "--regex", "Regular expression of the whole answer."),
    ),
    "Constrained output",
)


def structured(constraint: Given) -> Given:
    """Sampling parameters of these flags; at most one of them."""
    form = dict(constraint)
    if "grammar_file" in form:
        if "grammar" in form:
            raise RequestError("give either --grammar or --grammar-file.")
        form["grammar"] = text_of(form.pop("grammar_file"), "the grammar file", RequestError)
    if "json" in form and not form["json"].lstrip().startswith("{"):
        form["json"] = text_of(form["json"], "the JSON schema file", RequestError)
    return {"structured_outputs": form} if form else {}
