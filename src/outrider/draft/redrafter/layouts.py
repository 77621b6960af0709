"""The names under which ReDrafter heads were published, as the reference's own.

There: `input_proj` (where the head is not as wide as its input), `lm_head.0 … n-1` the blocks, `lm_head.n` the matrix to the
vocabulary, `rnn_u` and `rnn_w`.  Neither vLLM nor SGLang reads such heads; TensorRT-LLM reads the reference's names.
"""

from __future__ import annotations

import re

from outrider.checkpoints.heads import Head

KIND = "recurrent_drafting_drafter"  # model_type of the reference's config
AROUND = r"(?:module\.)?(?:drafter\.)?"  # the reference's trainer keeps the head beside its target, in checkpoints of both
OWN = (
    (rf"{AROUND}(?:lm_head|lm_heads)\.(\d+)\.linear\.(weight|bias)", r"lm_head.\1.linear.\2"),
    (rf"{AROUND}(?:lm_head|lm_heads)\.(\d+)\.weight", r"lm_head.\1.weight"),
    (rf"{AROUND}input_projs?\.(weight|bias)", r"input_proj.\1"),
    (rf"{AROUND}rnn_([uw])\.(weight|bias)", r"rnn_\1.\2"),
)
NUMBERED = (  # Medusa's look the same
    (r"0\.(\d+)\.linear\.(weight|bias)", r"lm_head.\1.linear.\2"),
    (r"0\.(\d+)\.weight", r"lm_head.\1.weight"),
)
CONVERTED = (  # by TensorRT-LLM; {n}: how many blocks there are
    (r"drafter\.layers\.(\d+)\.linear\.(weight|bias)", r"lm_head.\1.linear.\2"),
    (r"drafter\.lm_head\.weight", r"lm_head.{n}.weight"),
)
SIGNS = re.compile(rf"{AROUND}(lm_heads?\.\d+\.linear|rnn_[uw])\.weight|drafter\.layers\.\d+\.linear\.weight")


def claims_of(head: Head) -> int:
    """As `Drafter.claims`."""
    if any(SIGNS.fullmatch(name) for name in head):
        return 2
    if head.config.get("model_type") != KIND:
        return 0
    return 2 if any(re.fullmatch(pattern, name) for pattern, _ in NUMBERED for name in head) else 1


def translate(head: Head) -> Head:
    """The head under the reference's names, without what is not of it."""
    count = sum(bool(re.fullmatch(r"drafter\.layers\.\d+\.linear\.weight", name)) for name in head)

    def change(name: str) -> str | None:
        for pattern, own in (*OWN, *NUMBERED, *CONVERTED):
            if found := re.fullmatch(pattern, name):
                return found.expand(own.replace("{n}", str(count)))
        return None

    return head.renamed(change)


def blocks(head: Head) -> int:
    """How many there are before the matrix to the vocabulary."""
    last = [int(name.split(".")[1]) for name in head if re.fullmatch(r"lm_head\.\d+\.weight", name)]
    return max(last, default=sum(name.endswith(".linear.weight") for name in head))
