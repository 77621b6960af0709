"""Published names of ReDrafter heads.  Ours are the reference's, without optional prefixes.

    input_proj           where the head is not as wide as its input
    lm_head.{i}.linear   residual block i of n
    lm_head.{n}          the matrix to the vocabulary
    rnn_u, rnn_w         the recurrence

The reference's trainer saves the head beside its target.  vLLM and SGLang do not read such heads;
TensorRT-LLM converts them.
"""

from __future__ import annotations

from outrider.checkpoints.heads import Head
from outrider.heads.layouts import HeadFormat, Layout, matching, unchanged

MODEL_TYPE = "recurrent_drafting_drafter"  # of the reference's config
SHARED = (
    ("input_projs.{kind}", "input_proj.{kind}"),
    *unchanged("input_proj.{kind}", "rnn_u.{kind}", "rnn_w.{kind}"),
)


def _is_redrafter(head: Head) -> bool:
    return head.config.get("model_type") == MODEL_TYPE


def _block_count(head: Head) -> dict[str, int]:
    return {"blocks": sum(1 for _ in matching(head, "drafter.layers.{i}.linear.weight"))}


CONVERTED = Layout(
    "TensorRT-LLM",
    ("drafter.layers.{i}.linear.weight",),
    (
        ("layers.{i}.linear.{kind}", "lm_head.{i}.linear.{kind}"),
        ("lm_head.weight", "lm_head.{blocks}.weight"),
        *SHARED,
    ),
    ("drafter.",),
    numbers=_block_count,
    beside_target=True,
)
NUMBERED = Layout(  # Medusa's names are the same
    "reference, numbered",
    ("0.{i}.linear.weight", "0.{i}.weight"),
    (("0.{i}.linear.{kind}", "lm_head.{i}.linear.{kind}"), ("0.{i}.weight", "lm_head.{i}.weight"), *SHARED),
    applies=_is_redrafter,
)
REFERENCE = Layout(
    "reference",
    ("lm_head.{i}.linear.weight", "lm_heads.{i}.linear.weight", "rnn_u.weight", "rnn_w.weight"),
    (("lm_heads.{i}.{rest}", "lm_head.{i}.{rest}"), *unchanged("lm_head.{i}.{rest}"), *SHARED),
    ("module.", "drafter."),
    beside_target=True,
)
FORMAT = HeadFormat(
    (CONVERTED, NUMBERED, REFERENCE),
    hidden=(("rnn_u.weight", 1),),
    vocabulary=("lm_head.{i}.weight",),
    kinds=MODEL_TYPE,
)


def blocks(head: Head) -> int:
    """The number of residual blocks."""
    last = [int(name.split(".")[1]) for name in matching(head, "lm_head.{i}.weight")]
    return max(last, default=sum(name.endswith(".linear.weight") for name in head))
