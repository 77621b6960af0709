"""Hydra's published files.

    reference, prefix-mlp          ours, which is how the reference names a plain `mlp` head
    prefix_embeding_layer.*        the same (the misspelling is the file's); its unused embed_tokens and buffers are not read
    hydra_mlp.i.{1,3,5,7}.*        hydra_mlp.i.{0,1,2,3}.*: slots 0, 2, 4, 6 are dropouts
    hydra_lm_head.i.1.*            hydra_lm_head.i.*
    input_embed_fn.weight          a copy of the target's embedding, not read

The blocks of a head after the first are one module, repeated: .bin and .pt files hold it under several names, files without aliases
several times or once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from outrider.checkpoints.heads import Head
from outrider.drafting.base import Target
from outrider.errors import ModelError

PREFIX = "prefix_embeding_layer"
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)")
HEAD = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)")
ARCHS = ("mlp", "prefix-mlp")
BORROWED = (
    "num_attention_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling",
    "max_position_embeddings",
)  # fmt: skip


def translate(head: Head, target: Target) -> Head:
    """Under our names.  What the prefix layer is the config does not say, because it is a layer of the target: the target's does.

    Raises ModelError for a kind of head that is not supported.
    """
    slots = _slots(head)
    check_kind(head)

    def change(name: str) -> str | None:
        if found := BLOCK.fullmatch(name):
            return f"hydra_mlp.{found[1]}.{slots[found[1]].index(int(found[2]))}.{found[3]}"
        if found := HEAD.fullmatch(name):
            return f"hydra_lm_head.{found[1]}.{found[2]}"
        return name if name.startswith((f"{PREFIX}.layers.", f"{PREFIX}.norm.")) else None

    own = dict(head.config)
    if "num_attention_heads" not in own:
        own = {
            name: value
            for name in BORROWED
            if (value := getattr(target.checkpoint.config, name, None)) is not None
        } | own
    return replace(head.renamed(change), config=own)


def check_kind(head: Head) -> None:
    """Raises ModelError for a kind of head that is not supported."""
    arch, what = (
        head.config.get("hydra_head_arch", ARCHS[0]),
        f"{head.name!r} cannot be used as a Hydra head:",
    )
    if arch not in ARCHS:
        raise ModelError(
            f"{what} its hydra_head_arch is {arch!r}, and only {' and '.join(ARCHS)} are supported."
        )
    if not _slots(head):
        raise ModelError(f"{what} it has no tensor hydra_mlp.*, but {', '.join(sorted(head)[:4])} …")
    if not any(".res_connection." in name for name in head):
        raise ModelError(
            f"{what} its heads are not grounded, which means that none knows what the others guess."
        )
    if any(name.startswith(f"{PREFIX}.layers.1.") for name in head):
        raise ModelError(f"{what} its prefix has more than one layer.")


def prefixed(head: Head) -> bool:
    return head.config.get("hydra_head_arch") == "prefix-mlp" or any(name.startswith(PREFIX) for name in head)


def claims_of(head: Head) -> int:
    return 2 if _slots(head) else int("hydra_head_arch" in head.config)


def _slots(head: Head) -> dict[str, list[int]]:
    """Head -> where in its list its blocks are; what is between them has no tensors."""
    found: dict[str, set[int]] = defaultdict(set)
    for block in filter(None, map(BLOCK.fullmatch, head)):
        found[block[1]].add(int(block[2]))
    return {i: sorted(slots) for i, slots in found.items()}
