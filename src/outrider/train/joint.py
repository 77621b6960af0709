"""Joint training of Medusa's heads and the target (Medusa-2, arXiv 2401.10774, section 2.2).

The target learns through a LoRA adapter, on top of frozen weights.  It is held to its own former distribution
(self-distillation, section 2.3), while the heads' loss makes its states easier to predict from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.core.step import FINAL
from outrider.draft.medusa import Network
from outrider.drafting.base import Target
from outrider.errors import ConfigError
from outrider.heads.sample import Sample, TargetWeights
from outrider.models.differentiable import load_weights, new_module
from outrider.train.base import replace_tensors, replace_text

HEADS = 0.2  # weight of the heads' loss
SCALE = 0.25  # of an update: the publication trains the target at a quarter of the heads' rate
WEIGHTS = "adapter_model.safetensors"


class Update(nn.Module):
    """B(A x), zero at first, added to the output of a linear."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        linear.register_forward_hook(self.added)

    def added(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(inputs[0]))
        return output + SCALE * update


class Joint(nn.Module):
    """Medusa's heads, and updates of all linears in the target's layers."""

    def __init__(self, heads: Network, target: Target, rank: int) -> None:
        super().__init__()
        module = new_module(target.checkpoint.config)
        load_weights(module, target.checkpoint)
        module.eval().requires_grad_(False).to(target.decoder.device)
        self.heads, self.rank = heads, rank
        self.target: tuple[Any] = (module,)  # hidden: its weights are neither trained nor saved
        self.updates = nn.ModuleDict()
        for name, part in list(module.named_modules()):
            if isinstance(part, nn.Linear) and ".layers." in name:
                self.updates[name.replace(".", "/")] = Update(part, rank)

    def states(self, tokens: Tensor) -> Tensor:
        """float32 [T, hidden]: FINAL of the changed target."""
        found: Tensor = self.target[0].base_model(tokens[None], use_cache=False).last_hidden_state
        return found[0].float()

    def loss(self, sample: Sample, outer: TargetWeights) -> Tensor:
        states, places = self.states(sample.tokens), sample.places(0, len(sample.tokens))
        own = sample.target_loss(outer.logits(states[places]), places)
        return own + HEADS * self.heads.loss(replace(sample, states={FINAL: states}), outer)

    def load_adapter(self, folder: Path) -> None:
        """Load the adapter of an earlier run.  Raises ConfigError for one of another shape."""
        try:
            found, own = load_file(folder / WEIGHTS), self.updates.state_dict()
            self.updates.load_state_dict({name: found[_published(name)] for name in own})
        except (OSError, KeyError, RuntimeError) as error:
            raise ConfigError(
                f"init: {str(folder)!r} is no adapter of this rank and target: {error}"
            ) from error

    def save_adapter(self, folder: Path) -> None:
        """Write the updates in PEFT's format."""
        folder.mkdir(parents=True, exist_ok=True)
        stored = {_published(name): tensor.cpu() for name, tensor in self.updates.state_dict().items()}
        replace_tensors(folder / WEIGHTS, stored)
        modules = sorted({name.rpartition("/")[2] for name in self.updates})
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": SCALE * self.rank, "bias": "none"}
        replace_text(folder / "adapter_config.json", json.dumps({**config, "target_modules": modules}) + "\n")


def _published(name: str) -> str:
    return f"base_model.model.{name.replace('/', '.')}"
