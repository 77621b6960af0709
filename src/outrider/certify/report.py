"""A certificate as a panel on the terminal, and as JSON."""

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
from outrider.certify.certificate import Certificate
from outrider.certify.texts import Difference
from outrider.llm import LLM

CONTEXT_TOKENS = 12  # shown before a difference
MAX_SHOWN = 5  # differences
REPORTED = ("name", "tested", "result", "passed", "figures")  # of a check

PROMISES = {
    "tokens": "the same text for a seed as plain decoding",
    "distribution": "the same text if greedy, the same distribution if sampled",
    "lossy": "nothing: the output may change",
}


def subject(llm: LLM, config: Mapping[str, Any], certificate: Certificate) -> dict[str, str]:
    """The tested configuration: model, method, rule, number formats and kernels."""
    decoder, options = llm.engine.decoder, llm.engine.options
    bits = f", weights in {options.quantization}" if options.quantization else ""
    cache = f", K/V in {options.kv_cache_dtype}" if options.kv_cache_dtype != "auto" else ""
    kernels = "exact: a row does not depend" if certificate.exact else "not exact: rounding depends"
    return {
        "model": f"{options.model} ({llm.engine.checkpoint.spec.architecture})",
        "method": json.dumps(dict(config), default=repr),
        "rule": f"{config.get('verification', 'match')}, which promises {PROMISES[certificate.promise]}",
        "dtype": str(decoder.dtype).removeprefix("torch.") + bits + cache,
        "kernels": f"{decoder.backend.name} ({kernels} on the batch)",
    }


def panel(llm: LLM, config: Mapping[str, Any], certificate: Certificate, left_out: int = 0) -> Panel:
    """The certificate for the terminal.  left_out: prompts that exceed the context."""
    facts = Table.grid(padding=(0, 2))
    for name, value in subject(llm, config, certificate).items():
        facts.add_row(Text(name, style="bold"), Text(value))
    table = Table(show_edge=False, pad_edge=False)
    for name in ("test", "what was compared", "result", ""):
        table.add_column(name)
    for check in certificate.checks:
        mark = "[bold red]✗[/]" if not check.passed else "[green]✓[/]" if check.judged else "–"
        table.add_row(check.name, check.tested, check.result, mark)
    parts: list[Any] = [facts, "", table, ""]
    if left_out:
        parts += [f"Left out, as prompt and answer exceed the context: {left_out} prompts.", ""]
    for difference in sorted(certificate.differences, key=lambda d: d.explained)[:MAX_SHOWN]:
        parts += [Text(describe(llm, difference, certificate.exact)), ""]
    if len(certificate.differences) > MAX_SHOWN:
        parts += [f"… and {len(certificate.differences) - MAX_SHOWN} differences more.", ""]
    parts.append(Text(certificate.verdict, style="bold green" if certificate.passed else "bold red"))
    return Panel(Group(*parts), title="Outrider: is speculation lossless?", title_align="left")


def describe(llm: LLM, difference: Difference, exact: bool) -> str:
    """One difference in words: position, tokens, distance of their scores, and reason."""
    text = _token_text(llm)
    params, where = difference.params, len(difference.prompt) + len(difference.before)
    before = "".join(map(text, difference.before[-CONTEXT_TOKENS:]))
    start = "".join(map(text, difference.prompt[-CONTEXT_TOKENS:]))
    plain, speculative = (
        repr(text(token)) if token is not None else "nothing: it ended"
        for token in (difference.plain, difference.speculative)
    )
    asked = (
        f"T = {params.temperature:g}"
        + f", top_p {params.top_p:g}" * (params.top_p < 1)
        + f", seed {params.seed}" * (params.temperature > 0)
    )
    lines = [
        f"Position {where} of …{start!r} → …{before!r} ({asked}): plain decoding emits {plain}, "
        f"speculation {speculative}."
    ]
    gap = difference.gap
    if gap is not None:
        best = " and ".join(repr(text(token)) for token in gap.best)
        lines.append(
            f"  The two highest scores of plain decoding, of {best}, are {gap.gap:.3g} apart; the other "
            f"token is {gap.lead:.3g} behind."
        )
    if difference.explained and gap is not None:
        shown = "; with all rows in one forward the model selects it too" if gap.reproduced else ""
        lines.append(f"  A tie: rounding moves a score by up to {gap.tolerance:.2g} here{shown}.")
    elif exact:
        lines.append(
            "  These kernels are row-invariant, bit for bit: rounding explains no difference, this one is a "
            "bug."
        )
    elif gap is not None:
        lines.append(
            f"  Rounding moves a score by no more than {gap.tolerance:.2g} here: it does not explain this."
        )
    return "\n".join(lines)


def figures(
    llm: LLM, config: Mapping[str, Any], certificate: Certificate, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole certificate, for JSON."""
    text = _token_text(llm)
    return {
        "conditions": conditions(),
        **subject(llm, config, certificate),
        "exact": certificate.exact,
        "promise": certificate.promise,
        "settings": dict(settings),
        "checks": [{name: getattr(check, name) for name in REPORTED} for check in certificate.checks],
        "differences": [_difference_figures(difference, text) for difference in certificate.differences],
        "verdict": certificate.verdict,
        "passed": certificate.passed,
    }


def _difference_figures(difference: Difference, text: Callable[[int], str]) -> dict[str, Any]:
    prompt, before, gap = difference.prompt, difference.before, difference.gap
    figures: dict[str, Any] = {"prompt": prompt, "text": before, "position": len(prompt) + len(before)}
    tokens = {"plain": difference.plain, "speculative": difference.speculative}
    figures |= tokens | {name: getattr(difference.params, name) for name in ("temperature", "top_p", "seed")}
    figures["tokens"] = [None if token is None else text(token) for token in tokens.values()]
    figures["explained"] = difference.explained
    if gap is not None:
        figures["best"], figures["tolerance"] = gap.best, gap.tolerance
        figures["gap"] = gap.gap if math.isfinite(gap.gap) else None
        figures["behind"] = gap.lead if math.isfinite(gap.lead) else None
    return figures


def _token_text(llm: LLM) -> Callable[[int], str]:
    """Token id -> its text; the id itself where there is no tokenizer."""
    return lambda token: f"<{token}>" if llm.tokenizer is None else str(llm.tokenizer.decode([token]))
