"""Names of reasoning formats, as `--reasoning-parser` of vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.reasoning import ReasoningMarkers, Thought, without_beginning
from outrider.serve.harmony import HARMONY

CALLS = ("<tool_call>", "<|tool_calls_section_begin|>")  # models forget to end their reasoning before these
THINK = ReasoningMarkers("<think>", "</think>", CALLS)
NAMES_OF_THINK = (
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "exaone4", "glm45", "glm47", "holo2", "hy_v3",
    "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5",
)  # fmt: skip


class AnswerMarkers(ReasoningMarkers):
    """Reasoning of a model whose answer has markers, too: <think>…</think><answer>…</answer>"""

    answer, answered = "<answer>", "</answer>"

    def split(self, text: str, finished: bool) -> Thought:
        thought = super().split(text, finished)
        if thought.answer is None:
            return thought
        if not finished and self.answer.startswith(thought.answer):
            return thought._replace(answer=None)
        if not thought.answer.startswith(self.answer):
            return thought
        answer = thought.answer[len(self.answer) :].lstrip()
        start = len(text) - len(answer)
        shown = answer.rstrip()
        if not finished:
            shown = without_beginning(shown, self.answered)
        return thought._replace(answer=shown.removesuffix(self.answered).rstrip(), start=start)


class ResponseMarkers(AnswerMarkers):
    """The same of ERNIE: <think>…</think><response>…</response>"""

    answer, answered = "<response>", "</response>"


HUNYUAN = AnswerMarkers("<think>", "</think>")
ERNIE = ResponseMarkers("<think>", "</think>", CALLS)
PARSERS: Mapping[str, ReasoningMarkers] = {
    "hunyuan_a13b": HUNYUAN,
    "ernie45": ERNIE,
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
    for answering in (HUNYUAN, ERNIE):
        if answering.end in template and answering.answer in template:
            return answering
    return next((markers for markers in (THINK, *PARSERS.values()) if markers.end in template), None)
