"""Published files of Hydra heads.  Ours are the reference's names of a plain `mlp` head.

    hydra_mlp.{i}.{slot}      block j of head i: slot j, or 2j + 1 with dropouts between them
    hydra_lm_head.{i}.1       hydra_lm_head.{i}, after a dropout
    prefix_embeding_layer     the prefix layer (the misspelling is the file's)
    input_embed_fn            a copy of the target's embedding, not read

The blocks of a head after the first are one module.  Pickles hold it under several names; files without
aliases hold it once, or several times.
"""

from __future__ import annotations

from collections import defaultdict

from outrider.checkpoints.heads import Head
from outrider.errors import ModelError
from outrider.heads.layouts import HeadFormat, Layout, fill, parse

PREFIX = "prefix_embeding_layer"
BLOCK = "hydra_mlp.{i}.{slot}.{rest}"
ARCHITECTURES = ("mlp", "prefix-mlp")
FROM_TARGET = (
    "num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters",
    "rope_scaling", "max_position_embeddings",
)  # fmt: skip
FORMAT = HeadFormat(
    layouts=(
        Layout(
            "reference",
            sign=(BLOCK,),
            rows=(
                (BLOCK, BLOCK),
                ("hydra_lm_head.{i}.{kind}", "hydra_lm_head.{i}.{kind}"),
                ("hydra_lm_head.{i}.{slot}.{kind}", "hydra_lm_head.{i}.{kind}"),
                (f"{PREFIX}.layers.{{rest}}", f"{PREFIX}.layers.{{rest}}"),
                (f"{PREFIX}.norm.{{rest}}", f"{PREFIX}.norm.{{rest}}"),
            ),
        ),
    ),
    hidden=(("hydra_mlp.0.{j}.linear.weight", 0),),
    vocabulary=("hydra_lm_head.{i}.weight",),
    numbered=("hydra_mlp.{i}.{rest}", "hydra_lm_head.{i}.{rest}"),
)


def translate(head: Head) -> Head:
    """The head under our names.  Raises ModelError for a kind of head that is not supported."""
    check_kind(head)
    slots = _slots(head)

    def without_gaps(name: str) -> str:
        block = parse(BLOCK, name)
        if block is None:
            return name
        return fill(BLOCK, {**block, "slot": str(slots[block["i"]].index(int(block["slot"])))})

    return FORMAT.translate(head).renamed(without_gaps)


def check_kind(head: Head) -> None:
    """Raise ModelError for a kind of head that is not supported."""
    architecture = head.config.get("hydra_head_arch", ARCHITECTURES[0])
    what = f"{head.name!r} cannot be used as a Hydra head:"
    if architecture not in ARCHITECTURES:
        supported = " and ".join(ARCHITECTURES)
        raise ModelError(
            f"{what} its hydra_head_arch is {architecture!r}, and only {supported} are supported."
        )
    if not _slots(head):
        raise ModelError(f"{what} it has no tensor hydra_mlp.*, but {', '.join(sorted(head)[:4])} …")
    if not any(".res_connection." in name for name in head):
        raise ModelError(f"{what} its heads are not grounded: none reads the draft tokens before its own.")
    if any(name.startswith(f"{PREFIX}.layers.1.") for name in head):
        raise ModelError(f"{what} its prefix has more than one layer.")


def _slots(head: Head) -> dict[str, list[int]]:
    """The slots with tensors in the list of blocks of each head, ascending."""
    slots: defaultdict[str, set[int]] = defaultdict(set)
    for name in head:
        if block := parse(BLOCK, name):
            slots[block["i"]].add(int(block["slot"]))
    return {i: sorted(numbers) for i, numbers in slots.items()}
