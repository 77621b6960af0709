"""Options of a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.checkpoints.quantize import bits_of
from outrider.drafting import stop
from outrider.drafting.base import refuse_idle, refuse_parallel
from outrider.drafting.view import check
from outrider.drafting.vocab.mismatch import check_mismatch
from outrider.errors import ConfigError
from outrider.models.placement import check_gpu_layers


@dataclass(frozen=True)
class DraftModelOptions(stop.Options):
    """model: folder, .gguf file or hub id, or "self" (see window.py).  draft_dtype: auto, or as the engine's dtype.
    quantization: of the draft's weights, int8 or int4; the target's is an engine option.  siblings: candidates a level (1: a
    chain).  sibling_draws: "without" replacement or "independent", under rules that judge guesses by their laws.
    vocab_mismatch: what to do where the two have different tokens: "refuse"; "intersect", guess among the tokens that both have,
    whatever their ids; "retokenize", guess text and tokenise that; "allow", guess among the ids that both have.
    target_lookbehind, assistant_lookbehind: tokens of target and draft that "retokenize" looks at again behind the new ones.
    draft_device: auto (where the target's embedding and head are), cpu, cuda, cuda:1 or mps.  draft_gpu_layers: as the engine's
    gpu_layers.
    draft_kv_budget: how many tokens of a request the draft sees (None: all): the first draft_kv_sink and the most recent.
    drafter: the speculative_config of something cheaper that guesses ahead of the draft model (see staged.py).  When to stop
    guessing: see stop.py.
    """

    model: str = "builtin-draft"
    draft_dtype: str = "auto"
    quantization: str | None = None
    siblings: int = 1
    sibling_draws: str = "without"
    vocab_mismatch: str = "refuse"
    target_lookbehind: int = 10
    assistant_lookbehind: int = 10
    draft_tensor_parallel_size: int = 1
    revision: str | None = None
    draft_device: str = "auto"
    draft_gpu_layers: int | None = None
    draft_kv_budget: int | None = None
    draft_kv_sink: int = 4
    drafter: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must be a folder or a hub id, got {self.model!r}.")
        if (
            not isinstance(self.siblings, int)
            or isinstance(self.siblings, bool)
            or not 1 <= self.siblings <= 64
        ):
            raise ConfigError(f"siblings must be a whole number in 1 … 64, got {self.siblings!r}.")
        if self.sibling_draws not in ("without", "independent"):
            raise ConfigError(
                f'sibling_draws must be "without" or "independent", got {self.sibling_draws!r}.'
            )
        bits_of(self.quantization, "quantization of the draft")
        looks = {
            "target_lookbehind": self.target_lookbehind,
            "assistant_lookbehind": self.assistant_lookbehind,
        }
        refuse_idle(self, self.siblings > 1, "siblings > 1", "sibling_draws")
        refuse_idle(self, self.draft_kv_budget is not None, "draft_kv_budget", "draft_kv_sink")
        retokenized = self.vocab_mismatch == "retokenize"
        refuse_idle(
            self, retokenized, 'vocab_mismatch "retokenize"', "target_lookbehind", "assistant_lookbehind"
        )
        check_mismatch(self.vocab_mismatch, self.siblings, self.stops or self.drafter is not None, **looks)
        check_gpu_layers(self.draft_gpu_layers, "draft_gpu_layers")
        check(self)
        if self.drafter is not None and not isinstance(self.drafter, Mapping):
            raise ConfigError(
                f"drafter must be a speculative_config such as {{'method': …}}, got {self.drafter!r}."
            )
        if self.drafter is not None and self.siblings > 1:
            raise ConfigError(
                f"a drafter speeds up a chain, and siblings is {self.siblings}: leave one of them out."
            )
        refuse_parallel(self.draft_tensor_parallel_size)
