"""Published files of Hydra heads.  Ours are the reference's names, with the slots of the file.

    hydra_mlp.{i}.{slot}      block j of head i: slot j, or 2j + 1 with dropouts between them
    hydra_lm_head.{i}.1       hydra_lm_head.{i}, after a dropout
    prefix_embeding_layer     the prefix layer (the misspelling is the file's)
    input_embed_fn            a copy of the target's embedding, not read

The blocks of a head after the first are one module.  Pickles hold it under several names; files without
aliases hold it once, or several times.
"""

from __future__ import annotations

from outrider.checkpoints.heads import Head
from outrider.heads.layouts import HeadFormat, Layout, numbers, unchanged

PREFIX = "prefix_embeding_layer"
BLOCK, LM_HEAD = "hydra_mlp.{i}.{slot}.{rest}", "hydra_lm_head.{i}.{kind}"


def _refused(head: Head) -> str:
    architecture = head.config.get("hydra_head_arch", "mlp")
    if architecture == "eagle-attn":
        return "its hydra_head_arch is 'eagle-attn', which is an EAGLE head: the method eagle reads it"
    if architecture not in ("mlp", "prefix-mlp"):
        return f"its hydra_head_arch is {architecture!r}, and none of mlp, prefix-mlp and eagle-attn"
    if numbers(head, BLOCK) and not any(".res_connection." in name for name in head):
        return "its heads are not grounded: none reads the draft tokens before its own"
    return ""


ROWS = (
    *unchanged(BLOCK, LM_HEAD, f"{PREFIX}.layers.{{rest}}", f"{PREFIX}.norm.{{rest}}"),
    ("hydra_lm_head.{i}.{slot}.{kind}", LM_HEAD),
)
FORMAT = HeadFormat(
    (Layout("reference", (BLOCK,), ROWS),),
    hidden=(("hydra_mlp.0.{j}.linear.weight", 0),),
    vocabulary=("hydra_lm_head.{i}.weight",),
    numbered=("hydra_mlp.{i}.{rest}", "hydra_lm_head.{i}.{rest}"),
    keys=("hydra_head_arch",),
    known=rf"hydra_.*|{PREFIX}\.(norm|layers\.0)\..*",
    variants=(("", "a prefix of more than one layer"),),
    refused=_refused,
)
