"""Names of reasoning formats, as `--reasoning-parser` of vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.reasoning import ReasoningMarkers
from outrider.serve.harmony import HARMONY

THINK = ReasoningMarkers("<think>", "</think>")
NAMES_OF_THINK = (
    "deepseek_r1", "deepseek_v3", "ernie45", "glm45", "kimi_k2", "minimax_m2", "olmo3", "qwen3", "step3",
)  # fmt: skip
PARSERS: Mapping[str, ReasoningMarkers] = {
    **dict.fromkeys(NAMES_OF_THINK, THINK),
    "granite": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "openai_gptoss": HARMONY,
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}


def markers_for(name: str, template: str) -> ReasoningMarkers | None:
    """The markers of a name; of "auto", those in the chat template.  None if there are none."""
    if name != "auto":
        return PARSERS.get(name)
    return next((markers for markers in PARSERS.values() if markers.end in template), None)
