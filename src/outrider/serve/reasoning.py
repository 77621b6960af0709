"""Names of reasoning formats, as `--reasoning-parser` of vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.reasoning import ReasoningMarkers, Thought, without_beginning
from outrider.serve.harmony import HARMONY

THINK = ReasoningMarkers("<think>", "</think>")
NAMES_OF_THINK = (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "exaone4", "glm45", "glm47", "holo2", "hy_v3",
    "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5",
)  # fmt: skip
ANSWER, ANSWERED = "<answer>", "\n</answer>"


class AnswerMarkers(ReasoningMarkers):
    """Reasoning of a model whose answer has markers, too: <think>…</think><answer>…</answer>"""

    def split(self, text: str, finished: bool) -> Thought:
        thought = super().split(text, finished)
        if thought.answer is None:
            return thought
        answer = thought.answer
        if not finished and ANSWER.startswith(answer):
            return thought._replace(answer=None)
        if answer.startswith(ANSWER):
            answer = answer[len(ANSWER) :].lstrip()
            start = len(text) - len(answer)
            answer = answer.removesuffix("</answer>").rstrip() if finished else _unended(answer)
            return thought._replace(answer=answer, start=start)
        return thought


def _unended(answer: str) -> str:
    """An answer without the marker at its end, or what may become it."""
    return without_beginning(answer.removesuffix(ANSWERED), ANSWERED)


PARSERS: Mapping[str, ReasoningMarkers] = {
    "hunyuan_a13b": AnswerMarkers("<think>", "</think>"),
    **dict.fromkeys(NAMES_OF_THINK, THINK),
    "granite": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
    "apertus": ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>"),
    "gemma4": ReasoningMarkers("<|channel>thought", "<channel|>"),
    "longcat": ReasoningMarkers("<longcat_think>", "</longcat_think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "openai_gptoss": HARMONY,
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}


def markers_for(name: str, template: str) -> ReasoningMarkers | None:
    """The markers of a name; of "auto", those in the chat template.  None if there are none."""
    if name != "auto":
        return PARSERS.get(name)
    own = {**PARSERS, "hunyuan_a13b": PARSERS["hunyuan_a13b" if ANSWER in template else "qwen3"]}
    return next((markers for markers in own.values() if markers.end in template), None)
