"""Published files of MLP speculators.  Ours number modules in a row, whether there are several or one.

    IBM, Arctic MLP   emb.{i} proj.{i} ln.{i} head.{i}, with or without "speculator." in front
    Arctic sum_rnn    emb.{i}.{j} proj.{i}.{j} ln.{i}.{j} head.{i}: norms (each before a GELU) and linears

i is the step.  Where steps share their weights, the file holds them once or under all names.
"""

from __future__ import annotations

import re

from outrider.checkpoints.heads import Head
from outrider.heads.layouts import HeadFormat, Layout, unchanged
from outrider.heads.speculators import KINDS, PREFIX, refused, steps_of

LSTM = re.compile(r"(^|\.)(forget_|projs\.)")  # in names of another method's tensors
ROWS = (
    *((f"{kind}.{{i}}.{{kind}}", f"{kind}.{{i}}.0.{{kind}}") for kind in KINDS[:3]),
    *unchanged(*(f"{kind}.{{i}}.{{j}}.{{kind}}" for kind in KINDS[:3]), "head.{i}.weight"),
)


def _complete(head: Head) -> Head:
    steps_of(head)
    return head


FORMAT = HeadFormat(
    (
        Layout("Arctic sum_rnn", ("proj.0.0.weight",), ROWS, (PREFIX,)),
        Layout("IBM", ("proj.0.weight",), ROWS, (PREFIX,)),
    ),
    hidden=(("proj.0.0.weight", 1),),
    vocabulary=("head.0.weight",),
    numbered=("emb.{i}.{rest}",),
    kinds="mlp_speculator|mlp",
    refused=refused,
    finish=_complete,
)
