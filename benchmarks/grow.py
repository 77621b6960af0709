"""The built-in target, grown, as a plain folder for any engine that runs Llama checkpoints.

    python benchmarks/grow.py --folder DIR [--layers 24] [--mlp 3200]

DIR/target gets the grown target, DIR/draft the built-in draft, both in bfloat16.  The built-in pair is real,
but its target is only 2.5 times its draft.  Here 8 layers become 24 and an MLP of 1,024 becomes 3,200: 101 M
weights. The added weights compute and change nothing (outrider.checkpoints.grown).  So acceptance is that of
the real pair, and a forward costs that of 101 M weights.  In Outrider the same model is `builtin-100m`.  The
script compares the logits of both, computed by transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.grown import INNER, LAYERS
from outrider.checkpoints.hub import Checkpoint
from outrider.models import export

TOLERANCE = 1e-3  # of the largest difference of logits: float32 sums in another order
TEXTS = (
    "The village lies between two rivers, and",
    "def add(a, b):\n    return a",
    "Wir haben gestern im Garten gegessen, weil",
)


def llama(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype="auto")


def grown(folder: Path, layers: int, mlp: int) -> Any:
    """A transformers Llama of the same function as the checkpoint in `folder`, grown to these sizes."""
    from transformers import AutoConfig, LlamaForCausalLM

    checkpoint = Checkpoint.open(str(folder)).grown(layers, mlp)
    config, source = AutoConfig.from_pretrained(folder), checkpoint.tensors()
    config.num_hidden_layers, config.intermediate_size = layers, mlp
    large: Any = LlamaForCausalLM(config).to(checkpoint.stored_dtype)
    with torch.no_grad():
        for name, weight in large.named_parameters():
            linear = weight.dim() > 1
            layer = name.removesuffix(".weight")
            weight.copy_(source.linear(layer, *weight.shape) if linear else source.get(name, *weight.shape))
    return large


def difference(one: Any, other: Any, ids: torch.Tensor) -> float:
    """The largest difference of logits, in float32 arithmetic."""
    with torch.inference_mode():
        return float((one.float()(ids).logits - other.float()(ids).logits).abs().max())


def weights(model: Any) -> int:
    """Tied ones counted once."""
    return sum(weight.numel() for weight in model.parameters())


def write(folder: Path, layers: int = LAYERS, mlp: int = INNER) -> dict[str, Any]:
    """Writes DIR/target and DIR/draft.  Raises SystemExit where the grown target gives another text."""
    from transformers import AutoTokenizer

    source = folder / "target"
    shutil.rmtree(source, ignore_errors=True)
    export.write("builtin", source, 16)
    small, large = llama(source), grown(source, layers, mlp)
    large.generation_config = small.generation_config
    large.save_pretrained(folder / "target")  # over the small one, whose tokenizer stays
    shutil.rmtree(folder / "draft", ignore_errors=True)
    export.write("builtin-draft", folder / "draft", 16)
    ids = AutoTokenizer.from_pretrained(source)(list(TEXTS), padding=True, return_tensors="pt").input_ids
    found = difference(small, llama(folder / "target"), ids)
    if found > TOLERANCE:
        raise SystemExit(f"The grown target's logits differ by {found:.3g} (at most {TOLERANCE}).")
    draft = llama(folder / "draft")
    return {
        "layers": layers,
        "MLP": mlp,
        "weights": weights(large),
        "weights of the built-in target": weights(small),
        "draft weights / target weights": round(weights(draft) / weights(large), 4),
        "largest difference of logits": found,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--mlp", type=int, default=INNER)
    given = parser.parse_args()
    print(json.dumps(write(given.folder, given.layers, given.mlp), indent=1))
