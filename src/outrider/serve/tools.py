"""Formats of tool calls: those of Hermes and Qwen, Qwen3-Coder, Llama 3, Granite, Mistral and gpt-oss."""

from __future__ import annotations

import re

from outrider.serve.harmony import CALL, FINAL, read_calls
from outrider.serve.tool_calls import Pieces, ToolCall, ToolParser, Tools, calls_in, end_of, listed, unmarked
from outrider.serve.tool_xml import read_xml

GRANITE = "<|tool_call|>"


def _hermes(text: str, _: Tools) -> Pieces:
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, several times."""
    pieces: Pieces = []
    for part in text.split("<tool_call>")[1:]:
        pieces += [unmarked(each) if isinstance(each, str) else each for each in listed(part)]
    return pieces


def _llama3(text: str, _: Tools) -> Pieces:
    """<|python_tag|>{"name": …, "parameters": {…}}; several are separated by semicolons."""
    begins = re.match(r"(<\|python_tag\|>)?\s*", text)
    calls, end = calls_in(text, begins.end() if begins else 0, ";", strict=True)
    return [*calls, text[end:].lstrip("; ")] if calls and end >= 0 else [*calls]


def _granite(text: str, _: Tools) -> Pieces:
    """<|tool_call|>[{"name": …, "arguments": {…}}]"""
    return listed(text.removeprefix(GRANITE))


def _mistral(text: str, _: Tools) -> Pieces:
    """[TOOL_CALLS][{"name": …, "arguments": {…}}], or [TOOL_CALLS]name[ARGS]{…}, several times."""
    pieces: Pieces = []
    for part in text.split("[TOOL_CALLS]")[1:]:
        named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)", part)
        pieces += _named(named[1], part[named.end() :]) if named else listed(part)
    return pieces


def _named(name: str, text: str) -> Pieces:
    """A call whose arguments are the JSON object at the beginning of a text."""
    end = end_of(text)
    return [ToolCall(name, text, False)] if end is None else [ToolCall(name, text[:end]), text[end:]]


HERMES = ToolParser(("<tool_call>",), _hermes)
XML = ToolParser(("<tool_call>", "<function="), read_xml)
LLAMA3 = ToolParser(("<|python_tag|>",), _llama3, bare=True)
PARSERS: dict[str, ToolParser] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3": LLAMA3,
    "llama3_json": LLAMA3,
    "mistral": ToolParser(("[TOOL_CALLS]",), _mistral),
    "qwen3_coder": XML,
    "qwen3_xml": XML,
    "granite": ToolParser((GRANITE,), _granite),
    "openai": ToolParser((CALL,), read_calls),
}


def parser_for(name: str, template: str) -> ToolParser:
    """The parser of a name; of "auto", by the markers in the chat template.  Hermes if there is none."""
    if name != "auto":
        return PARSERS[name]
    if FINAL in template:
        return PARSERS["openai"]
    if "[TOOL_CALLS]" in template:
        return PARSERS["mistral"]
    if "<function=" in template and "<parameter=" in template:
        return XML
    if f"{GRANITE}[" in template or f"'{GRANITE}'" in template:
        return PARSERS["granite"]
    llama = "<|python_tag|>" in template or ("parameters" in template and "ipython" in template)
    return PARSERS["llama3"] if llama else HERMES
