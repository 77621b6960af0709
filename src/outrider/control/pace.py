"""How many prompt tokens may ride beside rows that are decoding, so that nobody who is being answered waits long for the
next token: a step with a chunk of a prompt may take `PATIENCE` times as long as one without.

Learned from the steps themselves, since what a prompt token costs depends on the machine, the model and how far into its
prompt it lies.  Where nobody is decoding there is nothing to protect, and prompts take the whole budget.
"""

from __future__ import annotations

PATIENCE = 2.5
FIRST = 8  # tokens of the first chunk beside decoding rows, before anything is known
RECENT = 0.2  # weight of the newest step in an average


class Pace:
    """`chunk` says how many tokens the next step may spend on prompts, `learn` what a step took."""

    def __init__(self) -> None:
        self.chunk = FIRST
        self.plain: dict[int, float] = {}  # decoding rows -> seconds of a step without a chunk

    def learn(self, decoding: int, prompt: int, seconds: float) -> None:
        """A step of `decoding` rows with their guesses and `prompt` tokens of prompts took so long."""
        if not decoding:
            return
        if not prompt:
            before = self.plain.get(decoding, seconds)
            self.plain[decoding] = before + RECENT * (
                min(seconds, 2 * before) - before
            )  # one slow step is no new normal
            return
        if prompt * 2 < self.chunk:
            return  # the end of a prompt says little
        if not self.plain:
            self.plain[decoding] = seconds  # with the first chunk in it: too long, until one without comes by
        alone = (
            self.plain.get(decoding)
            or min((abs(rows - decoding), took) for rows, took in self.plain.items())[1]
        )
        each = (seconds - alone) / prompt
        allowed = (PATIENCE - 1) * alone / each if each > 0 else prompt * 2
        self.chunk = max(1, int(min(allowed, self.chunk * 1.5 + 1)))  # shrinks at once, grows step by step
