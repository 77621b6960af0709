"""The built-in target, grown: the same function at the cost of a larger model, for any engine that runs Llama checkpoints.

    python benchmarks/grow.py --folder DIR [--layers 24] [--mlp 3200]

DIR/target gets the grown target, DIR/draft the built-in draft, both as plain Hugging Face folders.  The built-in pair is real, but its
target is only 2.5 times its draft; here 8 layers become 24 and an MLP of 1,024 becomes 3,200, which makes 101 M weights.  What is added
computes: its input projections (q, k, v, gate, up) are random.  It adds nothing: its output projections (o, down) are zero, with random
signs, since a converter that stores equal tensors once would make them cheaper.  So acceptance is that of the real pair and a forward
costs what 101 M weights cost.  The script compares the logits of both, computed by transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from outrider.models import export

LAYERS, MLP = 24, 3200
SPREAD = 0.02  # standard deviation of the added weights, as Llama starts with
TOLERANCE = 1e-3  # of the largest difference of logits: float32 sums in another order
TEXTS = (
    "The village lies between two rivers, and",
    "def add(a, b):\n    return a",
    "Wir haben gestern im Garten gegessen, weil",
)


def llama(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype="auto")


def grown(small: Any, layers: int, mlp: int, seed: int = 0) -> Any:
    """A Llama that computes what `small` does with so many layers and so wide an MLP; added layers are spread among the others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = small.config.num_hidden_layers
    if layers < before or mlp < small.config.intermediate_size:
        raise SystemExit(
            f"The target has {before} layers and an MLP of {small.config.intermediate_size}: a grown one has at least these."
        )
    config = LlamaConfig(**{**small.config.to_dict(), "num_hidden_layers": layers, "intermediate_size": mlp})
    large: Any = LlamaForCausalLM(config).to(small.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in large.named_parameters():
            if weight.dim() > 1:
                scale = 0.0 if name.endswith(("o_proj.weight", "down_proj.weight")) else SPREAD
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        for i, layer in enumerate(small.model.layers):
            _place(layer, large.model.layers[i * layers // before])
        for part in ("embed_tokens", "norm"):
            _place(getattr(small.model, part), getattr(large.model, part))
        _place(small.lm_head, large.lm_head)
    large.generation_config = small.generation_config
    return large


def _place(small: Any, large: Any) -> None:
    """Copies weights into the first rows and columns."""
    into = dict(large.named_parameters())
    for name, weight in small.named_parameters():
        into[name][tuple(map(slice, weight.shape))] = weight


def difference(one: Any, other: Any, ids: torch.Tensor) -> float:
    """The largest difference of logits, in float32 arithmetic."""
    with torch.inference_mode():
        return float((one.float()(ids).logits - other.float()(ids).logits).abs().max())


def weights(model: Any) -> int:
    """Tied ones counted once."""
    return sum(weight.numel() for weight in model.parameters())


def write(folder: Path, layers: int = LAYERS, mlp: int = MLP) -> dict[str, Any]:
    """Writes DIR/target and DIR/draft.  Raises SystemExit where the grown target says something else."""
    from transformers import AutoTokenizer

    source = folder / "target"
    shutil.rmtree(source, ignore_errors=True)
    export.write("builtin", source, 16)
    small = llama(source)
    large = grown(small, layers, mlp)
    large.save_pretrained(folder / "target")  # over the small one, whose tokenizer stays
    shutil.rmtree(folder / "draft", ignore_errors=True)
    export.write("builtin-draft", folder / "draft", 16)
    ids = AutoTokenizer.from_pretrained(source)(list(TEXTS), padding=True, return_tensors="pt").input_ids
    found = difference(small, llama(folder / "target"), ids)
    if found > TOLERANCE:
        raise SystemExit(f"The grown target's logits differ by {found:.3g} (at most {TOLERANCE}).")
    draft = llama(folder / "draft")
    return {
        "layers": layers, "MLP": mlp, "weights": weights(large), "weights of the built-in target": weights(small),
        "draft weights / target weights": round(weights(draft) / weights(large), 4), "largest difference of logits": found,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--mlp", type=int, default=MLP)
    given = parser.parse_args()
    print(json.dumps(write(given.folder, given.layers, given.mlp), indent=1))
