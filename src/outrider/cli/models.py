"""`outrider models`: what models are, and the memory that they take."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from outrider.cli.flags import MODEL, Given, clipped, shared
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.inspect.card import Card
    from outrider.inspect.heads import HeadCard
    from outrider.inspect.stores import StoreCard


class Description(NamedTuple):
    """columns: architecture, weights, memory and decoder, in the overview.  rows: of the sheet, by name."""

    columns: tuple[str, str, str, str]
    rows: dict[str, str]


@shared
def models(
    form: Given,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME|FOLDER|FILE]…", help="Default: the built-in models and the hub's cache."
        ),
    ] = None,
    more: Annotated[list[str] | None, Option(*MODEL, help="The same, as an option.")] = None,
    max_num_seqs: Annotated[int, Option("--max-num-seqs", help="Requests in a batch.")] = 16,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per model.")] = False,
) -> None:
    """Describe models without loading them: architecture, decoder and memory.

    Of a trained draft head: its method and the targets that it fits.  Of a datastore: its size and
    vocabulary.
    """
    from outrider.config import EngineOptions
    from outrider.inspect.card import card_of, known
    from outrider.inspect.heads import head_card
    from outrider.inspect.stores import store_card

    names = [*(names or ()), *(more or ())]

    def cards(name: str) -> Iterator[Card | HeadCard | StoreCard]:
        if (store := store_card(name)) is not None:
            yield store
            return
        head = head_card(name, form.get("revision"))
        if head is None or head.inside:
            options, _ = clipped({"model": name, **form}, None)
            yield card_of(EngineOptions(max_num_seqs=max_num_seqs, **options))
        if head is not None:
            yield head

    console = Console()
    if not names and not as_json:
        console.print(overview(cards))
        return
    for name in names or known():
        for card in cards(name):
            if as_json:
                typer.echo(json.dumps(dataclasses.asdict(card)))
            else:
                console.print(sheet(card))


def overview(cards: Callable[[str], Iterator[Card | HeadCard | StoreCard]]) -> Table:
    from outrider.inspect.card import known

    made = Table(title="Available models", title_justify="left", title_style="bold", show_edge=False)
    made.add_column("model", no_wrap=True)  # a name is typed as it is shown
    made.add_column("architecture", overflow="fold", min_width=len("LlamaForCausalLM"))
    for column in ("weights", "memory", "runs on"):
        made.add_column(column, overflow="fold")
    for name in known():
        try:
            for card in cards(name):
                made.add_row(escape(name), *described(card).columns)
        except OutriderError as error:
            made.add_row(escape(name), "", "", "", escape(str(error)))
    return made


def sheet(card: Card | HeadCard | StoreCard) -> Table:
    made = Table(title=escape(card.name), title_justify="left", title_style="bold", show_header=False)
    for name, value in described(card).rows.items():
        made.add_row(name, value)
    return made


def described(card: Card | HeadCard | StoreCard) -> Description:
    kinds: Mapping[str, Callable[[Any], Description]]
    kinds = {"Card": _model, "HeadCard": _head, "StoreCard": _store}
    texts: dict[str, Any] = {name: escape(text) for name, text in vars(card).items() if isinstance(text, str)}
    return kinds[type(card).__name__](dataclasses.replace(card, **texts))


def _model(card: Card) -> Description:
    weights, memory = _count(card.parameters), _bytes(card.total_bytes)
    heads = f"{card.heads} heads, {card.kv_heads} of keys and values"
    rows = {
        "architecture": card.architecture,
        "runs on": _refused(card) or f"[green]{card.runs_on}[/], in {card.dtype}",
        "weights": f"{weights} (stored: {_stored(card)})",
        "shape": f"{card.layers} layers of {card.hidden}, {heads}",
        "vocabulary": f"{card.vocabulary:,}",
        "context": f"{card.context:,} tokens",
        "chat template": "yes" if card.chat_template else "no",
    }
    if card.prediction_layers:
        rows["prediction layers"] = f'{card.prediction_layers}, which {{"method": "mtp"}} drafts with'
    if card.mask_token is not None:
        rows["draft model"] = f"drafts in one forward (PARD), with the mask token {card.mask_token}"
    if not card.refused:
        requests = f"K/V of {card.requests} × {card.request_tokens:,} tokens"
        rows |= {
            "memory: weights": _bytes(card.weight_bytes),
            "K/V of one token": _bytes(card.token_bytes),
            requests: f"{_bytes(card.cache_bytes)} ({_bytes(card.free_bytes)} at most)",
            "together": f"[bold]{memory}[/]",
        }
    return Description((card.architecture, weights, memory, card.refused or card.runs_on), rows)


def _store(card: StoreCard) -> Description:
    size, tokenizer = _bytes(card.bytes), f", tokenizer {card.tokenizer}" if card.tokenizer else ""
    rows = {
        "datastore": f"{card.tokens:,} tokens",
        "for targets with": f"a vocabulary of {card.vocabulary:,}{tokenizer}",
        "in the file": size,
    }
    return Description(("datastore", "–", size, "its target"), rows)


def _head(card: HeadCard) -> Description:
    weights, size = _count(card.parameters), _bytes(card.bytes)
    unknown = "a hidden size that the file does not tell"
    rows = {
        "draft head": _refused(card) or f"for method [green]{card.method}[/]",
        "layout": card.layout,
        "heads": str(card.levels or "one, which recurs"),
        "for targets with": unknown if card.hidden is None else f"hidden size {card.hidden}",
        "draft vocabulary": "the target's" if card.vocabulary is None else f"{card.vocabulary:,}",
        "weights": f"{weights} (stored: {_stored(card)})",
        "in the file": size,
    }
    return Description((f"{card.method} head", weights, size, card.refused or "its target"), rows)


def _refused(card: Card | HeadCard) -> str | None:
    return f"[bold red]nothing: {card.refused}[/]" if card.refused else None


def _stored(card: Card | HeadCard) -> str:
    return ", ".join(f"{_count(n)} {dtype}" for dtype, n in card.stored_as.items())


def _count(number: int) -> str:
    return _in_units(number, {" B": 10**9, " M": 10**6, " k": 1000}) or str(number)


def _bytes(number: int) -> str:
    return _in_units(number, {" GiB": 1 << 30, " MiB": 1 << 20, " KiB": 1 << 10}) or f"{number} bytes"


def _in_units(number: int, units: Mapping[str, int]) -> str | None:
    """The number in the first unit that is not too large; None if all are."""
    return next((f"{number / size:.1f}{unit}" for unit, size in units.items() if number >= size), None)
