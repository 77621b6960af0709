"""Formats of tool calls by vLLM's names, and the choice of one by a chat template."""

from __future__ import annotations

import re

from outrider.serve.formats.objects import BY_KEY, Objects, behind, named
from outrider.serve.formats.python_calls import BARE, GemmaCalls, PythonCalls
from outrider.serve.formats.tags import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM,
    MINICPM,
    MINIMAX,
    QWEN3,
    SEED,
    STEP3,
    STEP3_MARKERS,
)
from outrider.serve.harmony import BARE_CALL, CALL, FINAL, RECIPIENT_FIRST, read_calls
from outrider.serve.ids import derived
from outrider.serve.tool_calls import STRICT, Pieces, ToolParser, Tools, calls_in

TOOL_CALL, GRANITE, ACTION, CALLS = "<tool_call>", "<|tool_call|>", "<|action_start|>", "<tool_calls>"
DEEPSEEK_MARKERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
KIMI_MARKERS = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>")
LLAMA_MARKERS = ("<|python_tag|>", "<|python_start|>")
XLAM_MARKERS = ("```json", "[TOOL_CALLS]", TOOL_CALL)
GIGACHAT_MARKERS = ("<|message_sep|>", "function call<|role_sep|>\n", "<|function_call|>")
PHI_MARKERS = ("functools[", GRANITE)


def _llama3(text: str, _: Tools) -> Pieces:
    """<|python_tag|>{"name": …, "parameters": {…}}; several are separated by semicolons."""
    begins = re.match(r"(?:<\|python_(?:tag|start)\|>)?\s*", text)
    found = calls_in(text, begins.end() if begins else 0, ";", STRICT)
    rest = text[found.end :].lstrip("; ").removeprefix("<|python_end|>")
    return [*found.calls, rest] if found.calls and found.complete else [*found.calls]


def _kimi_id(name: str, number: int, _: str) -> str:
    """An id as Kimi K2 writes it: its chat template repeats ids, and the model goes on as it sees there."""
    return f"functions.{name}:{number}"


def _mistral_id(name: str, number: int, own: str) -> str:
    """Nine letters and digits: Mistral's chat templates refuse other ids."""
    return derived("", own)[:9]


# [TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…}, several times
MISTRAL_READER = Objects(
    re.compile(
        r"\[TOOL_CALLS\](?:\s*(?P<name>[\w.-]+)\s*+(?:\[CALL_ID\]\s*(?P<id>\w+)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
        r"|(?=\s*[\[{]))"
    ),
    ("[TOOL_CALLS]",),
)
# <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{…}\n```, since V3.1 name<｜tool▁sep｜>{…}
DEEPSEEK_READER = named(
    r"<｜tool▁call▁begin｜>\s*(?:function\s*<｜tool▁sep｜>)?(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>|```(?:json)?)",
    DEEPSEEK_MARKERS,
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
# <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
KIMI_READER = named(
    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)"
    r"\s*<\|tool_call_argument_begin\|>",
    KIMI_MARKERS,
    ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)
INTERNLM_READER = Objects(
    re.compile(r"<\|action_start\|>\s*<\|plugin\|>(?=\s*[\[{])"), (ACTION,), ("<|action_end|>",)
)
PHI_READER = Objects(
    re.compile(r"functools(?=\[)|<\|tool_call\|>(?=\s*\[)"), PHI_MARKERS, ("<|/tool_call|>",)
)
XLAM_READER = Objects(
    re.compile(r"(?:```json|\[TOOL_CALLS\]|<tool_call>)(?=\s*[\[{])|\A(?=\s*\[\s*\{)"),
    XLAM_MARKERS,
    ("```", "</tool_call>"),
)
GIGACHAT_READER = Objects(
    re.compile(r"(?:function call<\|role_sep\|>\n|<\|function_call\|>)(?=\s*\{)"),
    GIGACHAT_MARKERS,
    ("<|message_sep|>",),
)

HERMES = ToolParser((TOOL_CALL,), behind(TOOL_CALL, closings=("</tool_call>",)))
XML = ToolParser((TOOL_CALL, "<function="), QWEN3)
LLAMA3 = ToolParser(LLAMA_MARKERS, _llama3, re.compile(r"\s*\{"))
DEEPSEEK = ToolParser(DEEPSEEK_MARKERS, DEEPSEEK_READER)
TOOL_CALLS = ToolParser((CALLS,), behind(CALLS, closings=("</tool_calls>",), separator=",?"))
GLM45 = ToolParser(("<tool_calls>", TOOL_CALL), GLM)
PYTHONIC = ToolParser((), PythonCalls(), BARE)
PARSERS: dict[str, ToolParser] = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "ernie45", "granite4"), HERMES),
    **dict.fromkeys(("llama3", "llama3_json", "llama4_json"), LLAMA3),
    "mistral": ToolParser(("[TOOL_CALLS]",), MISTRAL_READER, new_id=_mistral_id),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "mimo", "nemotron_v3", "step3p5"), XML),
    "granite": ToolParser((GRANITE, TOOL_CALL), behind(GRANITE, TOOL_CALL, closings=("</tool_call>",))),
    "granite-20b-fc": ToolParser(("<function_call>",), behind("<function_call>")),
    "openai": ToolParser((CALL, RECIPIENT_FIRST), read_calls, BARE_CALL),
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), DEEPSEEK),
    "deepseek_v32": ToolParser(DEEPSEEK_V32.openings, DEEPSEEK_V32),
    "deepseek_v4": ToolParser(DEEPSEEK_V4.openings, DEEPSEEK_V4),
    **dict.fromkeys(("glm45", "glm47", "poolside_v1", "hy_v3"), GLM45),
    "kimi_k2": ToolParser(KIMI_MARKERS, KIMI_READER, new_id=_kimi_id),
    "pythonic": PYTHONIC,
    "llama4_pythonic": ToolParser(
        ("<|python_start|>",), PythonCalls(("<|python_start|>",), ("<|python_end|>",)), BARE
    ),
    "lfm2": ToolParser(
        ("<|tool_call_start|>",), PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",))
    ),
    "olmo3": ToolParser(("<function_calls>",), PythonCalls(("<function_calls>",), ("</function_calls>",))),
    "functiongemma": ToolParser(
        ("<start_function_call>",), GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
    ),
    "gemma4": ToolParser(("<|tool_call>",), GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')),
    "phi4_mini_json": ToolParser(PHI_MARKERS, PHI_READER),
    "internlm": ToolParser((ACTION,), INTERNLM_READER),
    **dict.fromkeys(("jamba", "hunyuan_a13b", "minimax"), TOOL_CALLS),
    "minimax_m2": ToolParser(MINIMAX.openings, MINIMAX),
    "minicpm5": ToolParser(("<function name=",), MINICPM),
    "seed_oss": ToolParser((*SEED.openings, "<function="), SEED),
    "step3": ToolParser(STEP3_MARKERS, STEP3),
    "xlam": ToolParser(XLAM_MARKERS, XLAM_READER, re.compile(r"\s*\[\s*(?:\{|$)")),
    "longcat": ToolParser(
        ("<longcat_tool_call>",), behind("<longcat_tool_call>", closings=("</longcat_tool_call>",))
    ),
    "gigachat3": ToolParser(GIGACHAT_MARKERS, GIGACHAT_READER),
    "apertus": ToolParser(
        ("<|tools_prefix|>",), behind("<|tools_prefix|>", closings=("<|tools_suffix|>",), shape=BY_KEY)
    ),
    "nemotron_json": ToolParser(("<TOOLCALL>",), behind("<TOOLCALL>", closings=("</TOOLCALL>",))),
}
# texts that are all in the chat template of a format -> its name; the first entry that fits counts
IN_TEMPLATES: tuple[tuple[tuple[str, ...], str], ...] = (
    ((FINAL,), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    ((f"{GRANITE}[",), "granite"),
    ((f"'{GRANITE}'",), "granite"),
    ((DEEPSEEK_MARKERS[0],), "deepseek_v3"),
    (("｜DSML｜", "function_calls"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls"), "deepseek_v4"),
    ((KIMI_MARKERS[0],), "kimi_k2"),
    (("<arg_key>",), "glm45"),
    (MINIMAX.openings, "minimax_m2"),
    (("steptml:invoke",), "step3"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>call:",), "gemma4"),
    ((ACTION, "<|plugin|>"), "internlm"),
    (("functools[",), "phi4_mini_json"),
    (("<|tools_prefix|>",), "apertus"),
    (("<TOOLCALL>",), "nemotron_json"),
    (('<function name="',), "minicpm5"),
    (("<tool_calls>",), "jamba"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3"),
    (("parameters", "ipython"), "llama3"),
)


def parser_for(name: str, template: str) -> ToolParser:
    """The parser of a name; of "auto", by the texts in the chat template.  Hermes if there are none."""
    if name != "auto":
        return PARSERS[name]
    fitting = (own for texts, own in IN_TEMPLATES if all(text in template for text in texts))
    return PARSERS[next(fitting, "hermes")]
