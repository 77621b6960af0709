"""Every drafter under test by name, and the outputs of plain decoding to compare with."""

from __future__ import annotations

from typing import Any

from helpers import answer

from outrider import LLM, RequestOutput, SamplingParams, draft
from outrider.testing import KnownTexts, Scripts, use_example

DEPTH = 6  # num_speculative_tokens of scripted drafters, except "deep"
SCRIPTS = ("right", "wrong", "wide", "deep", "hidden", "huge", "messy")
DRAFT_MODELS: dict[str, dict[str, Any]] = {
    "chain": {},
    "siblings": {"siblings": 3},
    "window": {"draft_kv_budget": 6, "draft_kv_sink": 2},
    "self": {"model": "self", "draft_kv_budget": 12},
    "retrieval": {
        "model": "self",
        "draft_kv_policy": "retrieval",
        "draft_kv_budget": 32,
        "draft_kv_sink": 0,
        "draft_kv_refresh": 1,
    },
    "stops": {
        "siblings": 2,
        "assistant_confidence_threshold": 0.2,
        "assistant_confidence_schedule": "refit",
        "entropy_threshold": 0.3,
        "num_assistant_tokens_schedule": "heuristic_transient",
        "num_assistant_tokens": 3,
    },
    "masks": {"parallel_drafting": True, "mask_token_id": 7, "draft_kv_budget": 6, "draft_kv_sink": 2},
    "staged": {"drafter": {"method": "recycle", "min_token_prob": 0.0}},
}
ADAPTIVE = ("draft_model", "lookahead", "union", "layerskip")
DRAFTERS = [
    *draft.names(),
    *(f"scripted:{name}" for name in SCRIPTS),
    *(f"draft_model:{kind}" for kind in DRAFT_MODELS),
    *(f"adaptive:{name}" for name in ADAPTIVE),
]
# Those that draft every kind of tree; the trees of the others are of these kinds, too.
KINDS = [
    name for name in DRAFTERS if ":" in name or name in ("auto", "off", "draft_model", "eagle3", "union")
]
OTHERS = [name for name in DRAFTERS if name not in KINDS]


def use_drafter(llm: LLM, drafter: str, known: KnownTexts, draft_model: str) -> None:
    """Put one of `DRAFTERS` to work.

    known: the texts that scripts look up. draft_model: the checkpoint of draft models.
    """
    name, _, kind = drafter.partition(":")
    if name == "scripted" and kind:
        depth, script = 20 if kind == "deep" else DEPTH, getattr(Scripts(known), kind)
        llm.use({"method": name, "script": script, "nodes": 110, "num_speculative_tokens": depth})
    elif name == "adaptive":
        use_example(llm, kind, adaptive=True)
    elif kind:
        llm.use({"method": name, "model": draft_model, "num_speculative_tokens": 4, **DRAFT_MODELS[kind]})
    else:
        use_example(llm, name)


class PlainOutputs:
    """Outputs of plain decoding, each prompt alone; remembered."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._outputs: dict[Any, RequestOutput] = {}

    def __call__(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        key = tuple(prompt), params, self.llm.engine.ending
        if key not in self._outputs:
            self._outputs[key] = answer(self.llm, prompt, params)
        return self._outputs[key]
