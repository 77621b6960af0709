"""Options of a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from outrider.checkpoints.quantize import Quantization
from outrider.core.validate import Count, Flag, Kind, Natural, Text, one_of, whole
from outrider.drafting import stop, view
from outrider.drafting.options import refuse_idle
from outrider.drafting.vocab.mismatch import MISMATCH, check_mismatch
from outrider.errors import ConfigError

MODEL = Kind("a folder or a hub id", lambda value: isinstance(value, str) and value != "")
DRAFTER = Kind("a speculative_config such as {'method': …}", lambda value: isinstance(value, Mapping))


@dataclass(frozen=True)
class DraftModelOptions(stop.Options):
    """Options of a draft model; drafting/stop.py adds those for stopping a draft early.

    model: folder, .gguf file or hub id, or "self" (drafting/view.py).  None: for a built-in target the
        built-in draft model; others need one.
    draft_dtype: "auto", or as the engine's dtype.
    quantization: of the draft's weights, int8 or int4; the target's is an engine option.
    siblings: candidates at each depth; 1 drafts a chain.
    sibling_draws: siblings sampled "without" replacement or "independent", or "greedy": the likeliest ones
        and one sample of the others; if the verification rule needs q.
    vocab_mismatch: what to do if the vocabularies differ: "refuse"; "intersect": draft among the tokens that
        both have, under any ids; "retokenize": draft text and tokenize it again; "allow": draft among
        the ids that both have.
    target_lookbehind, assistant_lookbehind: tokens of target and draft that "retokenize" reads again after
        new ones.
    draft_device: "auto" (that of the target's embedding and head), cpu, cuda, cuda:1 or mps.
    draft_gpu_layers: as the engine's gpu_layers.
    draft_tensor_parallel_size: 1: on rank 0; the target's tensor_parallel_size: divided like the target.
    draft_kv_budget: tokens of a request that the draft sees: the first draft_kv_sink and the most recent.
        None: all.
    draft_kv_policy: "recent"; "retrieval": half of the budget for pages that the target's queries prefer, if
        the target is its own draft (retrieval.py).
    draft_kv_refresh: steps after which these pages are chosen again.
    drafter: the speculative_config of a cheaper drafter that drafts for the draft model (staged.py).
    parallel_drafting: draft all tokens in one forward, with a PARD model (one_pass.py); None: if there is a
        mask token.
    mask_token_id: that of a PARD model; None: `pard_token` of its config.
    """

    model: Annotated[str, MODEL] | None = None
    draft_dtype: str = "auto"
    quantization: Quantization | None = None
    siblings: Annotated[int, whole(1, 64)] = 1
    sibling_draws: Annotated[str, one_of("without", "independent", "greedy")] = "without"
    vocab_mismatch: Annotated[str, one_of(*MISMATCH)] = "refuse"
    target_lookbehind: Count = 10
    assistant_lookbehind: Count = 10
    draft_tensor_parallel_size: Count = 1
    revision: Text | None = None
    draft_device: str = "auto"
    draft_gpu_layers: Natural | None = None
    draft_kv_budget: int | None = None
    draft_kv_sink: Natural = 4
    draft_kv_policy: Annotated[str, one_of("recent", "retrieval")] = "recent"
    draft_kv_refresh: Count = 8
    drafter: Annotated[Mapping[str, Any], DRAFTER] | None = None
    parallel_drafting: Flag | None = None
    mask_token_id: Natural | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        lookbehind = ("target_lookbehind", "assistant_lookbehind")
        refuse_idle(self, self.siblings > 1, "siblings > 1", "sibling_draws")
        refuse_idle(self, self.parallel_drafting is not False, "parallel_drafting", "mask_token_id")
        refuse_idle(
            self, self.draft_kv_budget is not None, "draft_kv_budget", "draft_kv_sink", "draft_kv_policy"
        )
        retrieves = self.draft_kv_policy == "retrieval"
        refuse_idle(self, retrieves, 'draft_kv_policy "retrieval"', "draft_kv_refresh")
        refuse_idle(self, self.vocab_mismatch == "retokenize", 'vocab_mismatch "retokenize"', *lookbehind)
        check_mismatch(self.vocab_mismatch, self.siblings, self.stops or self.drafter is not None)
        view.check(self)
        if self.drafter is not None and self.siblings > 1:
            raise ConfigError(
                f"a drafter speeds up a chain, and siblings is {self.siblings}: leave one of them out."
            )
        if self.model == view.SELF and (self.parallel_drafting or self.mask_token_id is not None):
            raise ConfigError(
                'parallel_drafting is of PARD models, and model "self" is the target: give a PARD model, or '
                "leave parallel_drafting and mask_token_id out."
            )
        placed = self.draft_device != "auto" or self.draft_gpu_layers is not None
        if self.draft_tensor_parallel_size > 1 and placed:
            raise ConfigError(
                "a draft with draft_tensor_parallel_size runs where the target does: leave draft_device and "
                "draft_gpu_layers out."
            )
