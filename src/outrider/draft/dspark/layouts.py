"""Published files of DSpark heads: a block's, and

                          speculators (vLLM)               SpecForge (SGLang)
    the table             markov_w1 [V, rank], markov_w2 [Vd, rank]; gate_proj or joint_proj of other kinds
    the acceptance        confidence_head.proj
    kind of the table     markov_head_type                 dflash_config.markov_head_type,
                                                           projector_type "dspark"
The anchor's row predicts by default.
"""

from __future__ import annotations

import re

from outrider.checkpoints.heads import Head
from outrider.heads.block_layouts import block_format, from_anchor, kind_of

VANILLA, GATED, RNN = MARKOV = ("vanilla", "gated", "rnn")
TYPE = "dspark"
TENSORS = re.compile("markov|confidence_head")  # in their published names


def anchored(head: Head) -> bool:
    """`from_anchor` of a file of this kind."""
    usual = kind_of(head) == TYPE or any(name.endswith("markov_w1.weight") for name in head)
    return from_anchor(head, usual)


def _refused(head: Head) -> str:
    kind = head.config.get("markov_head_type", VANILLA)
    return "" if kind in MARKOV else f"its markov_head_type is {kind!r}, and none of {', '.join(MARKOV)}"


FORMAT = block_format(
    f"{TYPE}|DSpark.*",
    rows=(
        ("markov_head.markov_w{i}.{kind}", "markov_w{i}.{kind}"),
        ("markov_head.gate_proj.{kind}", "gate_proj.{kind}"),
        ("markov_head.joint_proj.{kind}", "joint_proj.{kind}"),
    ),
    known=r"(markov_w[12]|(gate|joint|confidence_head\.)_?proj)\.(weight|bias)",
    variants=(("markov", "DSpark with another table"),),
    anchored=anchored,
    refused=_refused,
)
