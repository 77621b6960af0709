"""The line of Claude Code that is new in every request: with it, no prefix would be cached."""

from __future__ import annotations

BILLING = "x-anthropic-billing-header"


def unbilled(text: str) -> str:
    """A text of a system prompt without such a line at its beginning."""
    return text.partition("\n")[2] if text.startswith(BILLING) else text
