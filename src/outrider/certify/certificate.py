"""A certificate for people, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.bench.conditions import conditions
from outrider.certify.certify import SHOWN, Certificate
from outrider.certify.texts import Difference
from outrider.llm import LLM

BEFORE = 12  # tokens of the text that are shown before a difference

PROMISES = {
    "tokens": "the same text for a seed as plain decoding",
    "law": "the same text where greedy, the same law where sampled",
    "lossy": "nothing: what the model says may change",
}


def about(llm: LLM, config: Mapping[str, Any], made: Certificate) -> dict[str, str]:
    decoder, options = llm.engine.decoder, llm.engine.options
    bits = f", weights in {options.quantization}" if options.quantization else ""
    cache = f", K/V in {options.kv_cache_dtype}" if options.kv_cache_dtype != "auto" else ""
    promise = (
        "exact: rows do not touch each other" if made.exact else "not exact: rounding depends on the batch"
    )
    return {
        "model": f"{options.model} ({llm.engine.checkpoint.spec.architecture})",
        "method": json.dumps(dict(config), default=repr),
        "rule": f"{config.get('verification', 'match')}, which promises {PROMISES[made.promise]}",
        "dtype": str(decoder.dtype).removeprefix("torch.") + bits + cache,
        "kernels": f"{decoder.backend.name} ({promise})",
    }


def panel(llm: LLM, config: Mapping[str, Any], made: Certificate, left_out: int = 0) -> Panel:
    facts = Table.grid(padding=(0, 2))
    for name, value in about(llm, config, made).items():
        facts.add_row(Text(name, style="bold"), Text(value))
    table = Table(show_edge=False, pad_edge=False)
    for name in ("test", "what was compared", "result", ""):
        table.add_column(name)
    for check in made.checks:
        mark = "[bold red]✗[/]" if not check.passed else "[green]✓[/]" if check.judged else "–"
        table.add_row(check.name, check.tested, check.result, mark)
    parts: list[Any] = [facts, "", table, ""]
    if left_out:
        parts += [f"Left out, as they and their answers exceed the context: {left_out} prompts.", ""]
    for difference in sorted(made.differences, key=lambda d: d.explained)[:SHOWN]:
        parts += [Text(told(llm, difference, made.exact)), ""]
    if len(made.differences) > SHOWN:
        parts += [f"… and {len(made.differences) - SHOWN} differences more.", ""]
    parts.append(Text(made.verdict, style="bold green" if made.passed else "bold red"))
    return Panel(Group(*parts), title="Outrider: is speculation lossless?", title_align="left")


def told(llm: LLM, difference: Difference, exact: bool) -> str:
    """One difference in words: where, which tokens, how near, and why."""
    text = _speller(llm)
    params, where = difference.params, len(difference.prompt) + len(difference.before)
    before = "".join(map(text, difference.before[-BEFORE:]))
    start = "".join(map(text, difference.prompt[-BEFORE:]))
    plain, said = (
        repr(text(token)) if token is not None else "nothing: it ended"
        for token in (difference.plain, difference.said)
    )
    asked = (
        f"T = {params.temperature:g}"
        + f", top_p {params.top_p:g}" * (params.top_p < 1)
        + f", seed {params.seed}" * (params.temperature > 0)
    )
    lines = [
        f"Position {where} of …{start!r} → …{before!r} ({asked}): plain decoding says {plain}, speculation {said}."
    ]
    gap = difference.gap
    if gap is not None:
        best = " and ".join(repr(text(token)) for token in gap.best)
        lines.append(
            f"  Plain decoding's two best there, {best}, are {gap.gap:.3g} apart; what was said is {gap.lead:.3g} behind."
        )
    if difference.explained and gap is not None:
        seen = "; with many rows in a forward the model chooses it by itself" if gap.shown else ""
        lines.append(f"  A tie: rounding moves a score by up to {gap.tolerance:.2g} here{seen}.")
    elif exact:
        lines.append(
            "  These kernels compute every row alone, bit for bit: no difference is rounding, this one is a bug."
        )
    elif gap is not None:
        lines.append(
            f"  Rounding moves a score by no more than {gap.tolerance:.2g} here: it does not explain this."
        )
    return "\n".join(lines)


def figures(
    llm: LLM, config: Mapping[str, Any], made: Certificate, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything, for JSON."""
    text = _speller(llm)
    return {
        "conditions": conditions(), **about(llm, config, made), "exact": made.exact, "promise": made.promise, "settings": dict(settings),
        "checks": [
            {"name": c.name, "tested": c.tested, "result": c.result, "passed": c.passed, "figures": c.figures} for c in made.checks
        ],
        "differences": [_difference(difference, text) for difference in made.differences],
        "verdict": made.verdict, "passed": made.passed,
    }  # fmt: skip


def _difference(difference: Difference, text: Callable[[int], str]) -> dict[str, Any]:
    params, gap = difference.params, difference.gap
    found: dict[str, Any] = {
        "prompt": difference.prompt, "text": difference.before, "position": len(difference.prompt) + len(difference.before),
        "plain": difference.plain, "said": difference.said, "temperature": params.temperature, "top_p": params.top_p, "seed": params.seed,
        "tokens": [None if token is None else text(token) for token in (difference.plain, difference.said)],
        "explained": difference.explained,
    }  # fmt: skip
    if gap is not None:
        found |= {
            "best": gap.best, "gap": gap.gap if math.isfinite(gap.gap) else None, "tolerance": gap.tolerance,
            "behind": gap.lead if math.isfinite(gap.lead) else None,
        }  # fmt: skip
    return found


def _speller(llm: LLM) -> Callable[[int], str]:
    """Token id -> its text; the id itself where there is no tokenizer."""
    return lambda token: f"<{token}>" if llm.tokenizer is None else str(llm.tokenizer.decode([token]))
